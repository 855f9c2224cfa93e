"""Every model family for which transformers builds a small model that generates text, and what becomes of it here.

A family is run as one process, against plain transformers, and on two ranks, against one process.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from omnitrain.errors import UserError
from omnitrain.models.hf import foundation_class
from omnitrain.models.native import peaked_
from omnitrain.parallel.ranks import RankPool
from omnitrain.parallel.verify import VerifyRow, verify
from tests.families import FAMILIES
from tests.models.acceptance import differences
from tests.models.plain import Pair, paired
from tests.models.shrunk import small_configs

MOST_PARAMETERS = 30_000_000
LAYOUTS = ("dp2", "tp2")
_SECONDS_ON_RANKS = 120.0
PACKED, PARTLY, UNPACKED, REFUSED, NO_REFERENCE = VERDICTS = (
    "exact",
    "exact, a modality refused",
    "exact, one sample per row",
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
    except UserError as refusal:
        return Outcome(REFUSED, (str(refusal),))
    contract = both.ours.runner.contract
    facts = tuple(f"{finding.check}: {finding.fact}" for finding in contract.findings if finding.outcome != "passed")
    verdict = UNPACKED if not contract.packs else PARTLY if both.ours.runner.native.refused else PACKED
    return Outcome(verdict, facts, differences(both))


def on_ranks(family: str, pool: RankPool) -> tuple[VerifyRow, ...]:
    """Under each of :data:`LAYOUTS`, against this process; nothing for a family that does not train in one process."""
    try:
        both = _pair(family)
    except UserError:
        return ()
    if both is None:
        return ()
    samples = [probe.sample for probe in both.probes]
    make = partial(peaked_model, family)
    return verify(make, samples, LAYOUTS, nproc=2, timeout_s=_SECONDS_ON_RANKS, pool=pool).rows


def _pair(family: str) -> Pair | None:
    model = smallest_that_runs(family)
    return None if isinstance(model, str) else paired(model)


def peaked_model(family: str) -> PreTrainedModel:
    """The family's small model, the same on every rank."""
    model = smallest_that_runs(family)
    assert not isinstance(model, str), model
    peaked_(model)
    return model


def smallest_that_runs(family: str) -> PreTrainedModel | str:
    """The model of the smallest config that plain transformers runs on text; why there is none."""
    reason = ""
    try:
        for config in [FAMILIES[family]()] if family in FAMILIES else small_configs(family):
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
