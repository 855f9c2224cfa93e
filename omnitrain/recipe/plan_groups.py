"""The groups of a component's plan: precision, pipeline schedule, memory, encoding of media, experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from omnitrain.recipe.strict import Problem, Strict

AUTO_CHUNKS = "auto"

Degree = Annotated[int | None, Field(ge=1)]
Chunks = Annotated[int, Field(ge=1)] | Literal["auto"] | None
Window = Annotated[int, Field(ge=1)] | Literal["step", "auto"] | None
RecomputeMode = Literal["none", "full", "selective", "parts"]
RecomputedPart = Literal["attention", "router", "expert_activation"]
OffloadedTensor = Literal["dispatched_rows", "mlp_input"]  # of expert layers
Offloaded = Literal["activations", OffloadedTensor, "parameters", "optimizer"]
DType = Literal["float32", "bfloat16"]  # float16 would need loss scaling


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

    extra_forwards: int = Field(0, ge=0)
    """`1f1b` and `interleaved`, also with `pp` 1: number of forwards that a rank runs before its first backward, beyond
    those that it needs. With 1, a [section](sections.md#a-decoder) computes the loss of a micro-batch while the forward
    of the next one runs. Keeps as many micro-batches more."""

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
        if self.extra_forwards and self.kind in ("gpipe", "zbv"):
            why = "which has no further forwards; it is for `1f1b` and `interleaved`"
            yield ("extra_forwards",), f"found {self.extra_forwards} with `kind: {self.kind}`, {why}"
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


class Recompute(Strict):
    """Which activations the backward recomputes, one by one."""

    keep: list[str] | None = None
    """Recompute whole blocks, except the outputs of these ops: `aten.mm`, ..."""
    parts: list[RecomputedPart] | None = None
    """Recompute only these parts of each block: `attention`, `router`, `expert_activation` (between the two products of
    the experts). No token is sent to experts twice."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, if it has both keys or none, and names that no op has."""
        if (self.keep is None) == (self.parts is None):
            yield (), f"found {'none' if self.keep is None else 'both'} of `keep` and `parts`; set one"
        for op in self.keep or ():
            if not re.fullmatch(r"\w+\.\w+(\.\w+)?", op):
                yield ("keep",), f"found {op!r}; expected NAMESPACE.OP, such as aten.mm"


def _kind_of_recompute(value: Any) -> str:
    return "recompute" if isinstance(value, dict | Recompute) else "literal"


class MemoryPlan(Strict):
    """Memory of a component in training: what is computed again, and what waits in CPU memory."""

    recompute: (
        Annotated[
            Annotated[RecomputeMode, Tag("literal")] | Annotated[Recompute, Tag("recompute")],
            Discriminator(_kind_of_recompute),
        ]
        | None
    ) = None
    """Activations that the backward recomputes: `none`; `full`: whole blocks; `selective`: all but the outputs of
    matrix products and attention; `parts`: attention, routers and the activation of experts. `{keep: [aten.mm, ...]}`:
    `selective` with other ops; `{parts: [attention, ...]}`: only some parts. Unset: `none`."""
    offload: list[Offloaded] | None = None
    """What is kept in CPU memory: `activations` until the backward; of them, only `dispatched_rows` (the tokens that
    this rank's experts received) or `mlp_input` (the output of the norm before an expert layer); `parameters` (their
    shards, between uses); `optimizer` (its state). Unset: nothing."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield tensors of expert layers that are offloaded twice, or that the backward recomputes."""
        if not self.offloaded_tensors:
            return
        found = f"found {', '.join(self.offloaded_tensors)}"
        if self.offloads("activations"):
            yield ("offload",), f"{found} with activations, which include them; remove one of the two"
        if self.recomputes_blocks:
            kept = "which does not keep these tensors; use `parts` or `none`"
            yield ("offload",), f"{found} with `recompute: {self.mode}`, {kept}"

    @property
    def mode(self) -> RecomputeMode:
        """The kind of recompute, also where ops or parts are named, or nothing is set."""
        if isinstance(self.recompute, Recompute):
            return "parts" if self.recompute.keep is None else "selective"
        return self.recompute or "none"

    @property
    def recomputes_blocks(self) -> bool:
        """Whether the backward recomputes whole blocks, but for the outputs of some ops."""
        return self.mode in ("full", "selective")

    @property
    def kept_ops(self) -> list[str] | None:
        """The ops whose outputs are kept, where they are named."""
        return self.recompute.keep if isinstance(self.recompute, Recompute) else None

    @property
    def recomputed_parts(self) -> list[RecomputedPart] | None:
        """The parts of blocks that are recomputed, where they are named."""
        return self.recompute.parts if isinstance(self.recompute, Recompute) else None

    @property
    def offloaded_tensors(self) -> list[OffloadedTensor]:
        """The tensors of expert layers that are offloaded alone."""
        return [what for what in self.offload or () if what == "dispatched_rows" or what == "mlp_input"]

    def offloads(self, what: Offloaded) -> bool:
        """Return whether it is kept in CPU memory."""
        return what in (self.offload or ())


class EncodePlan(Strict):
    """Calls of an encoder: how many items it encodes together, and where features wait."""

    window: Window = None
    """Encoders with `place: world` or `group`. Number of micro-batches whose items are divided among the ranks
    together, and encoded before the first of them; `step`: all of the step; `auto`: as many as give the shortest
    simulated step. Unset: 1; `step` for `world` under `pp`."""
    features_on: Literal["device", "cpu"] | None = None
    """With `window`, the memory in which features and their gradients wait. Unset: `device`."""
    feature_bytes: Degree = None
    """With `window`, the most bytes of features and their gradients that wait on a rank at a time. A step has smaller
    windows where that is necessary. Unset: no limit."""
    call_elements: Degree = None
    """Maximum number of input elements of one call, such as values of pixels; more items are encoded in several calls.
    An item that is larger has a call of its own. Unset: no limit."""


class ExpertsPlan(Strict):
    """How a component's experts compute, and how tokens get to them under `ep`."""

    rows: Degree = None
    """Maximum number of tokens (counted once per expert) that a layer's experts compute at a time. If there are more,
    only inputs and results are kept for the backward, which recomputes the rest. Unset: no limit."""
    chunks: Chunks = None
    """Number of chunks of a rank's experts under `ep`. While the experts of one chunk compute, tokens of the other
    chunks are in transit. 1: no overlap. `auto`: the fastest number in the run's first steps. Unset: 1."""
    dispatcher: Literal["torch", "deepep", "auto"] | None = None
    """Implementation that sends tokens to experts under `ep`: `torch`: all-to-alls; `deepep`: DeepEP, which must be
    installed; `auto`: DeepEP if a test exchange at the start works, else `torch`. Unset: `torch`."""
    delay_wgrad: bool | None = None
    """Under `ep`, compute the gradients of the experts' weights while gradients of the tokens are in transit."""


ALL_LINEAR: Final = "all-linear"  # as peft calls it


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685): the component is frozen; ``alpha / rank * B A`` trains, first ``B = 0``."""

    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = ALL_LINEAR
    """Globs for linear layers (`q_proj`, `layers.*.self_attn.*`) and for matrices of fused experts
    (`experts.gate_up_proj`). A glob that matches nothing is an error. `all-linear`: all linear layers that can have
    adapters, without fused experts."""
    rank: int = Field(16, ge=1)
    """Rank of the adapters: rows of `A`, columns of `B`. Fused experts: the rank for each expert."""
    alpha: float = Field(32.0, gt=0)
    """The output of an adapter is scaled by `alpha / rank`."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` (arXiv:2312.03732)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an input of `A` in training; not of fused experts."""
