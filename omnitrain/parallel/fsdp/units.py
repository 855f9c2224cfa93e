"""Choose the modules of each component to shard as FSDP units; needs no process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.fsdp import FSDPModule

from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import blocks_in
from omnitrain.recipe.globs import any_layer
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.torch_private import parameter_groups, reset_after_error

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ComponentUnits:
    """The FSDP units of a component, by module name."""

    fp32: tuple[str, ...] = ()  # trained modules that stay fp32 at any compute dtype; blocks inside them come first
    in_experts: tuple[str, ...] = ()  # modules inside experts that every rank has, such as a norm after the experts
    experts: tuple[str, ...] = ()  # modules of experts under expert parallelism
    blocks: tuple[str, ...] = ()  # see :func:`~omnitrain.ops.compile.blocks.blocks_in`
    # modules with the other parameters: an attached component itself, or the modules of the foundation without
    # parameters of another component
    rest: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All units in the order of sharding, inner ones first."""
        return (*self.fp32, *self.in_experts, *self.experts, *self.blocks, *self.rest)


def find_units(model: OmniModel, experts: Mapping[str, Sequence[str]] | None = None) -> dict[str, ComponentUnits]:
    """Return component -> its FSDP units, without the root.

    A unit has parameters of one component only, and contains all modules that use them (tied weights). Its parameters
    are read only while it runs. All ranks call it equally often, whatever they encode: a projector in a loop over
    images is no unit, because ranks with more images would gather it more often; neither is a tower that the
    foundation's forward calls for some samples only. Other parameters belong to the root, for example bare parameters
    of the foundation. If the root would have none, the foundation is a unit, too, so that it can be called by itself.
    ``experts``: component -> its modules of experts under expert parallelism, which have a different mesh.
    """
    parameters = _Parameters(model)
    sharded = experts or {}
    units = {name: parameters.units_of(name, sharded.get(name, ())) for name in model.components if name != FOUNDATION}
    foundation = parameters.units_of(FOUNDATION, sharded.get(FOUNDATION, ()))
    inside = {path for of_component in (*units.values(), foundation) for path in of_component.all}
    if parameters.rest_is_of(FOUNDATION, model.get_submodule(FOUNDATION), inside):
        foundation = replace(foundation, rest=(FOUNDATION,))
    return {FOUNDATION: foundation, **units}


def unit_names(units: Mapping[str, ComponentUnits]) -> dict[str, tuple[str, ...]]:
    """Return component -> the names of its units of :func:`find_units`, with the root, ``""``, if it is one."""
    names = {name: of_component.all for name, of_component in units.items()}
    if FOUNDATION not in names[FOUNDATION]:  # then the omni model itself is the root unit
        names[FOUNDATION] = (*names[FOUNDATION], "")
    return names


def blocks_of(model: OmniModel) -> dict[str, tuple[str, ...]]:
    """Return component -> names of its blocks (:func:`~omnitrain.ops.compile.blocks.blocks_in`)."""
    parameters = _Parameters(model)
    return {name: tuple(parameters.blocks(name)) for name in model.components}


def ignored_params(model: OmniModel) -> set[nn.Parameter]:
    """Return the parameters that FSDP ignores: frozen ones that stay fp32, such as a media tokenizer's."""
    is_fp32 = stays_fp32(model)
    return {parameter for name, parameter in model.named_parameters() if is_fp32(name) and not parameter.requires_grad}


