"""A run of two ranks in which one of them does not get past an action, and what is reported of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import LostRankError
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.watch.monitor import StallMonitor

Build = Callable[[], tuple[ot.OmniModel, Sequence[Pack]]]
At = tuple[str, int | None]  # the action in words, and the micro-batch


def sleep() -> None:
    time.sleep(600)


def stop() -> None:
    time.sleep(0.5)  # until its position is stored
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, build: Build, at: At, how: Callable[[], None]) -> None:
    """Two steps; in the second one, a rank does not get past an action of a micro-batch. A section encodes ahead."""
    model, packs = build()
    is_ahead = (layout := layout_of(model)) is not None and layout.encodes_ahead
    rank, batch = dist.get_rank(), step_planner(model)(packs)
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
                        action = place.get("action")
                        if _step == 2 and action and (action.text, place.get("micro_batch")) == at:
                            how()

                    upcoming = batch if step == 2 and is_ahead else None
                    ot.accumulate_gradients(model, batch, on_phase=on_phase, upcoming=upcoming)
        except LostRankError as error:
            stream.write(str(error))
            raise


def reported(ranks: RankPool, folder: Path, build: Build, at: At, how: Callable[[], None]) -> str:
    """The report that one of the ranks writes."""
    with pytest.raises(RankError) as caught:
        ranks.run(train, str(folder), build, at, how, timeout_s=60, world=2)
    texts = [text for file in folder.glob("report-*") if (text := file.read_text())]
    assert len(texts) == 1, (texts, str(caught.value))
    return texts[0]
