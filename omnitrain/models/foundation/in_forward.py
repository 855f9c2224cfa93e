"""Samples that the foundation reads in its own forward, with all inputs as its HF processor gave them.

No tower is called apart, so towers are gathered with the foundation itself, and no rank calls them for others. What a
sample does not reach gets a gradient of zeros: all ranks then reduce the same gradients, whatever their samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.errors import UserError
from omnitrain.recipe.globs import any_layer


def outermost_unreached(reached: Iterable[str], unreached: Iterable[str]) -> tuple[str, ...]:
    """The outermost modules of which no parameter is reached, and parameters in modules with reached ones.

    Args:
        reached: parameters that get a gradient.
        unreached: those that never get one.

    Returns:
        Names with ``*`` for places in module lists; one is left out where a layer of another place is reached.
    """
    around = {prefix for name in reached for prefix in _prefixes(any_layer(name))}
    outermost = (next((p for p in _prefixes(any_layer(name)) if p not in around), None) for name in unreached)
    return tuple(dict.fromkeys(name for name in outermost if name is not None))


@lru_cache(maxsize=8)
def beyond_text(names: tuple[str, ...], unreached: tuple[str, ...]) -> frozenset[str]:
    """The parameters that only some samples reach: those in ``unreached``, and those in a layer with such.

    Args:
        names: of all parameters of a foundation; adapters have those of the module that they adapt in front.
        unreached: see :func:`outermost_unreached`.
    """
    found = {name for name in names if any(prefix in unreached for prefix in _prefixes(any_layer(name)))}
    layers = {layer for name in found if (layer := _layer_of(name))}
    return frozenset(name for name in names if name in found or _layer_of(name) in layers)


def _prefixes(name: str) -> Iterator[str]:
    """The names of all modules around, the outermost first, and the name itself."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _layer_of(name: str) -> str:
    """The innermost item of a module list that a parameter lies in; empty: none."""
    parts = name.split(".")
    return ".".join(parts[: max((place + 1 for place, part in enumerate(parts) if part.isdigit()), default=0)])


class ForwardReader:
    """How the foundation's own forward reads a sample with all its inputs.

    Attributes:
        modalities: that nothing else reads; often none.
    """

    def __init__(self, model: PreTrainedModel, modalities: Collection[str], unreached: tuple[str, ...]) -> None:
        """Attach to ``model``.

        Args:
            model: the foundation.
            modalities: that its forward alone reads.
            unreached: see :func:`outermost_unreached`.
        """
        self._model, self._name = model, type(model).__name__  # sharding will give it another class
        self.modalities, self._unreached = modalities, unreached
        if modalities:
            model.register_forward_pre_hook(_cast_floats, with_kwargs=True)

    def require_whole_row(self, pack: Pack) -> None:
        """Refuse a sample whose inputs are of the whole row, for a pack that ranks share.

        Raises:
            UserError: names the sample.
        """
        if pack.forward_inputs:
            raise UserError(
                f"sample {pack.info.ids[0]!r}: the own forward of {self._name} reads its media, over the whole row, "
                "and ranks share its sequence; set ulysses and cp to 1, or leave such samples out"
            )

    def reaches_alone(self, name: str) -> bool:
        """Whether only samples that nothing else reads reach a module or parameter of this name."""
        return bool(self.modalities) and any(prefix in self._unreached for prefix in _prefixes(any_layer(name)))

    def with_zero_gradients(self, loss: Tensor) -> Tensor:
        """``loss``, with a gradient of zeros for every trainable parameter that only some samples reach."""
        live = [parameter for parameter in self.parameters if parameter.requires_grad]
        return _ZeroGradients.apply(loss, *live) if live else loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What only some samples reach, as it is now: a module that is gathered has other tensors."""
        own = dict(self._model.named_parameters()) if self.modalities else {}
        names = beyond_text(tuple(own), self._unreached)
        return [parameter for name, parameter in own.items() if name in names]


def require_length(pack: Pack, hidden: Tensor) -> None:
    """Refuse a forward that changed the number of tokens: labels would be those of others.

    Raises:
        UserError: names the sample, and both numbers.
    """
    if pack.forward_inputs and hidden.size(1) != pack.num_tokens:
        raise UserError(
            f"sample {pack.info.ids[0]!r}: the model made {hidden.size(1)} positions of {pack.num_tokens} tokens; its "
            "HF processor must expand every medium into as many tokens as the model makes rows of it"
        )


def _cast_floats(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Processors give fp32; the model computes in what its parameters are now."""
    dtype = model.get_input_embeddings().weight.dtype
    cast = {name: v.to(dtype) for name, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return args, kwargs | cast


class _ZeroGradients(torch.autograd.Function):
    """``loss``, on which tensors hang that have nothing to do with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [_zeros_for(other) for other in others]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(zeros(gradient) for zeros in ctx.zeros)


def _zeros_for(other: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes zeros beside a tensor, cut over ranks as ``other`` is; it does not keep ``other``."""
    shape, dtype = other.shape, other.dtype
    if not isinstance(other, DTensor):
        return lambda near: near.new_zeros(shape, dtype=dtype)
    mesh, placements, stride, own = other.device_mesh, other.placements, other.stride(), other.to_local().shape
    return lambda near: DTensor.from_local(
        near.new_zeros(own, dtype=dtype), mesh, placements, run_check=False, shape=shape, stride=stride
    )
