"""Windows of encoders: within a limit of bytes, and with the shortest simulated step."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from omnitrain.errors import UserError
from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
)
from omnitrain.plan.placement import PipelineShape
from omnitrain.plan.schedule.generators import generate
from omnitrain.plan.windows import WindowChoice, WindowChooser, features_of, peak

STAGES, NUMBER, BYTES = 4, 12, 10
Window = int | Literal["step", "auto"]


def topology(ranks: int = 2) -> Topology:
    """An encoder on all ranks of a pipeline with ``ranks`` data-parallel ranks."""
    everyone = tuple(range(STAGES * ranks))
    tower = Placement("tower", everyone, ("image",), place="world", window=None)
    foundation = Placement("foundation", everyone[:ranks], reads_packs=True)
    first_stage = tuple(rank % ranks for rank in everyone)
    pipeline = PipelineShape(num_ranks=STAGES)
    return Topology(len(everyone), (tower, foundation), ("text",), first_stage=first_stage, pipeline=pipeline)


def tables(given: Topology, features: np.ndarray) -> StepTables:
    """Of ranks with one item per micro-batch that has these features, ``[M, ranks of a stage]``."""
    empty = [()] * (given.world_size - features.shape[1])
    drawn = [(tuple(map(micro_batch, of_rank))) for of_rank in features.T.tolist()]
    return decode_tables(given, [encode_table(given, facts) for facts in (*drawn, *empty)])


def micro_batch(features: int) -> MicroBatchFacts:
    return MicroBatchFacts({"text": 1}, (64,), {"image": (ItemFacts(features, features),) * (features > 0)})


def chooser(window: Window, limit: int | None, parameters: int = 1) -> WindowChooser:
    choice = WindowChoice("tower", window, BYTES, limit)
    return WindowChooser([choice], {"tower": parameters, "foundation": 1})


def chosen(window: Window, limit: int | None, features: np.ndarray) -> int | None:
    given = topology()
    return chooser(window, limit)(given, tables(given, features)).component("tower").window


def ones() -> np.ndarray:
    return np.ones((NUMBER, 2), dtype=np.int64)


def test_features_wait_from_the_exchange_of_their_window_to_its_backward() -> None:
    """1F1B begins p - 1 micro-batches of the next window before a window ends. A frozen encoder keeps no windows."""
    passes = generate("1f1b", STAGES, NUMBER)
    live = {size: peak(passes, size, True, ones()) for size in (1, 2, 3, 4, 6, NUMBER)}
    assert live == {1: 4, 2: 6, 3: 6, 4: 8, 6: 12, NUMBER: NUMBER}
    assert {size: peak(passes, size, False, ones()) for size in (1, 4, NUMBER)} == {1: 4, 4: 7, NUMBER: NUMBER}


def test_the_peak_is_that_of_the_rank_with_the_most_features() -> None:
    passes, features = generate("1f1b", STAGES, NUMBER), ones()
    features[:, 1], features[3, 0] = 5, 100
    assert peak(passes, NUMBER, True, features) == 111 and peak(passes, 1, True, features[:, 1:]) == 20


@pytest.mark.parametrize(
    ("limit", "window", "size"),
    [
        (None, 3, 3),
        (120, "step", 12),
        (119, "step", 4),
        (80, 12, 4),
        (79, "step", 3),
        (79, 2, 2),
        (59, 6, 1),
        (40, 2, 1),
    ],
)
def test_a_step_has_the_largest_windows_whose_features_fit(limit: int | None, window: Window, size: int) -> None:
    assert chosen(window, limit, ones()) == size


def test_a_step_with_fewer_images_has_larger_windows() -> None:
    features = ones()
    features[4:] = 0
    assert (chosen("step", 40, features), chosen("step", 40, ones())) == (NUMBER, 1)


def test_a_limit_that_is_too_small_is_refused_with_the_one_that_is_needed() -> None:
    features = 3 * ones()
    needed = (
        r"components.tower.encode.feature_bytes: found 119, but with windows of one micro-batch 120 bytes wait on "
        r"a rank at a time \(rank 0 has 3 features of 10 bytes in micro-batch 0\); allow 120, or make "
        "micro-batches smaller"
    )
    with pytest.raises(UserError, match=needed):
        chosen(4, 119, features)
    with pytest.raises(
        UserError, match="found 29, but one item has 3 features of 10 bytes: 30 bytes; allow at least as many"
    ):
        chosen(4, 29, features)
    assert chosen(4, 120, features) == 1


@pytest.mark.parametrize("parameters", [1, 4, 30])
def test_auto_is_the_size_with_the_shortest_simulated_step_within_the_limit(parameters: int) -> None:
    features = np.random.default_rng(0).lognormal(3, 1, (NUMBER, 2)).astype(np.int64)
    given, choose = topology(), chooser("auto", None, parameters)
    drawn = tables(given, features)
    seconds = {size: choose._seconds(given, drawn, "tower", size) for size in (1, 2, 3, 4, 6, NUMBER)}
    best = choose(given, drawn).component("tower").window
    assert best is not None and seconds[best] == min(seconds.values()) < max(seconds.values())
    limit = BYTES * peak(generate("1f1b", STAGES, NUMBER), best, True, features_of(given, drawn, "tower")) - 1
    smaller = chooser("auto", limit, parameters)(given, drawn).component("tower").window
    assert smaller is not None and smaller < best


def test_a_step_without_micro_batches_keeps_its_windows() -> None:
    given = topology()
    assert chooser("auto", 1)(given, tables(given, ones()[:0])) is given
