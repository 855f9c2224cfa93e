"""The curve of a notebook's bar: of any number of points it keeps the peaks, and stays small."""

from __future__ import annotations

import math
import re

from omnitrain.page.small_curve import SmallCurve


def test_a_peak_of_one_step_stays_in_a_curve_of_many_steps() -> None:
    curve = SmallCurve("loss")
    for step in range(50_000):
        curve.add(step, 77.0 if step == 31_234 else 2 + step / 50_000)
    svg = curve.svg(50_000)
    (points,) = re.findall(r'points="([^"]+)"', svg)
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert 100 < len(places) < 400 and [left for left, _ in places] == sorted(left for left, _ in places)
    assert min(top for _, top in places) == 4.0 and re.findall(r">([^<]+)</text>", svg) == ["77", "2", "0", "50000"]


def test_values_that_are_not_finite_are_left_out_and_one_point_draws_nothing() -> None:
    curve = SmallCurve("loss")
    curve.add(1, 3.0)
    assert curve.svg(10) == ""
    for step, value in enumerate((math.nan, math.inf, 2.0), 2):
        curve.add(step, value)
    svg = curve.svg(10)
    assert "nan" not in svg and "inf" not in svg and svg.count(",") == 2 + 1  # two points, one corner
