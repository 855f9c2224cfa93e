"""Resolve the tensor parallel style of each module, from the model's HF plan or the user's globs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from torch import nn
from transformers import PreTrainedConfig

from omnitrain.models.adapters.lora import without_adapters
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.config_value import config_value
from omnitrain.parallel.tensor.styles import STYLES
from omnitrain.recipe.globs import any_layer, matches
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan
from omnitrain.recipe.suggest import hint


@dataclass(frozen=True)
class TensorPlan:
    """The resolved tensor parallelism of a model."""

    # name of a module or parameter in the model without adapters -> style
    styles: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)  # the same names -> the component of each
    # component with at least one style -> number of ranks that share its matrices
    degrees: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # why it cannot be applied, one line each

    def of_components(self, names: Collection[str]) -> dict[str, str]:
        """Return the styles of some components."""
        return {name: style for name, style in self.styles.items() if self.owners[name] in names}


def tensor_plan(model: OmniModel, plan: ParallelPlan, degrees: Mapping[str, int]) -> TensorPlan:
    """Return the styles of a model that is not parallelized yet; ``degrees``: section -> its tensor parallel ranks.

    Without ``plan.tp_plan`` the foundation's HF plan applies, except its entries for towers, and for modules that the
    foundation's forward uses only for some samples, because no plan can be tried on these. Its own HF plan applies to a
    teacher whose own plan has tp. A glob that matches another
    name of the foundation applies only to the foundation; another glob to all components that it matches.
    """
    problems: list[str] = []
    if plan.tp_plan and {1, None}.issuperset([*degrees.values(), *map(attrgetter("tp"), plan.components.values())]):
        problems.append("tp_plan: found with tp 1, where it does nothing; set tp above 1, or remove it")
    styles: dict[str, str] = {}
    owners: dict[str, str] = {}
    cut: dict[str, int] = {}
    for section, tp in degrees.items():
        own = {name: _degree(name, plan, tp) for name in model.components if plan.section_of(name) == section}
        if tp > 1:
            planning = _Planning(model, tp, own)
            found = _styles_of(planning, plan, section)
            problems += planning.problems
            styles |= found
            owners |= {name: planning.component_of(name) for name in found}
            cut |= {owners[name]: own[owners[name]] for name in found}
        if not problems:
            problems += [one for name in own for one in _component_problems(name, plan, tp, name in cut)]
    return TensorPlan(problems=tuple(dict.fromkeys(problems))) if problems else TensorPlan(styles, owners, cut)


def _degree(name: str, plan: ParallelPlan, tp: int) -> int:
    """The number of ranks that share a component's matrices if it has styles: its own, or all of its section."""
    component = plan.components.get(name)
    own = None if component is None or name == FOUNDATION else component.tp
    return own if own is not None and 1 < own < tp and tp % own == 0 else tp


def _styles_of(planning: _Planning, plan: ParallelPlan, section: str) -> dict[str, str]:
    """The styles of the components of a section; ``planning`` notes problems."""
    if plan.tp_plan is not None:
        styles = planning.globs(plan.tp_plan)
    else:
        styles = planning.of_model(FOUNDATION) if section == MAIN else {}
    for name in planning.teachers:
        if (plan.components.get(name, ComponentPlan()).tp or 1) > 1:
            styles = planning.of_model(name) | styles
    styles = {name: style for name, style in styles.items() if plan.section_of(planning.component_of(name)) == section}
    return {} if planning.problems else planning.checked(styles)


def _component_problems(name: str, plan: ParallelPlan, tp: int, is_named: bool) -> Iterator[str]:
    component = plan.components.get(name)  # the default plan's tp only affects components with styles
    if name == FOUNDATION or component is None or component.tp in (None, 1):
        return
    section = plan.section_of(name)
    if tp % component.tp:
        fitting = " or ".join(str(degree) for degree in range(1, tp + 1) if tp % degree == 0)
        whose = "the foundation" if section == MAIN else plan.sections[section].components[0]
        apart = f", or give {name} a section of its own" if section == MAIN else ""
        yield f"components.{name}.tp: found {component.tp}, but {whose} has {tp}; use {fitting}{apart}"
    elif not is_named:
        yield (
            f"components.{name}.tp: found {component.tp}, but transformers has no tensor parallel plan for this "
            "component; list its modules in tp_plan, or use 1"
        )
    elif component.tp < tp:
        for axis in ("ulysses", "ep"):
            if (degree := getattr(component, axis) or 1) > 1:
                yield (
                    f"components.{name}.tp: found {component.tp} with {axis} {degree}, which needs all {tp} tensor "
                    f"parallel ranks, or none; use {tp} or 1, or {axis} 1"
                )


