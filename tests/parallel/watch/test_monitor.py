from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from omnitrain.data.packing.pack import Pack
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.watch.monitor import StallBoard, StallMonitor, follow_components
from omnitrain.parallel.watch.report import Collectives, Place, RankStatus, awaited_ranks, described, report
from tests.tiny import tiny_model, tiny_processor, tiny_samples


class Small(nn.Module):
    """Two components; ``asleep`` makes the encoder's forward do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.foundation = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    @property
    def components(self) -> dict[str, dict[str, nn.Parameter]]:
        return {name: dict(part.named_parameters(prefix=name)) for name, part in self.named_children()}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.foundation(self.image_encoder(rows)).sum()


def sleep() -> None:
    time.sleep(600)


def stop() -> None:
    time.sleep(0.5)  # until its position is stored
    os.kill(os.getpid(), signal.SIGSTOP)


def train(folder: str, limit_s: float, stuck: int, how: str) -> None:
    """Four sharded steps; in the third, rank ``stuck`` does not come out of the encoder."""
    torch.manual_seed(0)
    model, rank = Small(), dist.get_rank()
    mesh = init_parallel_state().fsdp_mesh
    for module in (model.image_encoder, model.foundation, model):
        fully_shard(module, mesh=mesh)
    store = dist.distributed_c10d._get_default_store()
    with open(Path(folder, f"report-{rank}"), "w") as stream:
        with redirect_stderr(stream):
            monitor = StallMonitor(store, rank, dist.get_world_size(), limit_s)
        _train(model, monitor, rank, stuck, how)


def _train(model: Small, monitor: StallMonitor, rank: int, stuck: int, how: str) -> None:
    with monitor as watch:
        watch.follow(model)
        for step in (1, 2, 3, 4):
            watch.at(step=step, phase="data")
            watch.at(micro_batch=0, phase="forward", samples=[f"sample-{rank}-{step}"])
            if step == 3 and rank == stuck:
                model.image_encoder[1].register_forward_hook(lambda *_: globals()[how]())
            loss = model(torch.ones(2, 4))
            watch.at(phase="backward")
            loss.backward()
            watch.at(phase="optimizer")


def test_the_rank_with_the_store_leaves_last() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [StallBoard(store, "stall", rank, 2) for rank in range(2)]
    answer = RankStatus(Place(), 0.0, {}, "")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(boards[0].tell, answer, 1.0)
        assert (boards[1].tell(answer, 1.0) is None) != (first.result() is None)
        parting = thread.submit(boards[0].part, has_reported=True)
        time.sleep(0.3)
        assert not parting.done()
        boards[1].part(has_reported=False)
        parting.result(timeout=0.5)


def test_what_a_group_counts_for_two_devices_is_told_once() -> None:
    answers = {
        rank: RankStatus(
            Place(step=1), 9.0, {f"0/{device}": Collectives("peers", begun) for device in ("cpu", "cuda")}, ""
        )
        for rank, begun in enumerate((4, 5))
    }
    assert report(answers, {}, (), 9.0).count("has not started collective 5 of the process group 'peers'") == 1


def dawdle(limit_s: float) -> list[int]:
    """Rank 0 moves, then pauses, three times as long as the limit; the others wait for it."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with StallMonitor(store, rank, dist.get_world_size(), limit_s) as watch:
        for step in (1, 2):
            watch.at(step=step)
        if rank == 0:
            for micro_batch in range(6):
                time.sleep(limit_s / 2)
                watch.at(micro_batch=micro_batch, phase="forward")
        dist.barrier()
        if rank == 0:
            with watch.paused("save"):
                time.sleep(3 * limit_s)
        dist.barrier()
    return [rank]


