"""Which modules of a model are sharded as units, component by component. Modules only: no process group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import blocks_in
from omnitrain.recipe.globs import any_layer
from omnitrain.recipe.parallel import FOUNDATION

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ComponentUnits:
    """Modules that gather and reduce their parameters together, by name.

    Attributes:
        fp32: modules that stay fp32 whatever the component computes in, and train; blocks in them before these.
        experts: the experts of layers that are spread over ranks.
        in_experts: modules inside these that every rank has, such as a norm behind them.
        blocks: see :func:`~omnitrain.ops.compile.blocks.blocks_in`.
        rest: what has the component's other parameters: an attached component itself, or those modules of the
            foundation that have nothing of another component.
    """

    fp32: tuple[str, ...] = ()
    in_experts: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Inner ones first: the order in which they are sharded."""
        return (*self.fp32, *self.in_experts, *self.experts, *self.blocks, *self.rest)


def find_units(model: OmniModel, experts: Mapping[str, Sequence[str]] | None = None) -> dict[str, ComponentUnits]:
    """The units of every component, the root's left out.

    A unit has parameters of one component only, and all modules that use a parameter of it (tied weights), and none of
    its parameters is read while it does not run. It is called as often whatever is encoded: no projector in a loop over
    images, which ranks with more of them would gather more often, and no tower that the foundation's own forward calls
    for some samples only. What is in no unit, such as a bare parameter beside the foundation's modules, is the root's.
    Where the root has none of that, the foundation is a unit, too, so that it can be called by itself.

    Args:
        model: the model.
        experts: component -> its modules of experts that are spread over ranks: they lie on a mesh of their own.
    """
    parameters = _Parameters(model)
    spread = experts or {}
    units = {name: parameters.units_of(name, spread.get(name, ())) for name in model.components if name != FOUNDATION}
    own = parameters.units_of(FOUNDATION, spread.get(FOUNDATION, ()))
    inside = {path for found in (*units.values(), own) for path in found.all}
    if parameters.only_own_left(model.get_submodule(FOUNDATION), FOUNDATION, inside):
        own = replace(own, rest=(FOUNDATION,))
    return {FOUNDATION: own, **units}


def blocks_of(model: OmniModel) -> dict[str, tuple[str, ...]]:
    """Component -> names of its blocks (:func:`~omnitrain.ops.compile.blocks.blocks_in`)."""
    parameters = _Parameters(model)
    return {name: tuple(parameters.blocks(name)) for name in model.components}


def stays_fp32(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether the parameter of this name is one that its model keeps in fp32 at any precision."""
    names = sorted(model._keep_in_fp32_modules_strict or ())
    pattern = re.compile("|".join(rf"(^|\.)({name})($|\.)" for name in names) or r"(?!)")
    return lambda path: pattern.search(path) is not None


def ignored_params(model: OmniModel) -> set[nn.Parameter]:
    """Parameters that are in no unit: frozen ones that stay fp32, such as a media tokenizer's."""
    keep = stays_fp32(model)
    return {parameter for name, parameter in model.named_parameters() if keep(name) and not parameter.requires_grad}


class _Parameters:
    """Whose each parameter is, and which modules hold it."""

    def __init__(self, model: OmniModel) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        whole = ignored_params(model)
        self._owner: Mapping[nn.Parameter, str] = {
            parameter: name
            for name, parameters in model.components.items()
            for parameter in parameters.values()
            if parameter not in whole
        }
        self._holders: dict[nn.Parameter, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._holders.setdefault(parameter, set()).add(module)
        self._uneven = {
            self._modules[f"{FOUNDATION}.{name}"]
            for port in model.runner.native.ports.values()
            for name in port.called_by_number
        }
        outside = {f"{FOUNDATION}.{name}" for name in model.runner.contract.read_outside}
        self._outside = {module for name, module in self._modules.items() if any_layer(name) in outside}
        keep = stays_fp32(model)
        self._beyond_text = set(model.runner.in_forward.parameters)
        self._fp32 = {parameter for name, parameter in model.named_parameters() if keep(name)}

    def units_of(self, component: str, experts: Sequence[str]) -> ComponentUnits:
        """The component's units; the foundation's without what is beside its blocks."""
        shared = [f"{name}.{child}" for name in experts for child, _ in self._modules[name].named_children()]
        whole = list(self._largest(component, lambda module: self._fp32.issuperset(self._managed(module))))
        inside = [name for name in self.blocks(component) if any(name.startswith(f"{outer}.") for outer in whole)]
        fp32 = [*inside, *whole]
        blocks = [name for name in self.blocks(component) if name not in fp32]
        rest = [] if component == FOUNDATION else list(self._largest(component, lambda _: True))
        inner = {*fp32, *blocks}
        return ComponentUnits(
            fp32=tuple(fp32),
            in_experts=tuple(name for name in shared if self._managed(self._modules[name])),
            experts=tuple(experts),
            blocks=tuple(blocks),
            rest=tuple(name for name in rest if name not in inner),
        )

    def blocks(self, component: str) -> list[str]:
        return [name for name, block in blocks_in(self._model) if self._is_unit(block, component)]

    def only_own_left(self, module: nn.Module, component: str, units: set[str]) -> bool:
        """Whether what is beside ``units`` belongs to the component, and no module elsewhere ties it."""
        inside = {m for name in units for m in self._modules[name].modules()}
        below = set(module.modules())
        left = [p for p in self._managed(module) if not self._holders[p] <= inside]
        return all(self._owner[p] == component and self._holders[p] <= below for p in left)

    def _largest(self, component: str, condition: Callable[[nn.Module], bool]) -> Iterator[str]:
        """Names of the largest modules that can be units of the component and meet ``condition``."""
        waiting = [name for name, _ in self._model.named_children()][::-1]
        while waiting:
            name = waiting.pop()
            module = self._modules.get(name)
            if module is None:  # known by another name
                continue
            callable_ = not isinstance(module, _NEVER_CALLED) and name != FOUNDATION
            if callable_ and self._is_unit(module, component) and condition(module):
                yield name
            elif any(self._owner[p] == component for p in self._managed(module)):
                waiting += [f"{name}.{child}" for child, _ in module.named_children()][::-1]

    def _is_unit(self, module: nn.Module, component: str) -> bool:
        managed = self._managed(module)
        if module in self._uneven or module in self._outside or not self._beyond_text.isdisjoint(managed):
            return False
        below = set(module.modules())
        return bool(managed) and all(self._owner[p] == component and self._holders[p] <= below for p in managed)

    def _managed(self, module: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in module.parameters() if parameter in self._owner]
