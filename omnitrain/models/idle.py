"""Taking part without data: a component called on its smallest input, so that every rank calls it equally often.

A sharded module gathers its weights when it is called and scatters gradients in its backward. A rank that called it
less often than the others would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from omnitrain.data.pack import MediaBatch, MediaGroup, Pack
from omnitrain.data.sample import NATIVE_PREFIX


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


def idle_rows(model: Any, name: str) -> list[Tensor]:
    """The rows that a component makes of its smallest input.

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
    return [encoded[0] if name in model.decoder_names else encoded]


def idle_loss(model: Any, name: str, hidden: Tensor) -> Tensor:
    """What a decoder's head makes of one row, for a rank without targets for it.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        name: of the decoder.
        hidden: ``[1, T, hidden]``, of which the row has the size and type.
    """
    row = torch.zeros_like(hidden[0, :1])
    return model.get_submodule(name).lm_head(row, row.new_zeros(1, dtype=torch.long)).sum


def tied(term: Tensor, idle: Iterable[Tensor]) -> Tensor:
    """``term``, with a gradient of zero for everything that made ``idle``."""
    zeros = [tensor.float().sum() * 0.0 for tensor in idle]
    return term + torch.stack(zeros).sum() if zeros else term
