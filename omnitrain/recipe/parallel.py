"""The ``parallel`` node: how components are distributed over ranks; ``build_parallelize_model`` applies it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError

from omnitrain.errors import RecipeError, problem_list
from omnitrain.recipe.globs import matches, matches_weight, unmatched
from omnitrain.recipe.plan_groups import (
    AUTO_CHUNKS,
    Degree,
    EncodePlan,
    ExpertsPlan,
    Lora,
    MemoryPlan,
    Offloaded,
    OffloadedTensor,
    PipelineSchedule,
    Precision,
)
from omnitrain.recipe.strict import Idle, Problem, Strict
from omnitrain.recipe.suggest import hint

FOUNDATION = "foundation"
MAIN = "main"  # the section of all components that no other section names
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ulysses", "tp", "ep")

# Keys that belong together: a component that sets one of them inherits none of the others from the default.
_TOGETHER = (("mode", "dp_replicate", "dp_shard"), ("freeze", "lora"))
_GROUPS = ("precision", "memory", "encode", "experts")  # inherited key by key; other nodes as a whole

QuadraticCost = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["measured"] | None


class PlanError(RecipeError):
    """Problems of a parallel plan; each argument is a problem that starts with its key in the plan."""

    def __str__(self) -> str:
        return problem_list("the parallel plan", self.problems)

    def under(self, key: str) -> PlanError:
        """Return the error for a plan that is the value of ``key``; problems of the parallel state have no key."""
        of_state = "parallel state"
        return PlanError(*(one if one.startswith(of_state) else f"{key}.{one}" for one in self.problems))


# A key that is set, another key, the values of that one with which it makes no sense, and why.
_CONTRADICTIONS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("dp_replicate", "mode", ("fsdp2",), ", which keeps one copy; use `mode: hsdp`"),
    ("dp_shard", "mode", ("replicate",), ", which shards nothing; use `mode: hsdp`"),
    ("lora", "freeze", (True,), "; `lora` already freezes all but the adapters: remove one"),
)
# What cannot be offloaded, a key, its value with which it cannot, and why.
_NOT_OFFLOADED: tuple[tuple[Offloaded, str, Any, str], ...] = (
    ("parameters", "mode", "replicate", "only shards can be offloaded; use `fsdp2`"),
    ("optimizer", "freeze", True, "a frozen component has no optimizer state"),
)


def _literal(value: Any) -> str:
    return "true" if value is True else str(value)


class ComponentPlan(Strict):
    """Distribution of one component over ranks. An unset field takes the default plan's value, then the state's."""

    dp_replicate: Degree = None
    """Number of copies of the parameters. Each copy gets different data."""
    dp_shard: Degree = None
    """Number of ranks over which one copy of the parameters is sharded (FSDP)."""
    tp: Degree = None
    """Number of tensor parallel ranks. Each computes with a shard of every matrix."""
    sequence_parallel: bool | None = None
    """Foundation only. Between blocks, each `tp` rank holds a slice of the tokens: this saves memory and divides the
    work of norms. If that is not exact for a model, every rank keeps all tokens."""
    ulysses: Degree = None
    """Number of ranks that share a sequence and exchange tokens for heads in attention. For a tower: the ranks that
    share the foundation's sequence (`cp` x `ulysses`) also share each call of the tower."""
    cp: Degree = None
    """Number of ranks that share a sequence and pass keys and values around a ring."""
    async_ulysses: bool | None = None
    """Foundation only. The projections of attention overlap with their `ulysses` all-to-alls. Layers for which that is
    not exact to the bit run without overlap."""
    ep: Degree = None
    """Number of ranks over which experts are distributed, among the data-parallel and sequence ranks."""
    pp: Degree = None
    """Foundation only. Number of pipeline ranks; each computes some of the blocks."""
    schedule: PipelineSchedule | None = None
    """Foundation only. How a pipeline (`pp`) runs a step."""
    mode: Literal["fsdp2", "hsdp", "replicate"] | None = None
    """`fsdp2`: parameters sharded over the data-parallel ranks; `hsdp`: `dp_replicate` copies, each sharded over
    `dp_shard` ranks; `replicate`: a full copy on every rank."""
    precision: Precision = Field(default_factory=Precision)
    """Dtypes of parameters, computation and reductions."""
    freeze: bool | None = None
    """The component does not train."""
    lora: Lora | None = None
    """Freeze the component and train low-rank adapters of its matrices."""
    compile: bool | None = None
    """Compile the blocks with `torch.compile`."""
    place: Literal["local", "group", "world"] | None = None
    """Which rank encodes a media item: `local`: the rank that drew it; `group`: one of the ranks that hold its sample
    (`cp` x `ulysses` x `tp`); `world`: any rank, balanced by cost; under `pp`, any rank of all stages. Unset: `group`
    if several ranks hold a sample, else `local`. Of the foundation, which data-parallel rank runs a pack: `local`: the
    rank that drew it; `world`: any, balanced by cost. Unset: `local`."""
    quadratic_cost: QuadraticCost = None
    """With `place: group` or `world`, items are divided by the cost n + `quadratic_cost` * n^2 for an item of n input
    elements; with `place: world` of the foundation, packs by the sum of this cost over their samples of n tokens.
    `measured`: fitted in the first 16 steps and used from step 33 on. Unset: 0."""
    memory: MemoryPlan = Field(default_factory=MemoryPlan)
    """What is computed again, and what waits in CPU memory."""
    encode: EncodePlan = Field(default_factory=EncodePlan)
    """Encoders: how many items are encoded together, and where features wait."""
    experts: ExpertsPlan = Field(default_factory=ExpertsPlan)
    """How experts compute, and how tokens get to them."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that make no sense together."""
        for key, other, values, why in _CONTRADICTIONS:
            value, with_value = getattr(self, key), getattr(self, other)
            if value not in (None, False) and not (key in AXES and value == 1) and with_value in values:
                found = f"found {_literal(value)}" if isinstance(value, int) else "found"
                yield (key,), f"{found} with `{other}: {_literal(with_value)}`{why}"
        for what, other, never, why in _NOT_OFFLOADED:
            if self.memory.offloads(what) and getattr(self, other) == never:
                yield ("memory", "offload"), f"found {what} with `{other}: {_literal(never)}`; {why}"

    @property
    def num_ranks(self) -> int | None:
        """Product of the degrees; None if the data-parallel degrees are not all set."""
        replicas = 1 if self.mode == "fsdp2" else self.dp_replicate
        shards = 1 if self.mode == "replicate" else self.dp_shard
        if replicas is None and self.mode is None and shards is not None:
            replicas = 1
        if replicas is None or shards is None:
            return None
        return math.prod((replicas, shards, *(getattr(self, axis) or 1 for axis in ("tp", "ulysses", "cp", "pp"))))

    def over(self, default: ComponentPlan, but: Collection[str] = ()) -> ComponentPlan:
        """Return this plan with unset keys, those of groups one by one, of ``default``; ``but``: not these.

        Keys that belong together (`mode`, `dp_replicate` and `dp_shard`; `freeze` and `lora`) are inherited together or
        not at all. What the component cannot offload is not inherited.
        """
        own, inherited = _set_keys(self), _set_keys(default)
        apart = {name for names in _TOGETHER if own.keys() & set(names) for name in names}
        inherited = {key: value for key, value in inherited.items() if key not in apart.union(but)}
        merged = inherited | own
        if offload := [what for what in inherited.get("memory.offload", ()) if _can_offload(what, merged)]:
            inherited["memory.offload"] = offload
        else:
            inherited.pop("memory.offload", None)
        return plan_of(inherited | own)

    def changed(self, values: Mapping[str, Any]) -> ComponentPlan:
        """Return this plan with other ``values``, key -> value, such as ``{"experts.chunks": 2}``; none is checked."""
        plan = self
        for key, value in values.items():
            group, _, name = key.rpartition(".")
            update = {group: getattr(plan, group).model_copy(update={name: value})} if group else {name: value}
            plan = plan.model_copy(update=update)
        return plan


