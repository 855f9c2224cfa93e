"""Ranks that run a model together without a step plan: in evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.discovery import MediaFeatures, special_ids
from omnitrain.models.omni.encode import MicroBatchWork, num_calls, with_all_inputs
from omnitrain.peers import Peers, all_or_raise

_IDLE = "idle"  # source and id of samples for ranks without data; real data may use the same name


def in_step(model: Any, packs: Sequence[Pack], peers: Peers) -> Iterator[tuple[Pack, MicroBatchWork]]:
    """Yield this rank's packs, then idle ones, as many as the rank with the most packs has.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        packs: this rank's packs; may be empty.
        peers: the ranks; all of them must call this, and run each pack before they take the next one.

    Yields:
        A pack, and this rank's work for it.

    Raises:
        UserError: raised on all ranks if the foundation's own forward reads a pack, and the model is a pipeline; or if
            other ranks have encoders, and do not listen.
    """
    if model.relay.is_cut:  # before any stage waits for another
        all_or_raise(peers, lambda: [model.runner.in_forward.require_whole_model(pack) for pack in packs])
    packs = [with_all_inputs(model, pack) for pack in packs]
    rounds = peers.most({"packs": len(packs)})["packs"]
    calls = {(i, name): calls for i, pack in enumerate(packs) for name, calls in num_calls(model, pack).items()}
    most = peers.most(calls)
    heads = peers.most({(i, name): 1 for i, pack in enumerate(packs) for name in pack.targets})
    for number in range(rounds):
        pack = packs[number] if number < len(packs) else Pack.from_samples([idle_prompt(model)])
        numbers = {name: times for (where, name), times in most.items() if where == number}
        features = {} if model.ask is None else _asked(model, pack, numbers)
        yield pack, MicroBatchWork({name for where, name in heads if where == number}, None, features, numbers)


def _asked(model: Any, pack: Pack, numbers: Mapping[str, int]) -> dict[str, MediaFeatures]:
    """Ask for the features of a pack on the first stage. The ranks of other stages raise its errors, too."""
    found: dict[str, MediaFeatures] = {}
    model.relay.from_first(lambda: found.update(model.ask(pack, numbers)))
    return found


def idle_prompt(model: Any, num_tokens: int = 2) -> Sample:
    """Return a sample of ordinary tokens without a loss, for a rank that has no sample.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        num_tokens: number of tokens.
    """
    native, special = model.runner.native, special_ids(model.foundation.config)
    ids = np.full(num_tokens, next(token for token in count() if token not in special), dtype=np.int64)
    trained = np.zeros(num_tokens, dtype=bool)
    extras = native.extras(ids, trained)
    return Sample(_IDLE, _IDLE, ids, trained, native.positions(ids, {}, extras), index=-1, token_inputs=extras)
