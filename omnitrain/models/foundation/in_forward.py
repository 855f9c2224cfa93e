"""Samples that the foundation reads in its own forward, with all inputs as its HF processor gave them.

The towers run inside the foundation's forward, so FSDP gathers them with the foundation, and no rank runs them for
others. On a sharded model, parameters that a sample does not reach get a gradient of zeros, so that all ranks reduce
the same gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.foundation.zeros_in_step import with_zeros_for
from omnitrain.recipe.globs import any_layer


def outermost_unreached(reached: Iterable[str], unreached: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost modules without a reached parameter, and other such parameters; ``*``: of any layer."""
    around = {prefix for name in reached for prefix in _prefixes(any_layer(name))}
    outermost = (next((p for p in _prefixes(any_layer(name)) if p not in around), None) for name in unreached)
    return tuple(dict.fromkeys(name for name in outermost if name is not None))


@lru_cache(maxsize=8)
def beyond_text(names: tuple[str, ...], unreached: tuple[str, ...]) -> frozenset[str]:
    """Return the ``names`` that are in ``unreached``, and all other names in the layers of these."""
    not_reached = {name for name in names if any(prefix in unreached for prefix in _prefixes(any_layer(name)))}
    layers = {layer for name in not_reached if (layer := _layer_of(name))}
    return frozenset(name for name in names if name in not_reached or _layer_of(name) in layers)


def _prefixes(name: str) -> Iterator[str]:
    """The names of all outer modules, the outermost first, and the name itself."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _layer_of(name: str) -> str:
    """The innermost item of a module list that contains a parameter; empty: none does."""
    parts = name.split(".")
    return ".".join(parts[: max((index + 1 for index, part in enumerate(parts) if part.isdigit()), default=0)])


class ForwardReader:
    """Checks and gradients for samples that only the foundation's own forward reads, of ``modalities``; often none.

    ``read``: names of :attr:`parameters` that samples reached.
    """

    def __init__(self, model: PreTrainedModel, modalities: Collection[str], unreached: tuple[str, ...]) -> None:
        """Attach to ``model``, the foundation. ``unreached``: see :func:`outermost_unreached`."""
        self._model, self._name = model, type(model).__name__  # sharding changes the class
        self.modalities, self._unreached = modalities, unreached
        self.read = set[str]()
        if modalities:
            model.register_forward_pre_hook(_cast_floats, with_kwargs=True)

    def require_whole_sequence(self, pack: Pack) -> None:
        """Raise UserError for a pack that ranks share if the foundation's own forward reads its media."""
        self._refuse(pack, "and needs the whole pack, but ranks share its sequence; set ulysses and cp to 1")

    def require_whole_model(self, pack: Pack) -> None:
        """Raise UserError on a rank with a part of the model if the foundation's own forward reads a pack's media."""
        self._refuse(pack, "and a rank that has a part of the model cannot run it; set pp to 1 without sections")

    def _refuse(self, pack: Pack, reason: str) -> None:
        if pack.forward_inputs:
            raise UserError(
                f"sample {pack.info.ids[0]!r}: the forward of {self._name} reads its media, {reason}, or remove such "
                "samples"
            )

    def reaches_alone(self, name: str) -> bool:
        """Whether only samples that nothing else reads reach a module or parameter of this name."""
        return bool(self.modalities) and any(prefix in self._unreached for prefix in _prefixes(any_layer(name)))

    def with_zero_gradients(self, output: Tensor) -> Tensor:
        """Return a loss or hidden states; if sharded, with gradients of zeros for what only some samples reach."""
        if output.grad_fn is None or not self._gives_zeros:
            return output
        live = {n: p for n, p in self._named_parameters().items() if p.requires_grad and not p.is_meta}
        reached = _reached(output.grad_fn)
        self.read.update(name for name, parameter in live.items() if parameter in reached)
        return with_zeros_for(output, live.values())

    def parameters_by_key(self) -> dict[str, Iterable[nn.Parameter]]:
        """Return name -> the parameter that only some samples reach; empty if it is given no zeros."""
        return {n: [parameter] for n, parameter in self._named_parameters().items()} if self._gives_zeros else {}

    @property
    def _gives_zeros(self) -> bool:
        """Whether the model is sharded here, which a section of encoders does not do; it need not be a unit itself."""
        return bool(self.modalities) and any(isinstance(module, FSDPModule) for module in self._model.modules())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that only some samples reach."""
        return list(self._named_parameters().values())

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Not cached, because a gathered module has other tensors; other stages' parameters are on the meta device."""
        parameters = dict(self._model.named_parameters()) if self.modalities else {}
        names = beyond_text(tuple(parameters), self._unreached)
        return {name: parameter for name, parameter in parameters.items() if name in names}


def _reached(node: Node) -> set[Tensor]:
    """The parameters to which a backward from this node gives gradients."""
    seen, waiting = {node}, [node]
    while waiting:
        inner = {following for following, _ in waiting.pop().next_functions if following is not None} - seen
        seen |= inner
        waiting += inner
    return {found.variable for found in seen if hasattr(found, "variable")}


def require_length(pack: Pack, hidden: Tensor) -> None:
    """Raise UserError if the forward changed the number of tokens: its labels would belong to other tokens."""
    if pack.forward_inputs and hidden.size(1) != pack.num_tokens:
        raise UserError(
            f"sample {pack.info.ids[0]!r}: the model gave {hidden.size(1)} hidden states for {pack.num_tokens} tokens; "
            "the HF processor must insert one placeholder for each feature of the media"
        )


def _cast_floats(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Cast a processor's fp32 inputs to the current dtype of the parameters."""
    dtype = model.get_input_embeddings().weight.dtype
    cast = {name: v.to(dtype) for name, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return args, kwargs | cast
