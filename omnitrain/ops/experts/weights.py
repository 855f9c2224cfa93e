"""The weights of experts, in the format that transformers' ``use_experts_implementation`` declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from omnitrain.ops.delayed_wgrad import Later, MakeGradient, WeightGradients
from omnitrain.ops.experts.lora import ExpertAdapter, adapter_names, adapter_scales, parameter_names
from omnitrain.torch_private import current_graph_task_id
from omnitrain.transformers_private import apply_gate

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class ExpertRange(NamedTuple):
    """Consecutive experts of a chunk."""

    start: int  # its experts within the chunk, from here to `stop`
    stop: int
    first_row: int  # their rows within the chunk, from here to `end_row`
    end_row: int


MakeRange = Callable[[ExpertRange], Tensor]
DelayedByRange = Callable[[MakeRange], None]


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` is a layer's experts, whose forward uses transformers' ``ExpertsInterface``."""
    return all(name in vars(module) for name in _DECLARED)


def experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return names and modules of all experts in ``model``; one module has all experts of a layer."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the experts' parameters, whose dim 0 is the expert; without adapters."""
    layer: Any = module
    first = "gate_up_proj" if layer.has_gate else "up_proj"
    names = (first, "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if layer.has_bias else names


def matrix_names(module: nn.Module) -> tuple[str, str]:
    """Return the names of the experts' matrices."""
    first, second, *_ = weight_names(module)
    return first, second


def names_by_expert(module: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters whose dim 0 is the expert, including adapters."""
    return (*weight_names(module), *adapter_names(module))


def num_experts_of(module: nn.Module) -> int:
    """Return the number of experts of the layer on all ranks."""
    return getattr(module, weight_names(module)[0]).size(0)


class ExpertWeights:
    """The experts on this rank; it replaces their module in functions that compute experts.

    Weights are plain tensors. All other attributes come from the module.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], later: Mapping[str, DelayedByRange]) -> None:
        self.module = module
        self._tensors = tensors
        self.first_name, self.down_name = matrix_names(module)
        # ``[E, out, in]``, or ``[E, in, out]`` if the class is declared transposed; biases are ``[E, out]``
        self.first, self.down = tensors[self.first_name], tensors[self.down_name]
        self.first_bias = tensors.get(f"{self.first_name}_bias")
        self.down_bias = tensors.get(f"{self.down_name}_bias")
        self.num_experts = self.first.size(0)
        self.first_adapter, self.down_adapter = self._adapter(self.first_name), self._adapter(self.down_name)
        # These take the gradients of the weights instead of autograd; None: autograd gets them
        self.first_later, self.down_later = later.get(self.first_name), later.get(self.down_name)

    @classmethod
    def of(cls, module: nn.Module) -> ExpertWeights:
        """Return all experts of the layer, or this rank's experts if the module's weights are DTensors."""
        return cls(module, {name: _local(getattr(module, name)) for name in names_by_expert(module)}, {})

    def in_chunks(
        self,
        ranges: Sequence[Sequence[ExpertRange]],
        work: WeightGradients | None,
        after_backward: WeightGradients | None = None,
    ) -> list[ExpertWeights]:
        """Split into nearly equal chunks of experts.

        ``ranges`` cover all experts and rows of each chunk in order: gradients of matrices are computed range by range
        and written into one buffer, so only one range's gradient exists twice. They are computed during the backward,
        or by ``work`` after the rest of the backward of all chunks, or, by parameter, by ``after_backward``: then the
        backward returns none of them.
        """
        chunks = len(ranges)
        if chunks == 1 and work is None and after_backward is None:
            return [self]
        names, matrices = tuple(self._tensors), (self.first_name, self.down_name)
        gradients = _WeightGradientBuffer(chunk_offsets(self.num_experts, chunks), ranges, matrices, work)
        if after_backward is not None:
            gradients.later = {name: after_backward.of(getattr(self.module, name)) for name in matrices}
        flat = _InChunks.apply(gradients, names, *self._tensors.values())
        of_chunk = [dict(zip(names, flat[chunk * len(names) :], strict=False)) for chunk in range(chunks)]
        return [
            ExpertWeights(self.module, tensors, {name: gradients.taker(name, chunk) for name in matrices})
            for chunk, tensors in enumerate(of_chunk)
        ]

    def without_delay(self) -> ExpertWeights:
        """Return the same experts without delayed gradients."""
        return ExpertWeights(self.module, self._tensors, {})

    def __getattr__(self, name: str) -> Any:
        tensors = self.__dict__["_tensors"]
        return tensors[name] if name in tensors else getattr(self.__dict__["module"], name)

    def activate(self, rows: Tensor) -> Tensor:
        """Compute the activation between the two matmuls: the class's gate, or its activation function."""
        layer: Any = self.module
        return apply_gate(layer, rows) if layer.has_gate else layer.act_fn(rows)

    def finish(self, rows: Tensor) -> Tensor:
        """Apply the norm after the second matmul, if the class has one."""
        layer: Any = self.module
        return layer.post_expert_norm(rows) if getattr(layer, "has_post_expert_norm", False) else rows

    def _adapter(self, weight: str) -> ExpertAdapter | None:
        scale = adapter_scales(self.module).get(weight)
        if scale is None:
            return None
        a, b = (self._tensors[name] for name in parameter_names(weight))
        return ExpertAdapter(a, b, scale)