class _Planning:
    """Resolves the styles of a model, and collects problems."""

    def __init__(self, model: OmniModel, tp: int, degrees: Mapping[str, int]) -> None:
        """``tp``: of the section; ``degrees``: component -> the number of ranks that share its matrices."""
        self.problems: list[str] = []
        self._tp, self._degrees = tp, degrees
        self._model = model
        self._modules, self._parameters = without_adapters(model)
        owner = {p: name for name, parameters in model.components.items() for p in parameters.values()}
        self._component: dict[str, str] = {}
        self._inside: dict[str, list[str]] = {}
        self._holders: dict[nn.Parameter, list[str]] = {}
        for path, parameter in self._parameters.items():
            self._holders.setdefault(parameter, []).append(path)
            for cut in range(path.count(".") + 1):
                name = path.rsplit(".", cut)[0]
                self._component.setdefault(name, owner[parameter])
                self._inside.setdefault(name, []).append(path)

    def component_of(self, name: str) -> str:
        """The component of a module or parameter, by its first parameter."""
        return self._component.get(name, FOUNDATION)

    def _tp_of(self, name: str) -> int:
        return self._degrees.get(self.component_of(name), self._tp)

    @property
    def teachers(self) -> Collection[str]:
        return self._model.teachers

    def of_model(self, component: str) -> dict[str, str]:
        """The styles of the HF plan of the foundation, or of a teacher."""
        model, root = self._model.language_models[component]
        planned = {f"{root}.{key}": style for key, style in (model.tp_plan or {}).items()}
        self._require_known(planned.values())
        if self.problems:
            return {}
        styles = {}
        for name in (*self._modules, *self._parameters):
            style = planned.get(any_layer(name))
            if style is not None and self.component_of(name) == component and not self._is_untried(name):
                styles[name] = style
        for name in [name for name in styles if self._is_vocabulary(name) and self._rest(name, styles[name])]:
            del styles[name]  # replicating an indivisible vocabulary is always correct
        if not any(STYLES[style].cut for name, style in styles.items() if not self._is_vocabulary(name)):
            kind = type(model).__name__
            self.problems.append(
                f"tp: found {self._tp}, but {kind} has no tensor parallel plan for its layers; list its modules "
                "in tp_plan, such as `layers.*.self_attn.q_proj: colwise` and `layers.*.self_attn.o_proj: rowwise`"
            )
        return styles

    def globs(self, plan: Mapping[str, str]) -> dict[str, str]:
        """The styles that the user's globs set."""
        self._require_known(plan.values())
        components = {name: self.component_of(name) for name in (*self._modules, *self._parameters) if name}
        glob_of: dict[str, str] = {}
        for glob, style in plan.items():
            matched = [name for name in components if matches(glob, name)]
            in_foundation = [name for name in matched if components[name] == FOUNDATION and not self._is_untried(name)]
            for name in in_foundation or matched:
                other = glob_of.setdefault(name, glob)
                if plan[other] != style:
                    self.problems.append(f"tp_plan: {name}: `{other}` says {plan[other]}, `{glob}` says {style}")
        return {name: plan[glob] for name, glob in glob_of.items()}

    def _require_known(self, styles: Iterable[str]) -> None:
        for style in dict.fromkeys(styles):
            if style not in STYLES:
                self.problems.append(f"tp_plan: unknown style {style!r}; {hint(style, STYLES)}")

    def checked(self, styles: dict[str, str]) -> dict[str, str]:
        """The styles that have an effect, with styles for tied weights; notes problems."""
        experts = [f"{name}." for name, style in styles.items() if style == "moe_tp_experts"]
        styles = {name: style for name, style in styles.items() if not name.startswith(tuple(experts))}
        styles |= self._of_tied(styles)
        styles |= self._of_teachers(styles)
        for name, style in styles.items():
            self.problems += self._problems_of(name, style)
        if not self.problems:
            self.problems += self._head_problems(styles)
        return {name: style for name, style in styles.items() if STYLES[style].cut or STYLES[style].forward}

    def _of_tied(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Styles of modules that share a parameter with a sharded module."""
        found = {}
        for name, style in styles.items():
            for path in self._inside[name] if STYLES[style].cut else ():
                for holder in {other.rpartition(".")[0] for other in self._holders[self._parameters[path]]}:
                    if holder not in styles and holder != name and path != name:
                        is_table = isinstance(self._modules[holder], nn.Embedding)
                        found[holder] = "embedding_rowwise" if is_table else "colwise_gather_output"
        return found

    def _of_teachers(self, styles: Mapping[str, str]) -> dict[str, str]:
        """The output layers of teachers are sharded as the foundation's head."""
        head = self._model.foundation.get_output_embeddings()
        of_head = [style for name, style in styles.items() if self._modules.get(name) is head]
        return {f"{teacher}.head": style for teacher in self._model.compared for style in of_head}

    def _problems_of(self, name: str, style: str) -> Iterator[str]:
        shown, kind, target = _shown(name), STYLES[style], self._modules.get(name)
        allowed, plural = _MODULES_OF.get(kind.of, (nn.Module, "modules"))
        if kind.of == "experts" and isinstance(target, nn.Linear):
            yield (
                f"tp_plan: {shown}: {style} is for experts; for a matrix fused from several use colwise_gather_output, "
                "which keeps the order of its columns, and rowwise_split_input for the next matrix"
            )
        elif target is not None and not isinstance(target, allowed):
            yield f"tp_plan: {shown}: {style} is for {plural}, found {type(target).__name__}"
        elif target is None and (kind.of == "embedding" or kind.forward not in (None, *_OF_PARAMETERS)):
            yield f"tp_plan: {shown}: {style} is for modules, found a parameter"
        elif (kind.cut or kind.forward) and self._is_untried(name):
            yield (
                f"tp_plan: {shown}: only samples that the foundation's own forward reads reach it, and on these no "
                "plan can be tried; leave it out, so that it is whole on every rank"
            )
        elif rest := self._rest(name, style):
            what = "rows" if isinstance(target, nn.Embedding) else f"{kind.cut}put features"
            yield self._indivisible(rest, what, name, rest)

    def _rest(self, name: str, style: str) -> int:
        """The size of the first dim to shard that the ranks do not divide; 0: all are divisible."""
        for path in self._inside.get(name, ()):
            parameter = self._parameters[path]
            dim = STYLES[style].dim(path.rpartition(".")[2], parameter)
            if dim is not None and parameter.size(dim) % self._tp_of(name):
                return parameter.size(dim)
        return 0

    def _is_untried(self, name: str) -> bool:
        """Whether no sample of the tiny model, on which a plan is tried, reaches a module."""
        return self._model.runner.in_forward.reaches_alone(name.removeprefix(f"{FOUNDATION}."))

    def _is_vocabulary(self, name: str) -> bool:
        module, models = self._modules.get(name), [model for model, _ in self._model.language_models.values()]
        tables = [table for model in models for table in (model.get_input_embeddings(), model.get_output_embeddings())]
        return module is not None and module in tables

    def _head_problems(self, styles: Mapping[str, str]) -> Iterator[str]:
        """Attention with sharded projections must have whole heads on every rank."""
        for name in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"):
            heads = _heads(self._modules[name])
            for what, number in heads.items():
                if number % self._tp_of(name):
                    yield self._indivisible(number, what, name, math.gcd(*heads.values()))

    def _indivisible(self, number: int, what: str, name: str, common: int) -> str:
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        return (
            f"tp: found {self._tp_of(name)}, which does not divide the {number} {what} of {_shown(name)}; use {fitting}"
        )


# Kind of module that a style is for -> its class, and the plural of its name.
_MODULES_OF: Mapping[str, tuple[type[nn.Module], str]] = {
    "linear": (nn.Linear, "linear layers"),
    "embedding": (nn.Embedding, "embeddings"),
}
_OF_PARAMETERS = tuple(STYLES[style].forward for style in ("colwise", "rowwise"))


def _heads(module: nn.Module) -> dict[str, int]:
    """The numbers of heads of an attention module; empty for other modules."""
    config = getattr(module, "config", None)
    if "attn" not in type(module).__name__.lower() and "attention" not in type(module).__name__.lower():
        return {}
    if not isinstance(config, PreTrainedConfig):
        return {}
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int) and getattr(config, "per_layer_attributes", None):
        config = config.per_layer_config[layer]
    found = {"heads": "num_attention_heads", "key-value heads": "num_key_value_heads"}
    numbers = {what: config_value(config, attribute) for what, attribute in found.items()}
    return {what: number for what, number in numbers.items() if isinstance(number, int)}


def _shown(name: str) -> str:
    """A name relative to its component, for all layers."""
    return any_layer(name.removeprefix(f"{FOUNDATION}."))