def keys_of(name: str) -> list[str]:
    """Return the keys of a group of a plan, such as ``encode.window``; of another name, the name itself."""
    if name not in _GROUPS:
        return [name]
    return [f"{name}.{key}" for key, _ in getattr(ComponentPlan(), name)]


def value_of(plan: ComponentPlan, key: str) -> Any:
    """Return the value of a key of a plan, such as ``memory.offload``; None: it, or the node that has it, is unset."""
    node: Any = plan
    for name in key.split("."):
        node = getattr(node, name, None)
    return node


def _set_keys(plan: ComponentPlan) -> dict[str, Any]:
    """Key -> value of the keys that are set, with those of groups in place of the groups."""
    groups = {name: getattr(plan, name) for name in _GROUPS}
    of_groups = {f"{name}.{key}": value for name, group in groups.items() for key, value in group}
    found = {key: value for key, value in plan if key not in groups} | of_groups
    return {key: value for key, value in found.items() if value is not None}


def plan_of(values: Mapping[str, Any]) -> ComponentPlan:
    """Return the plan with these values; keys such as ``encode.window`` are those of groups."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[name] = value
    return ComponentPlan(**tree)


def _can_offload(what: str, values: Mapping[str, Any]) -> bool:
    if what in get_args(OffloadedTensor):
        return not MemoryPlan(recompute=values.get("memory.recompute")).recomputes_blocks
    return all(values.get(key) != never for named, key, never, _ in _NOT_OFFLOADED if named == what)


# A component of a section has ranks of its own: it does not inherit these fields from the default plan.
_OF_RANKS = (*AXES, "mode", "schedule", "place", "encode.window", "sequence_parallel", "async_ulysses")


class Section(Strict):
    """Components on ranks of their own. They work for the other ranks, which hold the rest of the model."""

    components: list[str] = Field(min_length=1)
    """The encoders, decoders and teachers of this section. The first one's degrees factorise its ranks. `NAME.tower` is
    an encoder without its projector, which then is the component `NAME.projector`, in `main` or in another section."""
    ranks: int = Field(ge=1)
    """Number of ranks. Sections come after the other ranks, in this order."""
    micro_batch: int = Field(1, ge=1)
    """Number of micro-batches of the other ranks whose items are encoded together."""
    slots: int = Field(2, ge=1)
    """Number of messages with features for which each receiving rank has room."""
    in_flight: Degree = None
    """Of trained encoders: number of encoded micro-batches (of this section) whose activations are kept at a time.
    Unset: no limit."""
    encode_twice: bool = False
    """Keep no activations; the backward of trained encoders repeats their forward."""
    carrier: Literal["torch", "nixl"] = "torch"
    """What sends features to the other ranks: `torch`: its point-to-point operations; `nixl`: NIXL, which must be
    installed, and writes from host memory to host memory while the receiver computes."""
    ahead: int = Field(0, ge=0, le=1)
    """Of frozen encoders: 1 encodes the items of the next step while this one trains, and keeps their features for it.
    No step then waits for its first features."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that can have no effect."""
        if self.encode_twice:
            yield Idle("in_flight", "but `encode_twice: true` keeps no activations; remove one of the two")