def add_up_late(limit_s: float | None) -> float:
    """A collective for which one rank comes later than torch's timeout allows."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    rank, total = dist.get_rank(), torch.ones(1)
    with StallMonitor(dist.distributed_c10d._get_default_store(), rank, dist.get_world_size(), limit_s):
        time.sleep(1.5 * rank)
        dist.all_reduce(total)
    return total.item()


def the_report(folder: Path) -> str:
    (text,) = filter(None, (file.read_text() for file in folder.glob("report-*")))
    return text


def answer(place: Place, **counts: int) -> RankStatus:
    return RankStatus(place, 10.0, {key: Collectives(key, count) for key, count in counts.items()}, f"at {place.phase}")


def test_the_rank_is_behind_that_has_begun_fewer_collectives_though_all_are_at_one_place() -> None:
    place = Place(3, 0, "encode", "image_encoder")
    assert awaited_ranks({0: answer(place, world=8), 1: answer(place, world=7), 2: answer(place, world=8)}) == [1]


def test_a_rank_that_is_late_because_it_waits_for_another_is_not_named() -> None:
    place = Place(3, 0, "forward")
    # 0 waits for 1 in `dp`, 1 waits for 2 in `sp`.
    assert awaited_ranks({0: answer(place, dp=5), 1: answer(place, dp=4, sp=9), 2: answer(place, sp=8)}) == [2]


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    place = Place(3, 0, "forward")
    assert awaited_ranks({0: answer(place, a=2, b=1), 1: answer(place, a=1, b=2)}) == [0, 1]


def test_where_collectives_tell_nothing_the_least_progress_does_and_ties_are_all_named() -> None:
    places = [Place(3, 1, "backward"), Place(3, 1, "forward"), Place(3, None, "optimizer"), Place(3, 1, "forward")]
    assert awaited_ranks({rank: answer(place) for rank, place in enumerate(places)}) == [1, 3]
    places = [Place(4, None, "data"), Place(4, 0, "encode"), Place(3, None, "save")]
    assert awaited_ranks({rank: answer(place) for rank, place in enumerate(places)}) == [2]
    assert awaited_ranks({rank: answer(place) for rank, place in enumerate(places[:2])}) == [0]


def test_a_silent_rank_is_behind_whatever_the_others_tell() -> None:
    assert awaited_ranks({0: answer(Place(1), world=1), 1: answer(Place(1), world=2)}, silent=[2]) == [2]


def test_the_report_names_place_samples_collective_and_those_that_wait() -> None:
    answers = {
        0: answer(Place(3, 0, "backward", "foundation", ["a"]), world=8),
        1: answer(Place(3, 0, "encode", "image_encoder", [f"s{n}" for n in range(10)]), world=7),
        2: answer(Place(3, 0, "backward", "foundation", ["b"]), world=8),
    }
    assert report(answers, {}, [3], 600.4).splitlines() == [
        "the run stalled: no rank made progress for 600 s (train.stall_seconds)",
        "  rank 1 is in encode of image_encoder, step 3, micro-batch 0, samples s0, s1, s2, s3, s4, s5, s6, s7 and "
        "2 more, for 10 s",
        "    has not started collective 8 of the process group 'world'; others are at 8",
        "  waiting: ranks 0, 2 in backward of foundation, step 3, micro-batch 0",
        "  finished: rank 3",
        "  stack of rank 1:",
        "at encode",
    ]


def test_a_place_within_something_new_is_new() -> None:
    watch = StallMonitor(dist.HashStore(), 0, 1, None)
    seen = []
    for change in (
        {"step": 3, "phase": "data"},
        {"micro_batch": 0, "phase": "encode", "samples": ["a", "b"]},
        {"component": "image_encoder"},
        {"phase": "backward"},
        {"phase": "optimizer"},
    ):
        watch.at(**change)
        seen.append(described(watch._place))
    assert seen == [
        "data, step 3",
        "encode, step 3, micro-batch 0, samples a, b",
        "encode of image_encoder, step 3, micro-batch 0, samples a, b",
        "backward, step 3, micro-batch 0, samples a, b",
        "optimizer, step 3",
    ]


def test_every_component_is_noted_when_its_forward_and_its_backward_begin() -> None:
    seen: list[str] = []
    model = Small()
    follow_components(model, seen.append)
    loss = model(torch.ones(2, 4))
    assert [name for name, _ in groupby(seen)] == ["image_encoder", "foundation"]
    seen.clear()
    loss.backward()
    assert [name for name, _ in groupby(seen)] == ["foundation", "image_encoder"]


def test_components_of_an_omni_model_are_noted_however_they_are_called() -> None:
    model, seen = tiny_model(), list[str]()
    follow_components(model, seen.append)
    output = model(Pack.from_samples(tiny_samples(tiny_processor(model))))
    order = ["audio_decoder", "audio_encoder", "image_decoder", "image_encoder", "foundation"]
    assert [name for name, _ in groupby(seen)] == order
    seen.clear()
    torch.stack([term.sum for term in output.losses.values()]).sum().backward()
    assert sorted({*seen}) == sorted(order)


def test_a_trace_shows_where_the_run_was() -> None:
    watch = StallMonitor(dist.HashStore(), 0, 1, None)
    watch.at(step=1, phase="data")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        watch.at(micro_batch=0, phase="backward")
        watch.at(component="image_encoder")
    assert [event.name for event in trace.events()] == [
        "backward, step 1, micro-batch 0",
        "backward of image_encoder, step 1, micro-batch 0",
    ]


@pytest.mark.second
def test_a_rank_that_sleeps_in_the_encoder_is_named_and_the_run_ends(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(os.getpid, timeout_s=60, world=3)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(train, str(tmp_path), 2.0, 1, "sleep", timeout_s=60, world=3)
    assert time.monotonic() - began < 2.0 + 8.0
    assert "died with exit code 1" in str(caught.value) and caught.value.ranks[:3] == [0, 1, 2]
    text = the_report(tmp_path)
    assert "  rank 1 is in forward of image_encoder, step 3, micro-batch 0, samples sample-1-3, for " in text
    assert "    has not started collective " in text
    assert "  waiting: ranks 0, 2 in backward" in text or "  waiting: ranks 0, 2 in forward" in text
    assert "  stack of rank 1:\n" in text and "time.sleep(600)" in text


def test_a_rank_whose_process_does_nothing_any_more_is_named_with_its_last_place(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RankError):
        ranks.run(train, str(tmp_path), 1.0, 0, "stop", timeout_s=60, world=2)
    text = the_report(tmp_path)
    assert "it was last seen in forward of image_encoder, step 3, micro-batch 0, samples sample-0-3\n" in text
    assert "  rank 0 does not answer (killed, or stuck outside Python); " in text and "  waiting: rank 1 in " in text


@pytest.mark.parametrize("limit_s", [10.0, None])
def test_a_collective_waits_longer_than_torch_would(ranks: RankPool, limit_s: float | None) -> None:
    assert ranks.run(add_up_late, limit_s, timeout_s=60, world=2) == [2.0, 2.0]


def test_a_slow_run_that_moves_or_pauses_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(dawdle, 0.5, timeout_s=60, world=2) == [[0], [1]]
