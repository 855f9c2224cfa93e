"""Every model family for which transformers builds a small model that generates text, and what becomes of it here.

A family is run as one process, against plain transformers, and on two ranks, against one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from omnitrain.data.packing.sample import Features, Sample
from omnitrain.errors import UserError
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.ops.rounding import Rounding, Step
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.verify.reference import Alone, dtypes_of, low_precision_reference, step_of
from omnitrain.parallel.verify.run import micro_batches, train
from omnitrain.recipe.layout import parse_layout
from tests.families import FAMILIES, UNSHRINKABLE
from tests.models.acceptance import differences, staying_in_fp64, step_errors
from tests.models.plain import Pair, doubling, exact_step, low_plain_step, paired
from tests.models.shrunk import small_configs
from tests.models.staged import staged_step, unequal, whole_step

MOST_PARAMETERS = 30_000_000
LAYOUTS = ("dp2", "tp2")
LOW_PRECISION = ("dp2.bf16", "dp2.bf16_param", "tp2.bf16")
_SECONDS_ON_RANKS = 120.0
ROUNDED = 1e-5  # gradients of parameters that several stages read are summed in another order
PACKED, PARTLY, UNPACKED, REFUSED, NO_REFERENCE = VERDICTS = (
    "exact",
    "exact, a modality read in its own forward or refused",
    "exact, one sample per pack",
    "refused",
    "not small in plain transformers",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a family in one process.

    Attributes:
        verdict: one of the five above.
        facts: what the contract check said beside "passed", or why there is no verdict on the numbers.
        wrong: what differs from plain transformers.
    """

    verdict: str
    facts: tuple[str, ...] = ()
    wrong: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranked:
    """What became of a family on two ranks.

    Attributes:
        refusal: why the layout is refused; empty: it is not.
        wrong: what differs from plain transformers.
    """

    refusal: str
    wrong: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Staged:
    """What became of a family in pipeline stages.

    Attributes:
        refusal: why it is refused everywhere; empty: it is not.
        refused: cut -> why it is refused.
        wrong: what differs from the whole model by a bit, at a cut that is not refused.
    """

    refusal: str
    refused: dict[int, str] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One word for reports."""
        if self.refusal:
            return "refused"
        return "bitwise" if not self.wrong else "rounded" if max(self.wrong.values()) <= ROUNDED else "wrong"


def every_family() -> list[str]:
    """Names of the suite's own families, then all model types that generate text."""
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    listed = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in names]
    return list(dict.fromkeys([*FAMILIES, *(family for mapping in listed for family in mapping)]))


@cache
def outcome(family: str) -> Outcome:
    """Against plain transformers, in this process."""
    try:
        model = smallest_that_runs(family)
        if isinstance(model, str):
            return Outcome(NO_REFERENCE, (model,))
        both = paired(model)
        contract = both.ours.runner.contract
    except UserError as refusal:
        return Outcome(REFUSED, (str(refusal),))
    facts = tuple(f"{finding.check}: {finding.fact}" for finding in contract.findings if finding.outcome != "passed")
    native = both.ours.runner.native
    verdict = UNPACKED if not contract.packs else PARTLY if native.in_forward or native.refused else PACKED
    return Outcome(verdict, facts, differences(both))


@cache
def in_stages(family: str) -> Staged | None:
    """The same step in pipeline stages, against the whole model; None: the family does not train in one process."""
    both = _pair(family)
    if both is None:
        return None
    model, contract = both.ours, both.ours.stage_contract
    if contract.problem:
        return Staged(contract.problem)
    wrong: dict[str, float] = {}
    for pack in [both.pack()] if model.runner.contract.packs else both.packs_of_one():
        whole_loss, whole = whole_step(model, [pack])
        for cuts in {*((cut,) for cut in contract.cuts), contract.cuts}:
            loss, gradients = staged_step(model, [pack], cuts)
            wrong |= {f"{name}, cuts {cuts}": error for name, error in unequal(whole, gradients).items()}
            if loss != whole_loss:
                wrong[f"loss, cuts {cuts}"] = abs(loss - whole_loss) / abs(whole_loss)
    return Staged("", contract.refused, wrong)


def on_ranks(family: str, layout: str, pool: RankPool) -> Ranked | None:
    """The same step on two ranks, against plain transformers; None: the family does not train in one process."""
    both = _pair(family)
    if both is None:
        return None
    samples = [probe.sample for probe in both.probes]
    run = partial(pool.run, step_on_rank, family, layout, samples, timeout_s=_SECONDS_ON_RANKS, world=2)
    found = run()[0]
    if isinstance(found, str):
        return Ranked(found)
    wrong = step_errors(both, *found)
    if wrong:
        (_, in_fp64), (_, exact) = run(True)[0], exact_step(both)
        wrong = staying_in_fp64(wrong, found[1], in_fp64, exact)
    return Ranked("", wrong)


