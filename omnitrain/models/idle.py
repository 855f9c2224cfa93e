"""Taking part without data: a component called on its smallest input, so that every rank calls it equally often.

A sharded module gathers its weights when it is called and scatters gradients in its backward. A rank that called it
less often than the others would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from omnitrain.data.pack import MediaBatch, MediaGroup, Pack
from omnitrain.data.sample import NATIVE_PREFIX, Sample
from omnitrain.models.hf_samples import idle_sample
from omnitrain.models.native import special_ids
from omnitrain.models.peers import Peers


def num_calls(model: Any, pack: Pack) -> dict[str, int]:
    """How often a rank calls each component for a pack.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        pack: a micro-batch.
    """
    batches: dict[str, MediaBatch] = {**pack.inputs, **pack.targets}
    return {name: len(_calls(model, name, batch)) for name, batch in batches.items()}


def _calls(model: Any, name: str, batch: MediaBatch) -> Sequence[MediaGroup]:
    if name.startswith(NATIVE_PREFIX):
        return model.runner.calls(name.removeprefix(NATIVE_PREFIX), batch)
    return batch.groups


def in_step(model: Any, packs: Sequence[Pack], peers: Peers) -> Iterator[tuple[Pack, dict[str, int]]]:
    """This rank's packs and, behind them, idle ones, until there are as many as on the rank with the most.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        packs: of this rank; may be none.
        peers: all of them call this, and run each pack before they ask for the next.

    Yields:
        A pack, and how often each component is to be called beside it.
    """
    made = [num_calls(model, pack) for pack in packs]
    rounds = peers.most({"packs": len(packs)})["packs"]
    most = peers.most({(number, name): calls for number, one in enumerate(made) for name, calls in one.items()})
    for number in range(rounds):
        calls = {name: times for (where, name), times in most.items() if where == number}
        yield (packs[number] if number < len(packs) else Pack.from_samples([idle_prompt(model)])), calls


def idle_prompt(model: Any) -> Sample:
    """Two ordinary tokens, for a rank that has no sample.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
    """
    special = special_ids(model.foundation.config)
    return idle_sample(model.runner.native, next(token for token in count() if token not in special))


def idle_rows(model: Any, name: str) -> list[Tensor]:
    """Everything that a component makes of its smallest input.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        name: component, or ``foundation.image``, ``foundation.audio``, ``foundation.video``.
    """
    if name.startswith(NATIVE_PREFIX):
        port = model.runner.native.ports[name.removeprefix(NATIVE_PREFIX)]
        features = {key: value.to(model.device) for key, value in port.minimal_input().items()}
        return port.encode(model.foundation, features).tensors()
    features, num_tokens = model.get_submodule(name).minimal_input()
    moved = {key: value.to(model.device) for key, value in features.items()}
    encoded = model.get_submodule(name).lm_encode(moved, num_tokens)
    if name not in model.decoder_names:
        return [encoded]
    embeds, labels = encoded
    return [embeds, model.get_submodule(name).lm_head(embeds, labels).sum]


def tied(term: Tensor, idle: Iterable[Tensor]) -> Tensor:
    """``term``, with a gradient of zero for everything that made ``idle``."""
    zeros = [tensor.float().sum() * 0.0 for tensor in idle]
    return term + torch.stack(zeros).sum() if zeros else term
