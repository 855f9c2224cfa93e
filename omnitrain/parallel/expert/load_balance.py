"""Load balancing of routers in training: losses, biases, and the measured load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import bytes_sent
from omnitrain.ops.experts.routers import choice_bias, find_router
from omnitrain.ops.experts.routing_tape import is_replaying
from omnitrain.ops.experts.weights import num_experts_of
from omnitrain.ops.host_values import to_device
from omnitrain.parallel.expert.apply import expert_layers
from omnitrain.parallel.layout import layout_of
from omnitrain.recipe import ExpertsBalance
from omnitrain.recipe.parallel import FOUNDATION


@dataclass
class _Layer:
    """One MoE layer, by the name of its experts' module."""

    name: str
    experts: nn.Module
    num_experts: int
    # ``E`` numbers, added to the scores only for the top-k choice; None: the router has no such bias
    bias: Tensor | None
    scores: Tensor | None = None  # [t, E] router scores of the current forward, before the softmax
    index: Tensor | None = None  # [t, k] chosen experts of the current forward
    counts: Tensor | None = None  # [E] choices of the current step on this rank; None: the layer was not called yet
    # ``[E]`` fractions of all choices in the previous step
    fractions: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class _SampleTokens:
    """The tokens of the current forward on this rank that belong to samples.

    ``valid`` ``[v]`` int64 are their positions on this rank, ``sample`` ``[v]`` int64 the sample of each. ``num_local``
    counts all tokens on this rank, also tokens of no sample; ``is_slice``: other ranks have other tokens of the pack.
    """

    valid: Tensor
    sample: Tensor
    num_samples: int
    num_local: int
    is_slice: bool


