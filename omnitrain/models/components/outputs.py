"""The results of a model's forward, and of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from omnitrain.data.packing.pack import MediaBatch, MediaGroup
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.plan.ragged import runs_within


class FoundationOutput(NamedTuple):
    """Output of the foundation over one pack."""

    text: LossTerm  # the language model's loss
    # ``[1, T, hidden]``, the last hidden states, with gradient; None for a model that does not call its head as a
    # module. Of a pack that several ranks share, each rank has its own tokens.
    hidden: torch.Tensor | None
    compared: Mapping[str, LossTerm] = MappingProxyType({})  # teacher -> the divergence from it


class StatesApart(NamedTuple):
    """The hidden states of a pack from which other ranks predict the tokens of a decoder."""

    # ``[n, hidden]``, of all tokens of the decoder; zeros where another rank of those that share the pack has the state
    states: torch.Tensor
    here: torch.Tensor  # ``[m]`` int64, which of them this rank has, on the host
    read: torch.Tensor  # ``[m]`` int64, the token of the pack that has each of these states, on the host


@dataclass(frozen=True)
class OmniOutput:
    """Output of :meth:`OmniModel.forward`. If ranks share a sequence, each rank has only its tokens.

    ``read``: loss -> ``[n]`` int64, the token of the pack from which each entry of its ``rows`` was predicted; on the
    host. ``hidden``: ``[1, T, hidden]``, the last hidden states, without gradient; None: the model hides them. In
    training, tokens that no loss reads are not computed (``model.ops.unread_rows``).
    """

    losses: dict[str, LossTerm]  # ``text``, name of a decoder or teacher -> :class:`LossTerm`
    read: dict[str, torch.Tensor]
    hidden: torch.Tensor | None
    apart: dict[str, StatesApart] = field(default_factory=dict)  # of decoders whose losses other ranks compute

    @property
    def loss(self) -> torch.Tensor:
        """Scalar: the mean losses of all heads added up, for a step of one pack in one process."""
        return torch.stack([term.sum / max(term.count, 1) for term in self.losses.values()]).sum()


Apart = Literal["samples", "items"]


def media_calls(
    batch: MediaBatch, *, apart: Apart | None = None, most_elements: int | None = None
) -> Iterator[MediaGroup]:
    """Yield the items of each call for a batch: one call per group, or several.

    ``apart``: items of one sample, or one item. ``most_elements``: of a call's input, except for larger items.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(samples)]
        if apart is not None:
            sizes = [len(list(run)) for _, run in groupby(samples)] if apart == "samples" else [1] * len(samples)
        if most_elements is not None:
            elements = iter(group.num_elements)
            sizes = [run for size in sizes for run in runs_within(islice(elements, size), most_elements)]
        yield from group.split(sizes)
