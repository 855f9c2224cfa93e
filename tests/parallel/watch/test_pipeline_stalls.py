"""A rank that holds up a pipeline is named with its stage, its action and its micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.watch.report import Place, RankStatus, RunningAction, awaited_ranks, report
from tests.parallel.laid_out import laid_out, samples
from tests.parallel.watch.stalls import kill, reported, sleep, stop


def two_stages() -> tuple[ot.OmniModel, list[Pack]]:
    return laid_out(state={"pp_size": 2}), [Pack.from_samples(samples("text"))] * 4


def test_a_rank_that_sleeps_in_its_stage_is_named_and_the_other_waits_for_it(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, two_stages, ("backward of stage 1", 2), sleep)
    assert "  rank 1 is in backward of stage 1, step 2, micro-batch 2, samples " in text
    assert "  waiting: rank 0 in backward of stage 0, step 2, micro-batch 2, for rank 1\n" in text
    assert "  stack of rank 1:\n" in text and "time.sleep(600)" in text


@pytest.mark.second
def test_a_stopped_stage_is_named_with_its_action_and_its_micro_batch(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, two_stages, ("forward of stage 0", 3), stop)
    assert "rank 0 does not answer (killed, or stuck outside Python); it was last seen in forward of stage 0" in text
    assert ", step 2, micro-batch 3, samples " in text and "  waiting: rank 1 in forward of stage 1, step 2" in text


def test_a_killed_stage_is_named_with_its_action_by_the_rank_that_needs_it(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, two_stages, ("forward of stage 1", 2), kill)
    assert text.startswith("rank 1 is gone (killed, or its connection broke: ")
    assert "; it was last seen in forward of stage 1, step 2, micro-batch 2, samples " in text
    assert "; rank 0 needed it in backward of stage 0, step 2, micro-batch 2" in text


def at(number: int, *needs: tuple[int, int], step: int = 3) -> RankStatus:
    action = RunningAction(f"action {number}", number, needs)
    return RankStatus(Place(step, 0, "forward", None, (), action), 9.0, {}, "")


def after(phase: Any, step: int = 3) -> RankStatus:
    return RankStatus(Place(step, phase=phase), 9.0, {}, "")


def test_of_stages_that_wait_for_each_other_in_turn_the_one_whose_input_is_there_is_behind() -> None:
    # 0 waits for 1, 1 for 2, 2 for 3; 3 has what it needs, since 2 is past its action 4.
    chain = {0: at(9, (1, 7)), 1: at(7, (2, 6)), 2: at(5, (3, 4)), 3: at(2, (2, 4))}
    assert awaited_ranks(chain) == [3]
    text = report(chain, {}, (), 9.0)
    assert "  rank 3 is in action 2, step 3, micro-batch 0, for 9 s" in text
    assert "  waiting: rank 1 in action 7, step 3, micro-batch 0, for rank 2" in text


def test_a_stage_that_has_sent_everything_is_not_behind_and_one_in_its_data_is() -> None:
    assert awaited_ranks({0: at(9, (1, 7)), 1: after("optimizer")}) == [0]  # its input is there: it computes
    assert awaited_ranks({0: at(9, (1, 7)), 1: after("data")}) == [1]
    assert awaited_ranks({0: at(9, (1, 7)), 1: after("optimizer", step=2)}) == [1]


def test_stages_wait_for_the_one_that_has_not_begun_their_exchange() -> None:
    def exchanges(number: int, *needs: tuple[int, int]) -> RankStatus:
        return RankStatus(
            Place(3, action=RunningAction("exchange of the features of tower", number, needs)), 9.0, {}, ""
        )

    answers = {0: exchanges(4, (1, 4), (2, 6)), 1: exchanges(5, (0, 3), (2, 6)), 2: at(6)}
    assert awaited_ranks(answers) == [2]
    text = report(answers, {}, (), 9.0)
    assert "  waiting: ranks 0, 1 in exchange of the features of tower, step 3, for rank 2" in text
    assert awaited_ranks(answers | {2: exchanges(7, (0, 3), (1, 4))}) == [0, 1, 2]  # all of them are in it