def chunk_offsets(num_experts: int, chunks: int) -> tuple[int, ...]:
    """Return the ``chunks + 1`` offsets of nearly equal chunks of experts."""
    return tuple(num_experts * chunk // chunks for chunk in range(chunks + 1))


_Piece = tuple[int, int, MakeGradient]  # first expert, the one after the last, and what computes their gradient


class _InChunks(torch.autograd.Function):
    """Splits tensors into chunks along dim 0. Gradients come from the chunks or from :class:`_WeightGradientBuffer`."""

    @staticmethod
    def forward(
        ctx: Any, gradients: _WeightGradientBuffer, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.names = gradients, names
        ctx.set_materialize_grads(False)
        chunks = [tuple(tensor[start:stop] for tensor in tensors) for start, stop in pairwise(gradients.offsets)]
        frozen = [
            part for chunk in chunks for part, tensor in zip(chunk, tensors, strict=True) if not tensor.requires_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return tuple(part for chunk in chunks for part in chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = ctx.gradients.made()
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                chunk, name = divmod(place, len(ctx.names))
                whole.add(ctx.names[name], *ctx.gradients.offsets[chunk : chunk + 2], gradient)
        return None, None, *(whole.of(name) for name in ctx.names)


@dataclass(eq=False)
class _WeightGradientBuffer:
    """Collects the gradients of chunks' matrices in one buffer, so that none exists twice.

    Gradients are kept per backward: an interrupted backward leaves nothing for the next one. ``work`` computes them in
    :meth:`made`, in the order of ``matrices``, the largest operands first; None: they are computed at
    once. ``later``: matrix -> takes a function that computes its gradient after the backward; empty: the backward needs
    it.
    """

    offsets: tuple[int, ...]  # of the chunks
    ranges: Sequence[Sequence[ExpertRange]]  # of each chunk
    matrices: tuple[str, ...]
    work: WeightGradients | None
    later: Mapping[str, Later] = field(default_factory=dict)
    _wholes: dict[int, _Wholes] = field(default_factory=dict)
    _pieces: dict[tuple[int, str], list[_Piece]] = field(default_factory=dict)

    def taker(self, name: str, chunk: int) -> DelayedByRange:
        """Return a function that takes the gradient of a chunk of the matrix ``name``."""

        def take(make: MakeRange) -> None:
            backward = current_graph_task_id()
            for span in self.ranges[chunk]:
                start, stop = self.offsets[chunk] + span.start, self.offsets[chunk] + span.stop
                if name in self.later:
                    self._pieces.setdefault((backward, name), []).append((start, stop, partial(make, span)))
                elif self.work is not None:
                    self.work.add((backward, name, start, stop), partial(make, span))
                else:
                    self._wholes.setdefault(backward, self._none_yet()).add(name, start, stop, make(span))

        return take

    def made(self) -> _Wholes:
        """Return all gradients taken in this backward."""
        backward = current_graph_task_id()
        for name, later in self.later.items():
            if pieces := self._pieces.pop((backward, name), None):
                later(partial(_joined, pieces, self.offsets[-1]))
        whole = self._wholes.pop(backward, None) or self._none_yet()
        if self.work is None:
            return whole
        for (of_backward, name, start, stop), gradient in self.work.made(lambda key: self.matrices.index(key[1])):
            if of_backward == backward:
                whole.add(name, start, stop, gradient)
            del gradient  # release it before computing the next one
        return whole

    def _none_yet(self) -> _Wholes:
        return _Wholes(self.offsets[-1])


class _Wholes:
    """Buffers for the gradients of all experts, filled range by range."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._wholes: dict[str, Tensor] = {}
        self._there: dict[str, dict[int, int]] = {}  # tensor -> {start: stop} of the ranges filled so far

    def add(self, name: str, start: int, stop: int, gradient: Tensor) -> None:
        """Write the gradient of a range of experts of the tensor ``name``, or add it to an earlier one."""
        there = self._there.setdefault(name, {})
        if start in there:
            self._wholes[name][start:stop] += gradient
        elif stop - start == self._num_experts:
            self._wholes[name] = gradient
        else:
            if name not in self._wholes:
                self._wholes[name] = gradient.new_empty(self._num_experts, *gradient.shape[1:])
            self._wholes[name][start:stop] = gradient
        there[start] = stop

    def of(self, name: str) -> Tensor | None:
        """Return the gradient of the tensor ``name``; None: no expert has a gradient."""
        number = sum(stop - start for start, stop in self._there.get(name, {}).items())
        assert number in (0, self._num_experts), f"{name}: some experts have a gradient, others have none"
        return self._wholes.get(name)


def _joined(pieces: list[_Piece], num_experts: int) -> Tensor:
    """Compute the gradient of all experts of a matrix, piece by piece."""
    whole = _Wholes(num_experts)
    while pieces:
        start, stop, make = pieces.pop(0)
        whole.add("", start, stop, make())
    gradient = whole.of("")
    assert gradient is not None
    return gradient


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