def _shard_dim(value: Any) -> Any:
    """Convert torch's ``Shard(0)``, or its text, to 0."""
    text = re.fullmatch(r"Shard\((?:dim=)?(\d+)\)", value if isinstance(value, str) else repr(value))
    return int(text[1]) if text else value


ShardDim = Annotated[int, BeforeValidator(_shard_dim, json_schema_input_type=int | str), Field(ge=0)]


class ParallelPlan(Strict):
    """The plan of every component."""

    default: ComponentPlan = Field(default_factory=ComponentPlan)
    """Plan for all components. The plan of a component overrides it."""
    components: dict[str, ComponentPlan] = Field(default_factory=dict)
    """Component name -> its plan."""
    sections: dict[str, Section] = Field(default_factory=dict)
    """Section name -> encoders, decoders or teachers on ranks of their own. All other components are on the ranks that
    are left, the section `main`."""
    tp_plan: dict[str, str] | None = None
    """Glob of module names -> tensor parallel style: `colwise`, `rowwise`, ... Unset: the model's own plan."""
    ep_plan: dict[str, ShardDim] | None = None
    """Glob of parameter names -> dimension that counts the experts. Unset: the model's own plan, or all experts."""
    auto: bool = False
    """Choose the degrees, recompute and the place of encoders when a run starts, as `omnitrain plan` does; the rest of
    the plan stays. `parallel: auto` is short for it. A run keeps what it has chosen."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield what the plans of components contradict in the default plan."""
        for name in self.components:
            try:
                self.of(name)
            except ValidationError as error:
                yield from ((("components", name, *problem["loc"]), problem["msg"]) for problem in error.errors())

    def of(self, component: str) -> ComponentPlan:
        """Return the component's plan, completed by the default plan; a section inherits nothing about ranks."""
        but = _OF_RANKS if self.section_of(component) != MAIN else ()
        return self.components.get(component, ComponentPlan()).over(self.default, but)

    def section_of(self, component: str) -> str:
        """Return the name of the section that has the component."""
        return next((name for name, section in self.sections.items() if component in section.components), MAIN)

    def problems(
        self,
        names: Mapping[str, Iterable[str]],
        *,
        frozen: Collection[str] = (),
        degrees: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Return one line per problem of the plan with the model and with the parallel state.

        ``names``: component -> names of its modules and parameters, relative to it; ``frozen``: components that do not
        train, whatever the plan says; ``degrees``: axis of :data:`AXES` -> degree, if the parallel state sets it.
        """
        every_name = [name for names_of_component in names.values() for name in names_of_component]
        return [
            *self._component_problems(names.keys(), frozen),
            *self._degree_problems(degrees or {}),
            *(
                f"{field}: {unmatched(glob, every_name)}"
                for field, globs, fits in (
                    ("tp_plan", self.tp_plan, matches),
                    ("ep_plan", self.ep_plan, matches_weight),
                )
                for glob in globs or ()
                if not any(fits(glob, name) for name in every_name)
            ),
        ]

    def with_numbers(self, key: str, word: str, numbers: Mapping[str, float]) -> ParallelPlan:
        """Return the plan with these numbers, component -> number, where ``key`` of its plan is ``word``."""
        fixed = {}
        for name, number in numbers.items():
            plan = self.components.get(name, ComponentPlan())
            own = value_of(plan, key)
            if (value_of(self.default, key) if own is None else own) == word:
                fixed[name] = plan.changed({key: number})
        return self.model_copy(update={"components": {**self.components, **fixed}})

    def with_expert_chunks(self, numbers: Mapping[str, int]) -> ParallelPlan:
        """Return the plan with the numbers of chunks, component -> number, in place of `auto`, also of the default."""
        of_default = self.default.experts.chunks
        default = self.default.changed({"experts.chunks": None if of_default == AUTO_CHUNKS else of_default})
        return self.with_numbers("experts.chunks", AUTO_CHUNKS, numbers).model_copy(update={"default": default})

    def divided_encoders(self) -> list[str]:
        """Return the encoders whose towers sections name without their projectors."""
        named = [component for section in self.sections.values() for component in section.components]
        return sorted({component.removesuffix(".tower") for component in named if component.endswith(".tower")})

    def reads(self) -> dict[str, str]:
        """Return projector -> the tower that it reads, of the divided encoders."""
        return {f"{encoder}.projector": f"{encoder}.tower" for encoder in self.divided_encoders()}

    def path_of(self, component: str, *fields: str) -> str:
        """Return the key of the plan that sets one of ``fields`` for the component: its own plan, or the default."""
        plan = self.components.get(component, ComponentPlan())
        is_set = any(value_of(plan, field) != value_of(ComponentPlan(), field) for field in fields)
        return f"components.{component}" if is_set else "default"

    def _component_problems(self, known: Collection[str], frozen: Collection[str]) -> Iterator[str]:
        for name, plan in self.components.items():
            path = f"components.{name}"
            if name not in known:
                yield f"{path}: unknown component; {hint(name, known)}"
            elif name in frozen and plan.freeze is False:
                yield f"{path}.freeze: found false, but the component is frozen elsewhere; remove one of the two"
            elif name in frozen and plan.memory.offloads("optimizer") and plan.lora is None:
                yield f"{path}.memory.offload: found optimizer, but a frozen component has no optimizer state"

    def _degree_problems(self, degrees: Mapping[str, int]) -> Iterator[str]:
        """Compare the foundation's degrees with the state; other components may have different ones."""
        plan, merged = self.components.get(FOUNDATION, ComponentPlan()), self.of(FOUNDATION)
        for axis, degree in degrees.items():
            planned = getattr(merged, axis)
            if planned is not None and planned != degree:
                path = "default" if getattr(plan, axis) is None else f"components.{FOUNDATION}"
                yield (
                    f"{path}.{axis}: found {planned}, but the parallel state has {degree}; "
                    f"call init_parallel_state({axis}_size={planned}), or remove it here"
                )


PlanOrAuto = Annotated[
    ParallelPlan,
    BeforeValidator(
        lambda value: {"auto": True} if value == "auto" else value,
        json_schema_input_type=ParallelPlan | Literal["auto"],
    ),
]


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one PlanError for all problems of a parallel plan, if there are any."""
    if problems:
        raise PlanError(*problems)