class _Parameters:
    """The component of each parameter, and the modules that hold it."""

    def __init__(self, model: OmniModel) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        ignored = ignored_params(model)
        self._owner: Mapping[nn.Parameter, str] = {
            parameter: name
            for name, parameters in model.components.items()
            for parameter in parameters.values()
            if parameter not in ignored
        }
        self._holders: dict[nn.Parameter, set[nn.Module]] = {}
        self._managed: dict[nn.Module, dict[nn.Parameter, None]] = {}  # of a module and those in it; no ignored ones
        self._find(model)
        self._blocks = list(blocks_in(model))
        self._uneven = {
            self._modules[f"{FOUNDATION}.{name}"]
            for interface in model.runner.native.interfaces.values()
            for name in interface.called_by_number
        }
        outside = {f"{FOUNDATION}.{name}" for name in model.runner.contract.read_outside}
        self._outside = {module for name, module in self._modules.items() if any_layer(name) in outside}
        is_fp32 = stays_fp32(model)
        self._beyond_text = set(model.runner.in_forward.parameters)
        self._fp32 = {parameter for name, parameter in model.named_parameters() if is_fp32(name)}

    def _find(self, module: nn.Module) -> dict[nn.Parameter, None]:
        """Note the parameters of a module, and return all parameters in it that are not ignored."""
        if module not in self._managed:
            own = list(module.parameters(recurse=False))
            for parameter in own:
                self._holders.setdefault(parameter, set()).add(module)
            self._managed[module] = dict.fromkeys(parameter for parameter in own if parameter in self._owner)
            for child in module.children():
                self._managed[module] |= self._find(child)
        return self._managed[module]

    def units_of(self, component: str, experts: Sequence[str]) -> ComponentUnits:
        """The component's units; for the foundation without ``rest``."""
        shared = [f"{name}.{child}" for name in experts for child, _ in self._modules[name].named_children()]
        whole = list(self._largest(component, lambda module: self._fp32.issuperset(self._managed[module])))
        inside = [name for name in self.blocks(component) if any(name.startswith(f"{outer}.") for outer in whole)]
        fp32 = [*inside, *whole]
        blocks = [name for name in self.blocks(component) if name not in fp32]
        rest = [] if component == FOUNDATION else list(self._largest(component, lambda _: True))
        inner = {*fp32, *blocks}
        return ComponentUnits(
            fp32=tuple(fp32),
            in_experts=tuple(name for name in shared if self._managed[self._modules[name]]),
            experts=tuple(experts),
            blocks=tuple(blocks),
            rest=tuple(name for name in rest if name not in inner),
        )

    def blocks(self, component: str) -> list[str]:
        return [name for name, block in self._blocks if self._is_unit(block, component)]

    def rest_is_of(self, component: str, module: nn.Module, units: set[str]) -> bool:
        """Whether all parameters of ``module`` outside of ``units`` belong to the component and to no other module."""
        inside = {m for name in units for m in self._modules[name].modules()}
        below = set(module.modules())
        rest = [p for p in self._managed[module] if not self._holders[p] <= inside]
        return all(self._owner[p] == component and self._holders[p] <= below for p in rest)

    def _largest(self, component: str, condition: Callable[[nn.Module], bool]) -> Iterator[str]:
        """Names of the largest modules that can be units of the component and meet ``condition``."""
        waiting = [name for name, _ in self._model.named_children()][::-1]
        while waiting:
            name = waiting.pop()
            module = self._modules.get(name)
            if module is None:  # shared with a module of another name
                continue
            callable_ = not isinstance(module, _NEVER_CALLED) and name != FOUNDATION
            if callable_ and self._is_unit(module, component) and condition(module):
                yield name
            elif any(self._owner[p] == component for p in self._managed[module]):
                waiting += [f"{name}.{child}" for child, _ in module.named_children()][::-1]

    def _is_unit(self, module: nn.Module, component: str) -> bool:
        managed = self._managed[module]
        if module in self._uneven or module in self._outside or not self._beyond_text.isdisjoint(managed):
            return False
        if not managed or any(self._owner[p] != component for p in managed):
            return False
        below = set(module.modules())
        return all(self._holders[p] <= below for p in managed)


@contextmanager
def gathered(model: OmniModel) -> Iterator[None]:
    """Gather embeddings, heads, norms and complete decoders on every rank while the context is open.

    All ranks must enter together. Inside, only blocks of the foundation and of encoders gather their weights for each
    call, so all ranks must call each of these blocks equally often; nothing else issues collectives. Decoders are
    gathered with their blocks, because ranks generate and decode media at different times. On exit, also after an
    error, all weights are sharded again. Without FSDP the context does nothing.
    """
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    blocks = {
        name for component, names in blocks_of(model).items() if component not in model.decoder_names for name in names
    }
    summoned = [unit for name, unit in units.items() if name not in blocks]
    # torch has a setter for resharding after the forward, but no getter; the parameter group has the state.
    groups = [group for unit in summoned for group in parameter_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in summoned:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    except BaseException:
        reset_after_error(model)
        raise
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        for unit in units.values():
            unit.reshard()
