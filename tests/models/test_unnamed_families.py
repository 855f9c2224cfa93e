"""Model families of transformers, each against plain transformers: in one process, and on two ranks.

What is compared is found at run time: every model type for which transformers builds a model that generates text. Most
of them no file of this repository mentions, but for docs/coverage, the table of all of them. ``-k`` picks some:
``pytest -m slow tests/models/test_unnamed_families.py -k "llama and tp2"``.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from tests.models.every_family import LAYOUTS, PACKED, VERDICTS, Outcome, every_family, in_stages, on_ranks, outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ON_TWO_RANKS: Counter[tuple[str, str]] = Counter()  # (layout, "equal", "refused" or "wrong") -> families
EQUAL_BEFORE = {"dp2": 217, "tp2": 140}  # layout -> families that were equal when models could still crash a check


@cache
def unnamed_families() -> list[str]:
    contents = [path.read_bytes() for path in _files() if path.is_file() and path.stem != "coverage"]
    text = "\n".join(content.decode(errors="ignore").lower() for content in contents if b"\0" not in content)
    return [family for family in every_family() if family not in text]


def _files() -> Iterator[Path]:
    """All files of the repository; where it is no git checkout, all that do not lie in a hidden folder."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        return (ROOT / name for name in tracked.stdout.split("\0") if name)
    return (path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


@pytest.mark.parametrize("family", every_family())
def test_a_family_is_exact_or_refused(family: str) -> None:
    assert outcome(family).wrong == {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", every_family())
def test_a_family_is_exact_or_refused_on_two_ranks(ranks: RankPool, family: str, layout: str) -> None:
    found = on_ranks(family, layout, ranks)
    if found is not None:
        ON_TWO_RANKS[layout, "refused" if found.refusal else "equal" if not found.wrong else "wrong"] += 1
    assert found is None or found.wrong == {}


def test_as_many_families_as_before_are_equal_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts the tests above; alone it fails."""
    with capsys.disabled():
        print(f"\non two ranks: {dict(ON_TWO_RANKS)}")
    assert all(ON_TWO_RANKS[layout, "equal"] >= number for layout, number in EQUAL_BEFORE.items())


@pytest.mark.parametrize("family", every_family())
def test_a_family_is_exact_in_stages_or_refused(family: str) -> None:
    found = in_stages(family)
    assert found is None or found.verdict != "wrong", found


def test_160_families_are_bitwise_at_every_legal_cut(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {family: found for family in every_family() if (found := in_stages(family)) is not None}
    with capsys.disabled():
        print(f"\nin stages: {dict(Counter(found.verdict for found in outcomes.values()))}")
        for family, found in outcomes.items():
            if found.verdict != "bitwise" or found.refused:
                print(f"  {family}: {found.verdict} {found.refusal or found.refused or found.wrong}"[:300])
    assert sum(found.verdict == "bitwise" for found in outcomes.values()) >= 160


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
