"""What ranks send and hold grows with their number, and not faster."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    """Of 64 and 256 ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.chdir(BENCHMARKS.parent)
        many_ranks: ModuleType = importlib.import_module("many_ranks")
        yield many_ranks.measure([64, 256], rounds=1).figures


@pytest.mark.parametrize("part", [pytest.param("step", marks=pytest.mark.second), "start", "line", "save"])
def test_nothing_that_a_rank_sends_or_holds_grows_faster_than_the_number_of_ranks(
    figures: dict[str, float], part: str
) -> None:
    growth = {name: value for name, value in figures.items() if name.startswith(part) and name.endswith("bytes_growth")}
    assert len(growth) >= 3 and {name: value for name, value in growth.items() if value > 4.1} == {}


def test_a_line_of_metrics_carries_no_rejected_row(figures: dict[str, float]) -> None:
    """The run had a rejected row per rank when it was resumed, and each rank has met some more."""
    assert figures["line_sent_bytes_256"] == pytest.approx(figures["line_sent_bytes_64"], rel=0.01)
    assert figures["line_json_bytes_256"] - figures["line_json_bytes_64"] < 10  # digits


def test_ranks_compare_the_parameters_of_a_model_by_a_digest(figures: dict[str, float]) -> None:
    assert figures["start_sent_bytes_256"] == figures["start_sent_bytes_64"] < 64


def test_the_figures_of_the_page_about_launching_are_those_of_the_last_run() -> None:
    found = json.loads((BENCHMARKS / "results" / "many_ranks.json").read_text())["figures"]
    page = (BENCHMARKS.parent / "docs" / "launch.md").read_text().split("## A thousand ranks")[1].split("\n## ")[0]
    shown = [f"{found[f'{part}_held_bytes_1024'] / 1e6:.2f} MB" for part in ("step", "line", "start", "save")]
    shown.append(f"{1000 * (found['step_decode_seconds_1024'] + found['step_plan_seconds_1024']):.1f} ms")
    shown.append(f"{1000 * found['order_seconds_1024']:.0f} ms")
    assert [figure for figure in shown if f"| {figure}" not in page] == []


def test_ranks_make_few_process_groups_and_communicators(figures: dict[str, float]) -> None:
    """The bounds of the benchmark hold for 512 simulated ranks, and held for eight real ones in the last run."""
    process_groups: ModuleType = importlib.import_module("process_groups")
    written = json.loads((BENCHMARKS / "results" / "many_ranks.json").read_text())["figures"]
    now = {name: value for name, value in figures.items() if name.startswith("process_")}
    assert process_groups.exceeded(figures) == process_groups.exceeded(written) == []
    assert {name: written[name] for name in now} == now and written["process_real_sockets_8"] <= 5 + 2 * 8
    one_more = [process_groups.exceeded(written | {name: 3 * written[name]}) for name in now]
    assert [len(above) for above in one_more] == [1] * len(now)


def test_the_page_about_launching_has_the_process_groups_of_the_last_run() -> None:
    found = json.loads((BENCHMARKS / "results" / "many_ranks.json").read_text())["figures"]
    page = (BENCHMARKS.parent / "docs" / "launch.md").read_text()
    names = ("calls", "groups", "communicators", "sockets")
    rows = [f"| {found[f'process_{n}_512']:,.0f} | {found[f'process_{n}_with_sections_512']:,.0f} |" for n in names]
    assert [row for row in rows if row not in page] == []


def test_a_save_makes_no_process_group(figures: dict[str, float]) -> None:
    assert figures["groups_of_all_ranks_per_save"] == 0
