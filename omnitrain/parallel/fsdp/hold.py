"""Hold FSDP units: a schedule gathers their weights, frees them, and reduces their gradients.

FSDP's own hooks gather a unit's weights before each forward, and reduce its gradients and free its weights after each
backward: too often if several micro-batches are in flight, and too early for the others. A unit also has one state for
its forward and its backward, which two micro-batches at the same time would confuse. So the hooks of held units only
cast, and add up gradients when autograd has left the unit. :meth:`HeldUnits.reduce` does what
``torch.distributed.pipelining`` does for its own stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from omnitrain import torch_private


class HeldUnits:
    """The FSDP units of a model while a schedule controls them; made once, when the model is sharded.

    ``owned``: stage of this rank, or encoder with actions of its own -> the names of its units, inner ones last.
    """

    def __init__(self, model: nn.Module, owned: Mapping[int | str, Sequence[str]]) -> None:
        units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
        self._units = list(units.values())
        self._owned = {owner: [units[name] for name in names] for owner, names in owned.items()}
        assert isinstance(model, FSDPModule)
        self._root = model
        self._groups = [group for unit in self._units for group in torch_private.parameter_groups(unit)]
        self._adding = [group for group in self._groups if not torch_private.reduces_as_computed(group)]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Control the units while the context is open. On exit, also after an error, every unit is sharded again."""
        try:
            for unit in self._units:
                unit.set_reshard_after_backward(False, recurse=False)
                unit.set_requires_gradient_sync(False, recurse=False)
                torch_private.replace_hook_before_backward(unit, lambda output: output)
            for group in self._groups:
                group.pre_forward = lambda module, args, kwargs: (args, kwargs)
                group.post_forward = lambda module, args, output: output
            for group in self._adding:
                group.pre_forward = partial(_pre_forward, group)
            self._root.set_is_last_backward(False)
            yield
        except BaseException:
            torch_private.reset_after_error(self._root)
            raise
        finally:
            for group in self._groups:
                del group.pre_forward, group.post_forward
            for unit in self._units:
                torch_private.replace_hook_before_backward(unit, None)
                unit.set_reshard_after_backward(True, recurse=False)
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.reshard()
            self._root.set_is_last_backward(True)

    def unshard(self, owner: int | str) -> None:
        """Gather the weights of a stage or an encoder. All ranks of their meshes must call it in the same order."""
        for unit in self._owned[owner]:
            unit.unshard()

    def reshard(self, owner: int | str) -> None:
        """Free the gathered weights of a stage or an encoder."""
        for unit in self._owned[owner]:
            unit.reshard()

    def reduce(self, owner: int | str) -> None:
        """Reduce the gradients of a stage or an encoder after its last backward, and free its weights; as unshard."""
        for unit in reversed(self._owned[owner]):
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_requires_gradient_sync(True, recurse=False)
            for group in torch_private.parameter_groups(unit):
                group.post_backward()

    def add_up(self) -> None:
        """Add the gradients of a backward to those that units hold, in the dtype in which they are reduced."""
        for group in self._adding:
            torch_private.add_up_gradients(group)

    def finish(self) -> None:
        """Wait for all reductions, at the end of a step."""
        self._root.set_is_last_backward(True)
        torch_private.end_backward(self._root)


@contextmanager
def reducing_later(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """A context for a backward that another one follows: its units (``names``) keep their weights and gradients.

    Meanwhile FSDP neither waits for other reductions nor forgets the order of the units, by which it prefetches.
    """
    units = [unit for name in names if isinstance(unit := model.get_submodule(name), FSDPModule)]
    groups = [group for unit in units for group in torch_private.parameter_groups(unit)]
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(False)
    for group in groups:
        group.post_backward = lambda *_: None
    try:
        yield
    except BaseException:
        torch_private.reset_after_error(model)
        raise
    finally:
        model.set_is_last_backward(True)
        for group in groups:
            del group.post_backward


def _pre_forward(group: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Add up the gradients of a unit when its backward has ended; a recomputation runs inside of that backward."""
    return (args, kwargs) if torch_private.is_backward() else torch_private.call_after_backward(group, args, kwargs)
