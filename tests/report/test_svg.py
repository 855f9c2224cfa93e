"""Pictures: their numbers are round, and their lines are where the values are."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from omnitrain.report.svg import Curve, Points, draw_curves, draw_histogram, thinned
from omnitrain.train.metrics.progress import _NotebookBar, _State


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<]+)</text>", svg)


def places(svg: str) -> list[tuple[float, ...]]:
    """The points of the first curve."""
    line = re.findall(r'<path d="([^"]+)" fill="none" stroke_?-?width="1.5"', svg)[0]
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+),([\d.]+)", line)]


def test_a_long_curve_keeps_its_peaks_and_gaps() -> None:
    points: Points = [(step, 1.0) for step in range(10_000)]
    points[5_000] = (5_000, 99.0)
    kept = thinned([*points, *((step, None) for step in range(10_000, 12_000))], 400)
    assert len(kept) <= 400 and (5_000, 99.0) in kept and kept[-1][1] is None
    drawn = places(draw_curves([Curve(0, "loss", points)], "loss"))
    assert 100 < len(drawn) <= 400 and drawn == sorted(drawn, key=lambda place: place[0])
    assert len([top for _, top in drawn if top < 20]) == 1


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0, 0.7, 3.1], ["0", "1", "2", "0", "1", "2", "3", "step"]),
        ([1e-4, 1.0, 2.0], ["0", "1", "2", "0.0001", "0.001", "0.01", "0.1", "1", "step"]),
        ([5.0, 5.0, 5.0], ["0", "1", "2", "4.8", "4.9", "5", "5.1", "5.2", "step"]),
    ],
)
def test_axes_have_round_numbers_and_are_logarithmic_where_values_are_far_apart(
    values: list[float], shown: list[str]
) -> None:
    svg = draw_curves([Curve(0, "loss", list(enumerate(values)))], "loss")
    assert sorted(texts(svg)) == sorted(shown)


def test_a_gap_divides_a_curve_and_a_point_alone_is_a_dot() -> None:
    points: Points = [(step, None if step % 10 == 0 else 1.0) for step in range(50)]
    points[5], points[7] = (5, None), (7, None)
    svg = draw_curves([Curve(0, "loss", points)], "loss")
    assert (
        len(re.findall(r"M[\d.]+,[\d.]+h0", svg)) == 1 and svg.count("L") == sum(v is not None for _, v in points) - 7
    )


def test_bins_are_stacked_up_to_their_sum() -> None:
    svg = draw_histogram([0, 10, 20], {"a": [1, 0], "b": [2, 4]}, "lengths", "tokens")
    assert (
        set(texts(svg)) == {"0", "1", "2", "3", "4", "5", "10", "15", "20", "tokens"}
        and len(re.findall(r"V[\d.]+H[\d.]+z", svg)) == 3
    )


def test_the_bar_of_a_notebook_has_few_points_and_none_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _State(50_000, 0)
    bar = _NotebookBar(state, Console(file=io.StringIO()))
    monkeypatch.setattr(bar, "_drawn_at", math.inf, raising=False)
    for step in range(50_000):
        state.step = step
        bar.show({7: math.nan, 31_234: 77.0}.get(step, 2 + step / 50_000), is_line=False)
    svg = bar._drawn()["text/html"]
    assert 100 < len(places(svg)) <= 400 and "nan" not in svg and min(top for _, top in places(svg)) < 20
