"""The routers of a model in training: what keeps them balanced, and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omnitrain.data.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.device import to_device
from omnitrain.ops.experts import bytes_sent, is_replaying
from omnitrain.ops.experts.balance_loss import (
    counts_per_sample,
    fraction_balance,
    micro_batch_balance,
    sample_balance,
    z_loss,
)
from omnitrain.ops.experts.routers import choice_bias, find_router
from omnitrain.ops.experts.weights import num_experts_of
from omnitrain.parallel.expert.apply import expert_layers
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.sequence.apply import SequencePart
from omnitrain.recipe import ExpertsBalance
from omnitrain.recipe.parallel import FOUNDATION


@dataclass
class _Layer:
    """One layer with experts.

    Attributes:
        name: of the experts.
        experts: the module.
        num_experts: of the layer.
        bias: of ``E`` numbers, added to the scores for the choice alone; None: the router has none.
        scores: of the running forward, ``[t, E]`` before the softmax.
        index: of the running forward, ``[t, k]``.
        counts: ``[E]``: choices of the running step on this rank; None: it was not called yet.
        fractions: ``[E]``: shares of all choices of the step before.
    """

    name: str
    experts: nn.Module
    num_experts: int
    bias: Tensor | None
    scores: Tensor | None = None
    index: Tensor | None = None
    counts: Tensor | None = None
    fractions: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class _Rows:
    """The tokens of this rank in the running forward that belong to samples.

    Attributes:
        valid: ``[v]`` int64, rows.
        sample: ``[v]`` int64, of each.
        num_samples: of the pack.
        num_here: tokens of the row that are here, those of no sample too.
        is_part: other ranks have the other tokens of these samples.
    """

    valid: Tensor
    sample: Tensor
    num_samples: int
    num_here: int
    is_part: bool


class RouterMonitor:
    """Losses and biases of a model's routers over one optimizer step at a time, and their load.

    Only tokens of samples count, each once: not those that stand in for a rank without data, and none when a layer is
    computed again.

    Args:
        model: laid out, or on one process.
        balance: what keeps the routers balanced.

    Raises:
        UserError: the model has no experts, or its routers lack what ``balance`` asks for.
    """

    def __init__(self, model: OmniModel, balance: ExpertsBalance) -> None:
        self._model, self._balance = model, balance
        layout = layout_of(model)
        state = layout.state if layout is not None else None
        self._group = state.loss_group if state is not None else None
        self._sequence = state.sequence_group if state is not None else None
        self._counts_tokens = state is None or state.place("sequence") == 0  # ranks of a sequence have the same packs
        own = expert_layers(model)[FOUNDATION]  # what other components take are no tokens of samples
        self._layers = [self._watched(layer.name, model.get_submodule(layer.name)) for layer in own]
        self._rows: _Rows | None = None  # in a forward
        self._watched_rows: _Rows | None = None  # in or behind one
        self._num_tokens = 0.0
        self._num_micro_batches = 1.0
        self._load: dict[str, Tensor] = {}
        self._require()

    def _require(self) -> None:
        asked = self._balance
        if (asked.loss != "none" or asked.z_weight or asked.bias_rate) and not self._layers:
            raise UserError(
                f"train.experts: {type(self._model.foundation).__name__} has no experts to balance; remove it"
            )
        if asked.bias_rate:
            for layer in self._layers:
                if layer.bias is None:
                    raise UserError(
                        f"train.experts.bias_rate: found {asked.bias_rate}, but the router beside {layer.name} has no "
                        "bias that is for the choice alone; use 0, and a loss"
                    )

    def _watched(self, name: str, experts: nn.Module) -> _Layer:
        parent = name.rpartition(".")[0]
        number = num_experts_of(experts)
        layer = _Layer(name, experts, number, choice_bias(self._model.get_submodule(parent), number))
        layer.fractions = torch.full((number,), 1 / number)
        experts.register_forward_pre_hook(
            lambda _, arguments, kwargs: self._note_index(layer, arguments), with_kwargs=True
        )
        if self._balance.loss != "none" or self._balance.z_weight:
            found = find_router(self._model, parent)
            if found is None:
                raise UserError(
                    f"train.experts: the model declares no router scores beside the experts of {parent}; use loss: none"
                )
            router, place = found
            router.register_forward_hook(lambda _, arguments, output: self._note_scores(layer, output[place]))
        return layer

    def _note_index(self, layer: _Layer, arguments: tuple[Tensor, ...]) -> None:
        if self._rows is None or is_replaying() or len(arguments[1]) != self._rows.num_here:
            return
        layer.index = arguments[1].detach()
        chosen = layer.index[self._rows.valid]
        counts = counts_per_sample(chosen, torch.zeros_like(chosen[:, 0]), 1, layer.num_experts)[0]
        layer.counts = counts if layer.counts is None else layer.counts + counts

    def _note_scores(self, layer: _Layer, scores: Tensor) -> None:
        if self._rows is not None and not is_replaying():
            layer.scores = scores.reshape(-1, scores.size(-1))

    def begin(self, packs: Sequence[Pack]) -> None:
        """Before the first forward of a step; every rank calls it, with its packs."""
        for layer in self._layers:  # of a step without an update
            layer.scores = layer.index = layer.counts = None
        tokens = sum(int(_is_real(pack).sum()) for pack in packs) if self._counts_tokens else 0
        own = torch.tensor([float(tokens), float(len(packs))])
        self._num_tokens, self._num_micro_batches = self._summed(own).clamp(min=1).tolist()

    @contextmanager
    def watched(self, pack: Pack, work: MicroBatchWork) -> Iterator[None]:
        """The forward of a micro-batch."""
        self._rows = self._watched_rows = _rows(pack, work)
        try:
            yield
        finally:
            self._rows = None

    def loss(self) -> Tensor | None:
        """What a micro-batch adds to the total loss; None: nothing. Behind its forward, before its backward."""
        asked, rows = self._balance, self._watched_rows
        if rows is None or (asked.loss == "none" and not asked.z_weight):
            return None
        scores, index = self._taken(rows)
        per_token = [asked.weight * own for own in self._balance_of(scores, index, rows)]
        if asked.z_weight:
            per_token += [asked.z_weight * z_loss(own) for own in scores]
        terms = [torch.stack(per_token).sum() / (self._num_tokens * len(self._layers))] if per_token else []
        if asked.loss == "micro_batch" and len(rows.valid):
            terms.append(asked.weight * micro_batch_balance(scores, index) / self._num_micro_batches)
        return torch.stack(terms).sum() if terms else None

    def _taken(self, rows: _Rows) -> tuple[list[Tensor], list[Tensor]]:
        """Per layer scores ``[v, E]`` and choices ``[v, k]`` of the tokens of samples, which it then forgets."""
        scores, index = [], []
        for layer in self._layers:
            if layer.scores is None or layer.index is None:
                raise UserError(
                    f"train.experts: {layer.name} did not get every token of a row, which its balance needs; use "
                    "loss: none and z_weight: 0"
                )
            scores.append(layer.scores[rows.valid])
            index.append(layer.index[rows.valid])
            layer.scores = layer.index = None
        return scores, index

    def _balance_of(self, scores: list[Tensor], index: list[Tensor], rows: _Rows) -> Iterator[Tensor]:
        """The sum over tokens of each layer's balance, where that is what was asked for."""
        if self._balance.loss == "previous_step":
            for layer, own in zip(self._layers, scores, strict=True):
                yield fraction_balance(own, layer.fractions.to(own.device))
        elif self._balance.loss == "sample":
            per_layer = [
                counts_per_sample(own, rows.sample, rows.num_samples, layer.num_experts)
                for layer, own in zip(self._layers, index, strict=True)
            ]
            counts = torch.cat(per_layer, dim=1)
            if rows.is_part:
                dist.all_reduce(counts, group=self._sequence)
            for own, of_samples in zip(scores, counts.split([c.size(1) for c in per_layer], dim=1), strict=True):
                yield sample_balance(own, of_samples, rows.sample)

    @torch.no_grad()
    def end(self) -> None:
        """Behind the optimizer's update: biases move against the step's load, whose shares the next step may use."""
        if not self._layers:
            return
        none = partial(torch.zeros, device=self._model.device)
        own = [none(layer.num_experts) if layer.counts is None else layer.counts for layer in self._layers]
        every_layer = self._summed(torch.cat(own)).split([layer.num_experts for layer in self._layers])
        for layer, counts in zip(self._layers, every_layer, strict=True):
            layer.counts = None
            self._load[layer.name] = counts
            shares = counts / counts.sum().clamp(min=1)
            layer.fractions = shares.where(counts.sum() > 0, layer.fractions.to(shares))
            if layer.bias is not None and self._balance.bias_rate:
                layer.bias += _lying_as(layer.bias, self._balance.bias_rate * (counts.mean() - counts).sign())

    def expert_shares(self) -> dict[str, list[float]]:
        """Layer -> each expert's share of the choices of the last step: what a continued run needs."""
        return {layer.name: layer.fractions.tolist() for layer in self._layers}

    def continue_from(self, shares: Mapping[str, list[float]]) -> None:
        """Take the shares of the step before from an earlier run."""
        for layer in self._layers:
            if layer.name in shares:
                layer.fractions = torch.tensor(shares[layer.name])

    def read(self) -> dict[str, dict[str, float]]:
        """Per layer, of the last step: how evenly its experts were taken.

        Returns:
            Name of the experts -> ``load``: the most rows of an expert over the mean; ``entropy`` of the shares, 1
            where they are equal; ``bytes`` that this rank sent to others in forwards since the last reading.
        """
        return {
            layer.name: {
                "load": float(counts.max() / counts.mean().clamp(min=1e-9)),
                "entropy": _entropy(counts),
                "bytes": float(bytes_sent(layer.experts)),
            }
            for layer in self._layers
            if (counts := self._load.get(layer.name)) is not None
        }

    def _summed(self, own: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(own, group=self._group)
        return own


def _lying_as(bias: Tensor, change: Tensor) -> Tensor:
    """``change``, which every rank has, as ``bias`` lies: some models keep theirs as a frozen parameter."""
    whole = change.view(bias.shape).to(bias.device, bias.dtype)
    if not isinstance(bias, DTensor):
        return whole
    return distribute_tensor(whole, bias.device_mesh, bias.placements, src_data_rank=None)


def _entropy(counts: Tensor) -> float:
    shares = counts / counts.sum().clamp(min=1)
    return float(torch.special.entr(shares).sum() / torch.tensor(float(len(counts))).log()) if len(counts) > 1 else 1.0


def _sample_of_row(pack: Pack) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(pack.info.ids)), torch.tensor(pack.info.lengths))


def _is_real(pack: Pack) -> Tensor:
    """``[T]`` bool: tokens of samples, not those that stand in for none."""
    return torch.tensor([index >= 0 for index in pack.info.indices])[_sample_of_row(pack)]


def _rows(pack: Pack, work: MicroBatchWork) -> _Rows:
    sample, part = _sample_of_row(pack), work.part
    assert part is None or isinstance(part, SequencePart)
    # On the host, which knows all of it: no device is waited for.
    here = torch.arange(len(sample)) if part is None else torch.from_numpy(part.split.rows[part.place])
    valid = here < len(sample)  # a row that was filled up has more
    valid[valid.clone()] = _is_real(pack)[here[valid]]
    rows, device = valid.nonzero()[:, 0], pack.input_ids.device
    on_device = to_device(rows, device), to_device(sample[here[rows]], device)
    return _Rows(*on_device, len(pack.info.ids), len(here), part is not None)
