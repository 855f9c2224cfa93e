"""The ``parallel`` node: how components are distributed over ranks; ``build_parallelize_model`` applies it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from omnitrain.errors import RecipeError, problem_list
from omnitrain.recipe.globs import matches, matches_weight, unmatched
from omnitrain.recipe.lora import Lora
from omnitrain.recipe.strict import Idle, Problem, Strict
from omnitrain.recipe.suggest import hint

FOUNDATION = "foundation"
MAIN = "main"  # the section of all components that no other section names
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ulysses", "tp", "ep")

# Fields that belong together: a component that sets one of them inherits none of the others from the default.
_TOGETHER = (("mode", "dp_replicate", "dp_shard"), ("recompute", "saved_ops", "recomputed_parts"))

Degree = Annotated[int | None, Field(ge=1)]
Chunks = Annotated[int, Field(ge=1)] | Literal["auto"] | None
AUTO_CHUNKS = "auto"
Window = Annotated[int, Field(ge=1)] | Literal["step", "auto"] | None
QuadraticCost = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["measured"] | None
RecomputedPart = Literal["attention", "router", "expert_activation"]
OffloadedTensor = Literal["dispatched_rows", "mlp_input"]
DType = Literal["float32", "bfloat16"]  # float16 would need loss scaling


class PlanError(RecipeError):
    """Problems of a parallel plan; each argument is a problem that starts with its key in the plan."""

    def __str__(self) -> str:
        return problem_list("the parallel plan", self.problems)

    def under(self, key: str) -> PlanError:
        """Return the error for a plan that is the value of ``key``; problems of the parallel state have no key."""
        of_state = "parallel state"
        return PlanError(*(one if one.startswith(of_state) else f"{key}.{one}" for one in self.problems))


class Precision(Strict):
    """Dtypes. Unset: fp32 parameters and reductions; `train.precision` for computation."""

    param: DType | None = None
    """Dtype of the parameter shards and of the optimizer's state. Unset: fp32 for parameters that train; frozen
    parameters keep their own."""
    compute: DType | None = None
    """Dtype of parameters and activations in forward and backward."""
    reduce: DType | None = None
    """Dtype in which gradients are summed over ranks."""


class PipelineSchedule(Strict):
    """The order in which a pipeline's stages run the micro-batches of a step, and the blocks of each stage."""

    kind: Literal["gpipe", "1f1b", "interleaved", "zbv"] | None = None
    """`gpipe`: all forwards, then all backwards; `1f1b`: one forward, one backward in turn; `interleaved`: the same
    with several stages per rank; `zbv`: zero bubble, two stages per rank. Unset: `1f1b`, or `interleaved` if `chunks`
    is above 1."""
    chunks: Degree = None
    """Number of stages per rank. Unset: 1; 2 for `zbv`."""
    group_size: Degree = None
    """`interleaved` only: number of micro-batches that a rank runs through one stage before its next stage; at least
    `pp`. Unset: `pp`."""
    split: list[int] | None = None
    """Number of blocks of each stage, the first stage first. Unset: stages of equal cost."""

    overlap: bool | None = None
    """`1f1b` and `interleaved`, also with `pp` 1: the forward of one micro-batch and the backward of another run in
    turn, each while the other waits for an all-to-all of experts. Keeps the weights of all the rank's blocks gathered
    through a step, and one micro-batch more."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the fields that the kind does not have."""
        if self.kind in ("gpipe", "1f1b") and (self.chunks or 1) > 1:
            yield ("chunks",), f"found {self.chunks} with `kind: {self.kind}`, which has one stage per rank"
        if self.kind == "zbv" and self.chunks not in (None, 2):
            yield ("chunks",), f"found {self.chunks} with `kind: zbv`, which has two stages per rank"
        if self.group_size is not None and self.resolved_kind != "interleaved":
            yield ("group_size",), f"found {self.group_size} with `kind: {self.resolved_kind}`; it is for `interleaved`"
        if self.overlap and self.kind in ("gpipe", "zbv"):
            yield ("overlap",), f"found true with `kind: {self.kind}`; it is for `1f1b` and `interleaved`"
        if self.split is not None and min(self.split, default=0) < 1:
            yield ("split",), f"found {self.split}; every stage needs at least one block"

    @property
    def resolved_kind(self) -> str:
        """The kind, also where it is unset."""
        return self.kind or ("interleaved" if (self.chunks or 1) > 1 else "1f1b")

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank."""
        return self.chunks or (2 if self.kind == "zbv" else 1)


# A field that is set, another field, the values of that one with which it makes no sense, and why.
_CONTRADICTIONS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("dp_replicate", "mode", ("fsdp2",), ", which keeps one copy; use `mode: hsdp`"),
    ("dp_shard", "mode", ("replicate",), ", which shards nothing; use `mode: hsdp`"),
    ("parameter_offload", "mode", ("replicate",), "; only shards can be offloaded; use `fsdp2`"),
    ("compile", "recompute", ("full", "selective", "parts"), ", with which torch compiles nothing; remove one"),
    ("saved_ops", "recompute", (None, "none", "full", "parts"), "; only `selective` keeps outputs of some ops"),
    ("recomputed_parts", "recompute", (None, "none", "full", "selective"), "; only `parts` computes parts again"),
    ("offloaded_tensors", "activation_offload", (True,), ", which already offloads everything; use one"),
    (
        "offloaded_tensors",
        "recompute",
        ("full", "selective"),
        ", which does not keep these tensors; use `parts` or `none`",
    ),
    ("optimizer_offload", "freeze", (True,), "; a frozen component has no optimizer state"),
    ("lora", "freeze", (True,), "; `lora` already freezes all but the adapters: remove one"),
)
# What asks for nothing, as unset does; of the other fields it is False.
_NOTHING: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 1, "offloaded_tensors": []}


def _said(value: Any) -> str:
    """What a problem says of a value that a plan sets."""
    if isinstance(value, int):
        return f"found {_literal(value)}"
    return "set" if isinstance(value, list) else "found"


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
    precision: Precision | None = None
    """Dtypes of parameters, computation and reductions."""
    recompute: Literal["none", "full", "selective", "parts"] | None = None
    """Activations that the backward recomputes: `none`; `full`: whole blocks; `selective`: everything except the
    outputs of `saved_ops`; `parts`: only `recomputed_parts`."""
    recomputed_parts: list[RecomputedPart] | None = None
    """Parts of each block that `parts` recomputes: `attention`, `router`, `expert_activation` (between the two products
    of the experts). No token is sent to experts twice. Unset: all three."""
    offloaded_tensors: list[OffloadedTensor] | None = None
    """Tensors of expert layers to keep in CPU memory until the backward: `dispatched_rows`: the tokens that this rank's
    experts received; `mlp_input`: the output of the norm before the layer."""
    saved_ops: list[str] | None = None
    """Ops whose outputs `selective` keeps: `aten.mm`, ... Unset: matrix products and attention."""
    activation_offload: bool | None = None
    """Keep activations in CPU memory until the backward."""
    parameter_offload: bool | None = None
    """Keep parameter shards in CPU memory between uses."""
    optimizer_offload: bool | None = None
    """Keep the optimizer's state in CPU memory."""
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
    window: Window = None
    """Encoders with `place: world` or `group`. Number of micro-batches whose items are divided among the ranks
    together, and encoded before the first of them; `step`: all of the step; `auto`: as many as give the shortest
    simulated step. Unset: 1; `step` for `world` under `pp`."""
    quadratic_cost: QuadraticCost = None
    """With `place: group` or `world`, items are divided by the cost n + `quadratic_cost` * n^2 for an item of n input
    elements; with `place: world` of the foundation, packs by the sum of this cost over their samples of n tokens.
    `measured`: fitted in the first 16 steps and used from step 33 on. Unset: 0."""
    features_on: Literal["device", "cpu"] | None = None
    """With `window`, the memory in which features and their gradients wait. Unset: `device`."""
    feature_bytes: Degree = None
    """With `window`, the most bytes of features and their gradients that wait on a rank at a time. A step has smaller
    windows where that is necessary. Unset: no limit."""
    call_elements: Degree = None
    """Encoders. Maximum number of input elements of one call, such as values of pixels; more items are encoded in
    several calls. An item that is larger has a call of its own. Unset: no limit."""
    expert_rows: Degree = None
    """Maximum number of tokens (counted once per expert) that a layer's experts compute at a time. If there are more,
    only inputs and results are kept for the backward, which recomputes the rest. Unset: no limit."""
    expert_chunks: Chunks = None
    """Number of chunks of a rank's experts under `ep`. While the experts of one chunk compute, tokens of the other
    chunks are in transit. 1: no overlap. `auto`: the fastest number in the run's first steps. Unset: 1."""
    expert_dispatcher: Literal["torch", "deepep", "auto"] | None = None
    """Implementation that sends tokens to experts under `ep`: `torch`: all-to-alls; `deepep`: DeepEP, which must be
    installed; `auto`: DeepEP if a test exchange at the start works, else `torch`. Unset: `torch`."""
    delay_wgrad: bool | None = None
    """Under `ep`, compute the gradients of the experts' weights while gradients of the tokens are in transit."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the fields that make no sense together, and unknown ops."""
        for field, other, values, why in _CONTRADICTIONS:
            value, with_value = getattr(self, field), getattr(self, other)
            if value not in (None, _NOTHING.get(field, False)) and with_value in values:
                yield (field,), f"{_said(value)} with `{other}: {_literal(with_value)}`{why}"
        for op in self.saved_ops or ():
            if not re.fullmatch(r"\w+\.\w+(\.\w+)?", op):
                yield ("saved_ops",), f"found {op!r}; expected NAMESPACE.OP, such as aten.mm"

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

    def over(self, default: ComponentPlan) -> ComponentPlan:
        """Return this plan with unset fields taken from ``default``.

        `mode`, `dp_replicate` and `dp_shard` are inherited together or not at all, and so are `recompute`,
        `saved_ops` and `recomputed_parts`.
        """
        fields, inherited = _set_fields(self), _set_fields(default)
        for names in _TOGETHER:
            if fields.keys() & set(names):
                inherited = {name: value for name, value in inherited.items() if name not in names}
        if fields.get("freeze", inherited.get("freeze")) and "optimizer_offload" not in fields:
            inherited.pop("optimizer_offload", None)  # a frozen component has no optimizer state
        if fields.keys() & {"freeze", "lora"}:  # both determine which parameters train
            inherited = {name: value for name, value in inherited.items() if name not in ("freeze", "lora")}
        if fields.get("mode") == "replicate":
            inherited.pop("parameter_offload", None)  # only shards can be offloaded
        if fields.get("activation_offload") or fields.get("recompute") in ("full", "selective"):
            inherited.pop("offloaded_tensors", None)  # these modes do not keep the tensors
        if self.precision is not None and default.precision is not None:
            merged = _set_fields(default.precision) | _set_fields(self.precision)
            fields["precision"] = Precision(**merged)
        return ComponentPlan(**(inherited | fields))