class RouterMonitor:
    """Balance a model's routers by losses and biases, and measure the load of the experts, per optimizer step.

    Only tokens of samples count, each once: tokens of idle packs do not count, nor does recomputation.
    """

    def __init__(self, model: OmniModel, balance: ExpertsBalance) -> None:
        self._model, self._balance = model, balance
        layout = layout_of(model)
        state = layout.state if layout is not None else None
        self._group = state.loss_group if state is not None else None
        self._stages = state.pp_mesh.get_group() if state is not None and state.size("pp") > 1 else None
        self._sequence = state.sequence_group if state is not None else None
        self._counts_tokens = state is None or state.rank_in("sequence") == 0  # ranks of a sequence have the same packs
        layers = expert_layers(model)[FOUNDATION]  # the inputs of other components are not tokens of samples
        self._layers = [self._watched(layer.name, model.get_submodule(layer.name)) for layer in layers]
        self._rows: _SampleTokens | None = None  # set during a forward
        self._watched_rows: _SampleTokens | None = None  # set during and after a forward
        self._num_tokens = 0.0
        self._num_micro_batches = 1.0
        self._load: dict[str, Tensor] = {}
        self._require()

    def _require(self) -> None:
        balance = self._balance
        if (balance.loss != "none" or balance.z_weight or balance.bias_rate) and not self._layers:
            raise UserError(
                f"train.experts: {type(self._model.foundation).__name__} has no experts to balance; remove it"
            )
        if balance.loss == "micro_batch" and self._stages is not None:
            raise UserError(
                "train.experts.loss: found micro_batch, which needs the scores of all layers together, but each "
                "pipeline stage has some of them; use sample or previous_step"
            )
        if balance.bias_rate:
            for layer in self._layers:
                if layer.bias is None:
                    raise UserError(
                        f"train.experts.bias_rate: found {balance.bias_rate}, but the router of {layer.name} has no "
                        "bias that only affects the top-k choice; use 0, and a balance loss"
                    )

    def _watched(self, name: str, experts: nn.Module) -> _Layer:
        parent = name.rpartition(".")[0]
        num_experts = num_experts_of(experts)
        layer = _Layer(name, experts, num_experts, choice_bias(self._model.get_submodule(parent), num_experts))
        layer.fractions = torch.full((num_experts,), 1 / num_experts)
        experts.register_forward_pre_hook(
            lambda _, arguments, kwargs: self._note_index(layer, arguments), with_kwargs=True
        )
        if self._balance.loss != "none" or self._balance.z_weight:
            declared = find_router(self._model, parent)
            if declared is None:
                raise UserError(
                    f"train.experts: the model declares no router scores for the experts of {parent}; use loss: none"
                )
            router, index = declared

            def note_scores(_: nn.Module, arguments: object, output: tuple[Tensor, ...]) -> None:
                if self._rows is not None and not is_replaying():
                    layer.scores = output[index].reshape(-1, output[index].size(-1))

            router.register_forward_hook(note_scores)
        return layer

    def _note_index(self, layer: _Layer, arguments: tuple[Tensor, ...]) -> None:
        if self._rows is None or is_replaying() or len(arguments[1]) != self._rows.num_local:
            return
        layer.index = arguments[1].detach()
        chosen = layer.index[self._rows.valid]
        counts = counts_per_sample(chosen, torch.zeros_like(chosen[:, 0]), 1, layer.num_experts)[0]
        layer.counts = counts if layer.counts is None else layer.counts + counts

    def begin(self, packs: Sequence[Pack]) -> None:
        """Begin a step; all ranks must call it with their packs, before the first forward."""
        for layer in self._layers:  # discard a step without an update
            layer.scores = layer.index = layer.counts = None
        tokens = sum(int(_is_real(pack).sum()) for pack in packs) if self._counts_tokens else 0
        filled = sum(any(index >= 0 for index in pack.info.indices) for pack in packs)  # the others have no loss
        local = torch.tensor([float(tokens), float(filled)])
        self._num_tokens, self._num_micro_batches = self._summed(local).clamp(min=1).tolist()

    @contextmanager
    def watched(self, encoded: EncodedPack) -> Iterator[None]:
        """Wrap the forward of a micro-batch."""
        self._rows = self._watched_rows = _sample_tokens(encoded)
        try:
            yield
        finally:
            self._rows = None

    def loss(self) -> Tensor | None:
        """Return the balance loss of a micro-batch, between its forward and its backward; None: no such loss."""
        balance, rows = self._balance, self._watched_rows
        # A pipeline stage has some of the layers, or none.
        layers = [layer for layer in self._layers if self._stages is None or layer.scores is not None]
        if rows is None or not layers or (balance.loss == "none" and not balance.z_weight):
            return None
        scores, index = self._taken(layers, rows)
        per_token = [balance.weight * of_layer for of_layer in self._balance_of(layers, scores, index, rows)]
        if balance.z_weight:
            per_token += [balance.z_weight * z_loss(of_layer) for of_layer in scores]
        terms = [torch.stack(per_token).sum() / (self._num_tokens * len(self._layers))] if per_token else []
        if balance.loss == "micro_batch" and len(rows.valid):
            terms.append(balance.weight * micro_batch_balance(scores, index) / self._num_micro_batches)
        return torch.stack(terms).sum() if terms else None

    def _taken(self, layers: Sequence[_Layer], rows: _SampleTokens) -> tuple[list[Tensor], list[Tensor]]:
        """Return and clear, per layer, scores ``[v, E]`` and choices ``[v, k]`` of the tokens of samples."""
        scores, index = [], []
        for layer in layers:
            if layer.scores is None or layer.index is None:
                raise UserError(
                    f"train.experts: {layer.name} did not get every token of a pack, which balance losses need; use "
                    "loss: none and z_weight: 0"
                )
            scores.append(layer.scores[rows.valid])
            index.append(layer.index[rows.valid])
            layer.scores = layer.index = None
        return scores, index

    def _balance_of(
        self, layers: Sequence[_Layer], scores: list[Tensor], index: list[Tensor], rows: _SampleTokens
    ) -> Iterator[Tensor]:
        """Yield each layer's balance loss, summed over tokens, for the losses that are per token."""
        if self._balance.loss == "previous_step":
            for layer, of_layer in zip(layers, scores, strict=True):
                yield fraction_balance(of_layer, layer.fractions.to(of_layer.device))
        elif self._balance.loss == "sample":
            per_layer = [
                counts_per_sample(of_layer, rows.sample, rows.num_samples, layer.num_experts)
                for layer, of_layer in zip(layers, index, strict=True)
            ]
            counts = torch.cat(per_layer, dim=1)
            if rows.is_slice:
                dist.all_reduce(counts, group=self._sequence)
            for of_layer, of_samples in zip(scores, counts.split([c.size(1) for c in per_layer], dim=1), strict=True):
                yield sample_balance(of_layer, of_samples, rows.sample)

    @torch.no_grad()
    def end(self) -> None:
        """End a step, after the optimizer's update: update the biases, and keep the load for the next step."""
        if not self._layers:
            return
        zeros = partial(torch.zeros, device=self._model.device)
        local = [zeros(layer.num_experts) if layer.counts is None else layer.counts for layer in self._layers]
        together = self._summed(torch.cat(local))
        if self._stages is not None:
            dist.all_reduce(together, group=self._stages)
        every_layer = together.split([layer.num_experts for layer in self._layers])
        for layer, counts in zip(self._layers, every_layer, strict=True):
            layer.counts = None
            self._load[layer.name] = counts
            fractions = counts / counts.sum().clamp(min=1)
            layer.fractions = fractions.where(counts.sum() > 0, layer.fractions.to(fractions))
            if layer.bias is not None and not layer.bias.is_meta and self._balance.bias_rate:
                layer.bias += _sharded_like(layer.bias, self._balance.bias_rate * (counts.mean() - counts).sign())

    def expert_shares(self) -> dict[str, list[float]]:
        """Return layer -> each expert's fraction of the choices in the last step, for a resumed run."""
        return {layer.name: layer.fractions.tolist() for layer in self._layers}

    def continue_from(self, shares: Mapping[str, list[float]]) -> None:
        """Restore the fractions that :meth:`expert_shares` returned in an earlier run."""
        for layer in self._layers:
            if layer.name in shares:
                layer.fractions = torch.tensor(shares[layer.name])

    def read(self) -> dict[str, dict[str, float]]:
        """Return name of the experts -> the load of each layer's experts in the last step.

        ``load``: tokens of the busiest expert over the mean; ``entropy``: entropy of the fractions, relative to equal
        fractions; ``bytes``: bytes that this rank sent to other ranks in forwards since the last reading.
        """
        readings = {}
        for layer in self._layers:
            if (counts := self._load.get(layer.name)) is not None:
                entropy = torch.special.entr(counts / counts.sum().clamp(min=1)).sum()
                most = torch.tensor(float(len(counts))).log()
                readings[layer.name] = {
                    "load": float(counts.max() / counts.mean().clamp(min=1e-9)),
                    "entropy": float(entropy / most) if len(counts) > 1 else 1.0,
                    "bytes": float(bytes_sent(layer.experts)),
                }
        return readings

    def _summed(self, local: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(local, group=self._group)
        return local


def _sharded_like(bias: Tensor, change: Tensor) -> Tensor:
    """``change``, which every rank has, sharded like ``bias``, which some models keep as a frozen parameter."""
    whole = change.view(bias.shape).to(bias.device, bias.dtype)
    if not isinstance(bias, DTensor):
        return whole
    return distribute_tensor(whole, bias.device_mesh, bias.placements, src_data_rank=None)


def _sample_of_token(pack: Pack) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(pack.info.ids)), torch.tensor(pack.info.lengths))