def step_on_rank(
    family: str, layout: str, samples: list[Sample], in_fp64: bool = False
) -> tuple[float, dict[str, Tensor]] | str:
    """Loss and gradients of the foundation, whole; or why the layout is refused. ``in_fp64``: for the same weights."""
    plan = parse_layout(layout).plan()
    torch.manual_seed(0)
    model = build_omni_model(foundation=peaked_model(family)).train()
    try:
        state = init_state_of(plan)
        table = micro_batches(model, [*map(_in_doubles, samples)] if in_fp64 else samples, state.dp_size, 1)
        with doubling() if in_fp64 else nullcontext():
            model = model.double() if in_fp64 else model
            build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=False)
            outcome = train(model, table[state.dp_rank])
    except UserError as refusal:
        return str(refusal)
    return outcome.loss, {name.removeprefix("foundation."): value for name, value in outcome.gradients.items()}


def _in_doubles(sample: Sample) -> Sample:
    spans = [replace(span, item=replace(span.item, features=_doubles(span.item.features))) for span in sample.spans]
    return replace(sample, spans=tuple(spans), forward_inputs=_doubles(sample.forward_inputs))


def _doubles(features: Features) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in features.items()}


def in_low_precision(family: str, pool: RankPool, layouts: Sequence[str] = LOW_PRECISION) -> dict[str, Ranked] | None:
    """The same step in bf16: of plain transformers, and on two ranks, each against one process in bf16.

    None: the family does not train in one process in fp32.
    """
    both = _pair(family)
    if both is None:
        return None
    samples = [probe.sample for probe in both.probes]
    run = partial(pool.run, timeout_s=_SECONDS_ON_RANKS)
    alone = Alone(partial(peaked_model, family), dtypes=dtypes_of(parse_layout("bf16").plan()))
    (found,) = run(low_precision_reference, alone, samples, world=1)
    if isinstance(found, str):
        return {"one process": Ranked(found)}
    expected, rounding = found
    compared = {}
    for layout in layouts:
        got = run(low_step_on_rank, family, layout, samples, expected.routing, world=2)[0]
        compared[layout] = Ranked(got) if isinstance(got, str) else Ranked("", _wrong(rounding, got))
    if both.ours.runner.contract.attention == "omnitrain" and layouts == LOW_PRECISION:
        try:
            compared["transformers"] = Ranked("", _wrong(rounding, low_plain_step(both, expected.routing)))
        except RuntimeError as error:  # transformers' bf16 model fails, where ours computes
            compared["transformers"] = Ranked(_in_one_line(error))
    return compared


def _wrong(rounding: Rounding, got: Step) -> dict[str, float]:
    """What rounding does not explain, as a multiple of what it explains."""
    return {name: found.excess for name, found in rounding.beyond(got).items()}


def low_step_on_rank(
    family: str, layout: str, samples: list[Sample], routing: tuple[Recording, ...] | None
) -> Step | str:
    """Loss and gradients of a layout, whole; or why it is refused."""
    plan = parse_layout(layout).plan()
    model = build_omni_model(foundation=peaked_model(family)).train()
    try:
        state = init_state_of(plan)
        table = micro_batches(model, samples, state.dp_size, 1)
        build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=None)
    except UserError as refusal:
        return str(refusal)
    return step_of(train(model, table[state.dp_rank], routing, steps=1))


def probes_of(family: str) -> list[Sample]:
    """Samples of all modalities that a family reads, if it trains in one process."""
    both = _pair(family)
    return [probe.sample for probe in both.probes] if both else []


@lru_cache(maxsize=1)
def _pair(family: str) -> Pair | None:
    torch.manual_seed(0)
    try:
        model = smallest_that_runs(family)
        both = None if isinstance(model, str) else paired(model)
        return both if both is not None and both.ours.runner.contract else None
    except UserError:
        return None


def peaked_model(family: str) -> PreTrainedModel:
    """The family's small model, the same on every rank."""
    model = smallest_that_runs(family)
    assert not isinstance(model, str), model
    init_peaked_(model)
    return model


def smallest_that_runs(family: str) -> PreTrainedModel | str:
    """The model of the smallest config that plain transformers runs on text; why there is none."""
    reason = ""
    try:
        known = FAMILIES | UNSHRINKABLE
        for config in [known[family]()] if family in known else small_configs(family):
            found = _running(config)
            if not isinstance(found, str):
                return found
            reason = reason or found
    except UserError:
        raise
    except Exception as error:  # whatever a config class raises
        return _in_one_line(error)
    return reason


def _running(config: PreTrainedConfig) -> PreTrainedModel | str:
    model_class = foundation_class(config)
    ids = torch.arange(20, 32)[None]
    taken = inspect.signature(model_class.forward).parameters
    extra = {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            return f"{size / 1e6:.0f}M parameters"
        model = model_class(config)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **extra)
    except Exception as error:  # whatever a model raises
        return _in_one_line(error)
    return model


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