# A component of a section has ranks of its own: it does not inherit these fields from the default plan.
_OF_RANKS = (*AXES, "mode", "schedule", "place", "window", "sequence_parallel", "async_ulysses")


class Section(Strict):
    """Components on ranks of their own. They encode for the other ranks, which hold the rest of the model."""

    components: list[str] = Field(min_length=1)
    """The encoders of this section. The first one's degrees factorise its ranks. `NAME.tower` is an encoder without its
    projector, which then is the component `NAME.projector`, in `main` or in another section."""
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


def _set_fields(node: Strict) -> dict[str, Any]:
    return {name: value for name in type(node).model_fields if (value := getattr(node, name)) is not None}


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
    """Section name -> encoders on ranks of their own. All other components are on the ranks that are left, the section
    `main`."""
    tp_plan: dict[str, str] | None = None
    """Glob of module names -> tensor parallel style: `colwise`, `rowwise`, ... Unset: the model's own plan."""
    ep_plan: dict[str, ShardDim] | None = None
    """Glob of parameter names -> dimension that counts the experts. Unset: the model's own plan, or all experts."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield what the plans of components contradict in the default plan."""
        for name in self.components:
            try:
                self.of(name)
            except ValidationError as error:
                yield from ((("components", name, *problem["loc"]), problem["msg"]) for problem in error.errors())

    def of(self, component: str) -> ComponentPlan:
        """Return the component's plan, completed by the default plan; a section inherits nothing about ranks."""
        default = self.default
        if self.section_of(component) != MAIN:
            default = default.model_copy(update=dict.fromkeys(_OF_RANKS))
        return self.components.get(component, ComponentPlan()).over(default)

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
        """Compare the plan with the model and with the parallel state.

        Args:
            names: component -> names of its modules and parameters, relative to the component.
            frozen: components that do not train, whatever the plan says.
            degrees: axis of :data:`AXES` -> degree, for the degrees that are set in the parallel state.

        Returns:
            One line per problem: unknown components, frozen ones with an optimizer offload, degrees that differ from
            the state's, globs that match nothing.
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

    def with_expert_chunks(self, numbers: Mapping[str, int]) -> ParallelPlan:
        """Return the plan with the numbers of chunks, component -> number, in place of `auto`."""
        is_default = self.default.expert_chunks == AUTO_CHUNKS
        plans = {name: self.components.get(name, ComponentPlan()) for name in numbers}
        inherited = [numbers[name] for name, plan in plans.items() if is_default and plan.expert_chunks is None]
        default = self.default.model_copy(update={"expert_chunks": inherited[0]}) if inherited else self.default
        chosen = {
            name: plan.model_copy(update={"expert_chunks": numbers[name]})
            for name, plan in plans.items()
            if plan.expert_chunks == AUTO_CHUNKS
            or (is_default and plan.expert_chunks is None and default.expert_chunks != numbers[name])
        }
        return self.model_copy(update={"default": default, "components": {**self.components, **chosen}})

    def with_quadratic_costs(self, costs: Mapping[str, float]) -> ParallelPlan:
        """Return the plan with these numbers, component -> number, in place of `measured`."""
        of_default = self.default.quadratic_cost
        plans = {name: self.components.get(name, ComponentPlan()) for name in costs}
        fixed = {
            name: plan.model_copy(update={"quadratic_cost": costs[name]})
            for name, plan in plans.items()
            if (of_default if plan.quadratic_cost is None else plan.quadratic_cost) == "measured"
        }
        return self.model_copy(update={"components": {**self.components, **fixed}})

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
        is_set = any(getattr(plan, field) is not None for field in fields)
        return f"components.{component}" if is_set else "default"

    def _component_problems(self, known: Collection[str], frozen: Collection[str]) -> Iterator[str]:
        for name, plan in self.components.items():
            path = f"components.{name}"
            if name not in known:
                yield f"{path}: unknown component; {hint(name, known)}"
            elif name in frozen and plan.freeze is False:
                yield f"{path}.freeze: found false, but the component is frozen elsewhere; remove one of the two"
            elif name in frozen and plan.optimizer_offload and plan.lora is None:
                yield f"{path}.optimizer_offload: found true, but a frozen component has no optimizer state"

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


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one PlanError for all problems of a parallel plan, if there are any."""
    if problems:
        raise PlanError(*problems)
