"""The simulated time of a pair against what one can compute by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TURNS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "turns.py"))
Leg, seconds_in_turn, seconds_of_pass = (TURNS[name] for name in ("Leg", "seconds_in_turn", "seconds_of_pass"))
LAYERS = 4


def test_all_to_alls_that_are_shorter_than_the_other_pass_s_legs_take_no_time() -> None:
    forward = [Leg(1, 0.9)] * (2 * LAYERS) + [Leg(1)]
    backward = [Leg(2, 0.9)] * (2 * LAYERS) + [Leg(2)]
    compute = 3 * (2 * LAYERS + 1)
    assert seconds_in_turn(forward, backward) == pytest.approx(compute)
    assert seconds_of_pass(forward) + seconds_of_pass(backward) == pytest.approx(compute + 0.9 * 4 * LAYERS)


def test_longer_all_to_alls_hold_up_the_pair_by_what_the_other_pass_does_not_cover() -> None:
    # B computes 1, sends 3; F computes 1 meanwhile, sends 3 after it: B waits until 4, F until 7.
    assert seconds_in_turn([Leg(1, 3), Leg(1)], [Leg(1, 3), Leg(1)]) == 1 + 3 + 3 + 1


def test_a_pass_without_a_partner_waits_for_its_all_to_alls() -> None:
    assert seconds_in_turn([], [Leg(1, 2), Leg(1)]) == 4
    assert seconds_in_turn([Leg(1)], [Leg(1, 2), Leg(1, 2), Leg(1)]) == 1 + 2 + 1 + 2 + 1
