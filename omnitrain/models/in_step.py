"""Ranks that run a model together without a step plan: in evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.models.encoding import Share, num_calls
from omnitrain.models.hf_samples import idle_sample
from omnitrain.models.native import special_ids
from omnitrain.peers import Peers


def in_step(model: Any, packs: Sequence[Pack], peers: Peers) -> Iterator[tuple[Pack, Share]]:
    """This rank's packs and, behind them, idle ones, until there are as many as on the rank with the most.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        packs: of this rank; may be none.
        peers: all of them call this, and run each pack before they ask for the next.

    Yields:
        A pack, and what all ranks do beside it.
    """
    rounds = peers.most({"packs": len(packs)})["packs"]
    calls = {(i, name): calls for i, pack in enumerate(packs) for name, calls in num_calls(model, pack).items()}
    most = peers.most(calls)
    heads = peers.most({(i, name): 1 for i, pack in enumerate(packs) for name in pack.targets})
    for number in range(rounds):
        share = Share(
            calls={name: times for (where, name), times in most.items() if where == number},
            heads={name for where, name in heads if where == number},
        )
        yield (packs[number] if number < len(packs) else Pack.from_samples([idle_prompt(model)])), share


def idle_prompt(model: Any, num_tokens: int = 2) -> Sample:
    """Ordinary tokens, for a rank that has no sample.

    Args:
        model: an :class:`omnitrain.models.omni.OmniModel`.
        num_tokens: how many.
    """
    special = special_ids(model.foundation.config)
    return idle_sample(model.runner.native, next(token for token in count() if token not in special), num_tokens)
