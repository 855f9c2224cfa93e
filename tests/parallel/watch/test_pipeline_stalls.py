"""A rank that holds up a pipeline is named with its stage, its action and its micro-batch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import LostRankError
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.watch.monitor import StallMonitor
from omnitrain.parallel.watch.report import Answer, Place, StageAction, awaited_ranks, report
from tests.parallel.laid_out import laid_out, samples

MICRO_BATCHES = 4


def sleep() -> None:
    time.sleep(600)


def stop() -> None:
    time.sleep(0.5)  # until its position is stored
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, at: tuple[str, int], how: Callable[[], None]) -> None:
    """Two steps on two stages; in the second one, a rank does not get past an action of a micro-batch."""
    model, rank = laid_out(state={"pp_size": 2}), dist.get_rank()
    batch = step_planner(model)([Pack.from_samples(samples("text"))] * MICRO_BATCHES)
    with open(Path(folder, f"report-{rank}"), "w") as stream:
        with redirect_stderr(stream):
            monitor = StallMonitor(dist.distributed_c10d._get_default_store(), rank, 2, 2.0)
        try:
            with monitor as watch:
                watch.follow(model)
                for step in (1, 2):
                    watch.at(step=step, phase="data")

                    def on_phase(*, _step: int = step, **place: Any) -> None:
                        watch.at(**place)
                        if (
                            _step == 2
                            and place.get("action")
                            and (place["action"].text, place.get("micro_batch")) == at
                        ):
                            how()

                    ot.accumulate_gradients(model, batch, on_phase=on_phase)
        except LostRankError as error:
            stream.write(str(error))
            raise


def reported(ranks: RankPool, folder: Path, at: tuple[str, int], how: Callable[[], None]) -> str:
    with pytest.raises(RankError) as caught:
        ranks.run(train, str(folder), at, how, timeout_s=60, world=2)
    texts = [text for file in folder.glob("report-*") if (text := file.read_text())]
    assert len(texts) == 1, (texts, str(caught.value))
    return texts[0]


def test_a_rank_that_sleeps_in_its_stage_is_named_and_the_other_waits_for_it(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, ("backward of stage 1", 2), sleep)
    assert "  rank 1 is in backward of stage 1, step 2, micro-batch 2, samples " in text
    assert "  waiting: rank 0 in backward of stage 0, step 2, micro-batch 2, for rank 1\n" in text
    assert "  stack of rank 1:\n" in text and "time.sleep(600)" in text


def test_a_stopped_stage_is_named_with_its_action_and_its_micro_batch(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, ("forward of stage 0", 3), stop)
    assert "rank 0 does not answer (killed, or stuck outside Python); it was last seen in forward of stage 0" in text
    assert ", step 2, micro-batch 3, samples " in text and "  waiting: rank 1 in forward of stage 1, step 2" in text


def test_a_killed_stage_is_named_with_its_action_by_the_rank_that_needs_it(ranks: RankPool, tmp_path: Path) -> None:
    text = reported(ranks, tmp_path, ("forward of stage 1", 2), kill)
    assert text.startswith("rank 1 is gone (killed, or its connection broke: ")
    assert "; it was last seen in forward of stage 1, step 2, micro-batch 2, samples " in text
    assert "; rank 0 needed it in backward of stage 0, step 2, micro-batch 2" in text


def at(number: int, sender: int | None = None, sent_by: int = -1, step: int = 3) -> Answer:
    action = StageAction(f"action {number}", number, sender, sent_by)
    return Answer(Place(step, 0, "forward", None, (), action), 9.0, {}, "")


def after(phase: Any, step: int = 3) -> Answer:
    return Answer(Place(step, phase=phase), 9.0, {}, "")


def test_of_stages_that_wait_for_each_other_in_turn_the_one_whose_input_is_there_is_behind() -> None:
    # 0 waits for 1, 1 for 2, 2 for 3; 3 has what it needs, since 2 is past its action 4.
    chain = {0: at(9, 1, 7), 1: at(7, 2, 6), 2: at(5, 3, 4), 3: at(2, 2, 4)}
    assert awaited_ranks(chain) == [3]
    text = report(chain, {}, (), 9.0)
    assert "  rank 3 is in action 2, step 3, micro-batch 0, for 9 s" in text
    assert "  waiting: rank 1 in action 7, step 3, micro-batch 0, for rank 2" in text


def test_a_stage_that_has_sent_everything_is_not_behind_and_one_in_its_data_is() -> None:
    assert awaited_ranks({0: at(9, 1, 7), 1: after("optimizer")}) == [0]  # its input is there: it computes
    assert awaited_ranks({0: at(9, 1, 7), 1: after("data")}) == [1]
    assert awaited_ranks({0: at(9, 1, 7), 1: after("optimizer", step=2)}) == [1]


def test_stages_wait_for_the_one_that_has_not_begun_their_exchange() -> None:
    def exchanges(number: int, *meets: tuple[int, int]) -> Answer:
        return Answer(
            Place(3, action=StageAction("exchange of the features of tower", number, meets=meets)), 9.0, {}, ""
        )

    answers = {0: exchanges(4, (1, 5), (2, 7)), 1: exchanges(5, (0, 4), (2, 7)), 2: at(6)}
    assert awaited_ranks(answers) == [2]
    text = report(answers, {}, (), 9.0)
    assert "  waiting: ranks 0, 1 in exchange of the features of tower, step 3, for rank 2" in text
    assert awaited_ranks(answers | {2: exchanges(7, (0, 4), (1, 5))}) == [0, 1, 2]  # all of them are in it
