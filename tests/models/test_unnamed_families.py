"""Model families of transformers that no file of this repository mentions, each against plain transformers.

What is compared is found at run time: every model type for which transformers builds a model that generates text.
"""

from __future__ import annotations

import inspect
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from omnitrain.errors import UserError
from omnitrain.models.hf import foundation_class
from tests.models.acceptance import differences
from tests.models.plain import paired
from tests.models.shrunk import small_configs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MOST_PARAMETERS = 30_000_000
PACKED, PARTLY, UNPACKED, REFUSED, NO_REFERENCE = VERDICTS = (
    "exact",
    "exact, a modality read in its own forward or refused",
    "exact, one sample per row",
    "refused",
    "not small in plain transformers",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        verdict: one of the five above.
        facts: what the contract check said beside "passed", or why there is no verdict on the numbers.
        wrong: what differs from plain transformers.
    """

    verdict: str
    facts: tuple[str, ...] = ()
    wrong: dict[str, float] = field(default_factory=dict)


def unnamed_families() -> list[str]:
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    listed = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in names]
    text = "\n".join(path.read_text(errors="ignore").lower() for path in _files() if path.is_file())
    return [family for family in dict.fromkeys(key for mapping in listed for key in mapping) if family not in text]


def _files() -> Iterator[Path]:
    """All files of the repository; where it is no git checkout, all that do not lie in a hidden folder."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        return (ROOT / name for name in tracked.stdout.split("\0") if name)
    return (path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


@cache
def outcome(family: str) -> Outcome:
    try:
        model = _smallest_that_runs(family)
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


def _smallest_that_runs(family: str) -> PreTrainedModel | str:
    """The model of the smallest config that plain transformers runs on text; why there is none."""
    reason = ""
    try:
        for config in small_configs(family):
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


@pytest.mark.parametrize("family", unnamed_families())
def test_an_unnamed_family_is_exact_or_refused(family: str) -> None:
    assert outcome(family).wrong == {}


def test_twenty_unnamed_families_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {family: outcome(family) for family in unnamed_families()}
    with capsys.disabled():
        print(report(outcomes))
    assert sum(found.verdict == PACKED and not found.wrong for found in outcomes.values()) >= 20


def report(outcomes: dict[str, Outcome]) -> str:
    """How many families there are of each verdict, and a line per family that has facts."""
    numbers = Counter(found.verdict for found in outcomes.values())
    lines = [f"\n{len(outcomes)} families: " + "; ".join(f"{number} {name}" for name, number in numbers.items())]
    for verdict in VERDICTS:
        found = {family: each for family, each in outcomes.items() if each.verdict == verdict}
        lines += [f"{verdict}: {', '.join(family for family, each in found.items() if not each.facts)}"]
        lines += [f"  {family}: {'; '.join(each.facts)[:300]}" for family, each in found.items() if each.facts]
    return "\n".join(lines)
