"""A published gain of shared encoders, simulated: Qwen3-VL-30B-A3B with 32k tokens on 32 GPUs.

LoongForge's article of 2026-05-21 ("Multimodal Heterogeneous Parallel Training Acceleration") reports tokens per
second with three levels of sharing. Level 1: the first stage encodes, and each rank of tensor parallelism encodes all
images of a micro-batch. Level 2 (+6.8 %): each of the four ranks encodes one micro-batch of four. Level 3 (+12.5 %):
all eight ranks of a model encode, before the forwards of a step. The article gives tensor parallelism 4 and two stages;
the batch of 64 samples, which is 8 micro-batches per rank, is that of its example.

The simulator runs the step of each level. Stages are equal, a backward takes twice as long as a forward, messages take
no time. ``encoder`` is the time of the encoder's forward of a micro-batch on one GPU, as a share of the foundation's
forward of a stage. It follows from operations, and from what the article leaves open (:data:`OPEN`): the share of
tokens that are images, how long texts in a pack are, sizes of images, and how well the encoder uses a GPU compared with
the foundation. ``NAME_least`` and ``NAME_most`` are the ends of the interval that follows, ``NAME_inside`` is 1 if the
published gain lies in it. Nothing is fitted to the answer. ``level_2``: the rank that encoded a micro-batch runs the
encoder's backward in the backward of the micro-batch, and the other ranks wait for it, as the article describes.
``level_2_shared``: the backward of four micro-batches is divided among the ranks, too, as with ``place: group`` of
omnitrain. Level 3 is ``place: world``.

``maestro_*``: the paper of Maestro (arXiv 2605.10501) reports steps 1.2 times as fast for a foundation with 3 billion
active parameters, and 1.4 times for one with 17 billion in 4 stages, with the encoder on 12.5 % more GPUs. The baseline
has the encoder in front of the foundation on the same ranks; 16 data-parallel ranks wait for each other, and run 32
micro-batches. Open are the share of micro-batches with images, and the share of images in these.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from harness import Result, report, start

from omnitrain.plan import Placement
from omnitrain.plan.schedule.actions import Action, Kind, Schedule, SectionWindows
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import accumulate, one_f_one_b
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.simulate import simulate

FORMULA = "gain in % = (simulated seconds of level 1 / simulated seconds of the level - 1) * 100"
PUBLISHED = {"level_2": 6.8, "level_3": 12.5}
TENSOR = 4
STAGES = 2
GPUS = 32
SAMPLES = 64  # of a step
TOKENS = 32768
ACTIVE, ATTENTION = 3.3e9, 4 * 4096 * 48  # of the foundation: parameters of a token; operations of a pair of tokens
VISION, VISION_ATTENTION = 0.41e9, 4 * 1152 * 27  # of the encoder, for a patch; four patches are a token
OPEN = {"images": (0.1, 0.9), "tokens of a text": (512, TOKENS), "patches": (256, 4096), "use of a GPU": (0.5, 2.0)}
MAESTRO = {"3b": (3e9, 1, 1.2), "17b": (17e9, 4, 1.4)}  # active parameters, stages, how many times as fast
MEDIA, IMAGES = (0.1, 1 / 3, 0.6), (0.1, 0.5, 1.0)  # micro-batches with images, and tokens of these that are images
LANES, MICRO_BATCHES, MORE = 16, 32, 0.125

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
    world = with_encoders(plain, [Placement("image_encoder", (), window=number)])

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


def encoder_seconds() -> tuple[float, float]:
    """Return the least and the most seconds of the encoder, in forwards of a stage."""
    found = []
    for images, length, patches, use in product(*OPEN.values()):
        of_token = 2 * ACTIVE + ATTENTION * length / 2
        of_feature = 4 * (2 * VISION + VISION_ATTENTION * patches)
        found.append(images * of_feature / use / (of_token / (TENSOR * STAGES)))
    return min(found), max(found)


def faster(active: float, stages: int, media: float, images: float) -> float:
    """Return how many times as fast a step is with the encoder in a section."""
    work = stages * images * 4 * VISION / active  # of the encoder, in forwards of a stage of a micro-batch
    drawn = np.random.default_rng(0).random((MICRO_BATCHES, LANES)) < media
    plain = one_f_one_b(stages, MICRO_BATCHES) if stages > 1 else accumulate(MICRO_BATCHES)

    def in_front(action: Action) -> float:
        encodes = work if action.stage == 0 and drawn[action.micro_batch].any() else 0.0
        return {Kind.F: 1.0, Kind.B: 2.0}.get(action.kind, 0.0) * (1 + encodes)

    windows = [index for index, lanes in enumerate(drawn) if lanes.any()]
    encodes = {window: work * int(drawn[window].sum()) / (LANES * stages * MORE) for window in windows}

    def apart(action: Action) -> float:
        if action.kind in (Kind.ENCODE, Kind.ENCODE_B):
            return encodes[action.micro_batch or 0] * (2 if action.kind is Kind.ENCODE_B else 1)
        return {Kind.F: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)

    section = SectionWindows("vision", {"image_encoder": windows}, frozenset(["image_encoder"]), 1, 2)
    schedule = with_sections(plain, [section], apart, lambda _, window: encodes[window])
    return float(simulate(plain, in_front).makespan / simulate(schedule, apart).makespan)


def interval(name: str, values: list[float], published: float) -> dict[str, float]:
    """The ends of an interval, and whether a published figure lies in it."""
    low, high = min(values), max(values)
    return {
        f"published_{name}": published,
        f"{name}_least": low,
        f"{name}_most": high,
        f"{name}_inside": float(low <= published <= high),
    }


def main() -> None:
    """See the top of this file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the result to this file")
    given = start(options)
    ends = encoder_seconds()
    figures = {"encoder_least": ends[0], "encoder_most": ends[1]}
    of_ends = [gains(end) for end in ends]
    for name, published in PUBLISHED.items():
        figures |= interval(name, [found[name] for found in of_ends], published)
    figures |= {
        f"level_2_shared_{end}": found["level_2_shared"] for end, found in zip(("least", "most"), of_ends, strict=True)
    }
    for name, (active, stages, published) in MAESTRO.items():
        values = [faster(active, stages, *shares) for shares in product(MEDIA, IMAGES)]
        figures |= interval(f"maestro_{name}", values, published)
        per_gpu = [value / (1 + MORE) for value in values]
        figures |= interval(f"maestro_{name}_per_gpu", per_gpu, published / (1 + MORE))
    report(Result("published_gains", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
