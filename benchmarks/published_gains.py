"""A published gain of shared encoders, simulated: Qwen3-VL-30B-A3B with 32k tokens on 32 GPUs.

LoongForge's article of 2026-05-21 ("Multimodal Heterogeneous Parallel Training Acceleration") reports tokens per
second with three levels of sharing. Level 1: the first stage encodes, and each rank of tensor parallelism encodes all
images of a micro-batch. Level 2 (+6.8 %): each of the four ranks encodes one micro-batch of four. Level 3 (+12.5 %):
all eight ranks of a model encode, before the forwards of a step. The article gives tensor parallelism 4 and two stages;
the batch of 64 samples, which is 8 micro-batches per rank, is that of its example.

The simulator runs the step of each level. Stages are equal, a backward takes twice as long as a forward, messages take
no time. One constant is not known: ``encoder``, the time of the encoder's forward of a micro-batch on one GPU, as a
share of the foundation's forward of a stage. It is fitted so that level 3 gains 12.5 %. Level 2 then follows, in two
ways: ``level_2``: the rank that encoded a micro-batch runs the encoder's backward in the backward of the micro-batch,
and the other ranks wait for it, as the article describes. ``level_2_shared``: the backward of four micro-batches is
divided among the ranks, too, as with ``place: group`` of omnitrain. Level 3 is ``place: world``. ``half`` and
``double`` give the gains for half and double of the constant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import Result, report, start

from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.encoders import EncoderWindows, with_encoders
from omnitrain.plan.schedule.generators import one_f_one_b
from omnitrain.plan.schedule.simulate import simulate

FORMULA = "gain in % = (simulated seconds of level 1 / simulated seconds of the level - 1) * 100"
PUBLISHED = {"level_2": 6.8, "level_3": 12.5}
TENSOR = 4
STAGES = 2
GPUS = 32
SAMPLES = 64  # of a step

Cost = Callable[[Action], float]


def encoding(action: Action, encoder: float, *, forward: Cost, backward: Cost) -> float:
    """Seconds of an action: the foundation's, and on the first stage those of the encoder."""
    if action.kind is Kind.F:
        return 1 + (forward(action) * encoder if action.stage == 0 else 0)
    return 2 + (2 * backward(action) * encoder if action.stage == 0 else 0)


def separate(action: Action, encoder: float, *, num_micro_batches: int) -> float:
    """Seconds of an action, where all ranks encode the items of a step."""
    share = encoder * num_micro_batches / (TENSOR * STAGES)
    return {Kind.F: 1, Kind.B: 2, Kind.ENCODE: share, Kind.ENCODE_B: 2 * share}.get(action.kind, 0)


def gains(encoder: float) -> dict[str, float]:
    """Return level -> its gain over level 1 in percent."""
    number = SAMPLES // (GPUS // (TENSOR * STAGES))
    plain = one_f_one_b(STAGES, number)
    world = with_encoders(plain, [EncoderWindows("image_encoder", number, is_trained=True)])

    def first_of_group(action: Action) -> float:
        return float(action.micro_batch is not None and action.micro_batch % TENSOR == 0)

    def divided(_: Action) -> float:
        return 1 / TENSOR

    def whole(_: Action) -> float:
        return 1.0

    levels: dict[str, tuple[Schedule, Callable[..., float]]] = {
        "level_1": (plain, partial(encoding, forward=whole, backward=whole)),
        "level_2": (plain, partial(encoding, forward=first_of_group, backward=whole)),
        "level_2_shared": (plain, partial(encoding, forward=first_of_group, backward=divided)),
        "level_3": (world, partial(separate, num_micro_batches=number)),
    }
    seconds = {
        name: float(simulate(schedule, partial(cost, encoder=encoder)).makespan)
        for name, (schedule, cost) in levels.items()
    }
    return {name: 100 * (seconds["level_1"] / taken - 1) for name, taken in seconds.items() if name != "level_1"}


def fitted(level: str, published: float) -> float:
    """Return the constant with which ``level`` gains what was published; gains grow with it."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gains(middle)[level] < published else (low, middle)
    return high


def main() -> None:
    """See the top of this file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the result to this file")
    given = start(options)
    encoder = fitted("level_3", PUBLISHED["level_3"])
    figures = {f"published_{name}": gain for name, gain in PUBLISHED.items()} | {"encoder": encoder}
    for name, factor in (("", 1.0), ("_half", 0.5), ("_double", 2.0)):
        figures |= {f"{level}{name}": gain for level, gain in gains(factor * encoder).items()}
    report(Result("published_gains", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