def _is_real(pack: Pack) -> Tensor:
    """``[T]`` bool: whether a token belongs to a sample; tokens of idle prompts do not."""
    return torch.tensor([index >= 0 for index in pack.info.indices])[_sample_of_token(pack)]


def _sample_tokens(encoded: EncodedPack) -> _SampleTokens:
    pack, sequence_slice = encoded.pack, encoded.sequence_slice
    sample = _sample_of_token(pack)
    # The host knows all positions, so this needs no synchronization with the device.
    positions = torch.arange(len(sample)) if sequence_slice is None else sequence_slice.host_positions
    valid = positions < len(sample)  # False for padding
    valid[valid.clone()] = _is_real(pack)[positions[valid]]
    rows, device = valid.nonzero()[:, 0], pack.input_ids.device
    on_device = to_device(rows, device), to_device(sample[positions[rows]], device)
    return _SampleTokens(*on_device, len(pack.info.ids), len(positions), sequence_slice is not None)


# Losses are sums over tokens, so ranks can add them. ``p_te`` is the softmax of the scores of token ``t`` over ``E``
# experts, of which each token takes ``k``.
def counts_per_sample(index: Tensor, sample: Tensor, num_samples: int, num_experts: int) -> Tensor:
    """Count how often each sample's tokens chose each expert, from ``index`` ``[t, k]``: ``[samples, E]`` fp32."""
    place = (sample.unsqueeze(-1) * num_experts + index).view(-1)
    counts = torch.zeros(num_samples * num_experts, device=index.device)
    return counts.scatter_add_(0, place, torch.ones_like(place, dtype=counts.dtype)).view(num_samples, num_experts)


def sample_balance(scores: Tensor, counts: Tensor, sample: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te``, ``f_e`` the share of expert ``e`` in the choices of a token's sample.

    Divided by the number of tokens it is 1 if each sample uses all experts equally often (DeepSeek-V3, equation 17,
    each sample weighted by its tokens). ``scores`` ``[t, E]`` are those before the softmax.
    """
    fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return scores.size(-1) * (scores.float().softmax(-1) * fractions[sample]).sum()


def fraction_balance(scores: Tensor, fractions: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te`` for given shares ``f`` ``[E]``, such as the previous step's."""
    return scores.size(-1) * (scores.float().softmax(-1) @ fractions).sum()


def micro_batch_balance(scores: list[Tensor], index: list[Tensor]) -> Tensor:
    """Compute transformers' ``load_balancing_loss_func`` over the layers of a micro-batch; no sum over tokens."""
    probabilities, chosen = torch.cat(scores).float().softmax(-1), torch.cat(index)
    rows = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
    counts = counts_per_sample(chosen, rows, 1, probabilities.size(-1))[0]
    return probabilities.size(-1) * (counts / len(chosen) * probabilities.mean(0)).sum()


def z_loss(scores: Tensor) -> Tensor:
    """Sum over tokens of the squared logarithm of the softmax's denominator (ST-MoE, equation 5)."""
    return scores.float().logsumexp(-1).square().sum()
