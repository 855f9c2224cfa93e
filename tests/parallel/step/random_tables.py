"""What four ranks draw in random steps: text alone, one modality, everything, or nothing; from one seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import StepPlanner
from tests.tiny import TASKS, tiny_processor, tiny_samples

RANKS = 4
_KINDS = {
    "text": ("text",),
    "image": ("image_to_text", "images_to_text", "video_to_text"),
    "audio": ("speech_to_text",),
    "mixed": TASKS,
    "nothing": (),
}

Step = list[list[list[Sample]]]


def random_steps(model: OmniModel, number: int, seed: int) -> list[Step]:
    """``[step][rank][micro-batch]`` samples; every third step ends with text alone, the last step is empty."""
    rng = np.random.default_rng(seed)
    every = tiny_samples(tiny_processor(model), 5 * len(TASKS))
    by_task = {task: [sample for sample in every if sample.source == task] for task in TASKS}
    return [_step(rng, by_task, index, is_empty=index == number - 1) for index in range(number)]


def _step(rng: np.random.Generator, by_task: dict[str, list[Sample]], index: int, *, is_empty: bool) -> Step:
    num_micro_batches = 2 if index % 3 == 0 else int(rng.integers(1, 4))

    def drawn(micro_batch: int) -> list[Sample]:
        is_last = micro_batch == num_micro_batches - 1
        kind = "text" if index % 3 == 0 and is_last else str(rng.choice(list(_KINDS)))
        pool = [sample for task in _KINDS[kind] for sample in by_task[task]]
        if is_empty or not pool:
            return []
        return [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 4))]

    return [[drawn(micro_batch) for micro_batch in range(num_micro_batches)] for _ in range(RANKS)]


def step_batch(model: OmniModel, planner: StepPlanner, drawn: Sequence[Sequence[Sample]]) -> StepBatch:
    """The packs of one rank with the plan of all; nothing drawn is an idle pack."""
    idle = idle_prompt(model)
    return planner([Pack.from_samples(samples or [idle]) for samples in drawn])


def num_media(samples: Sequence[Sample], component: str) -> int:
    """Media of one component in a micro-batch."""
    return sum(span.component == component for sample in samples for span in sample.spans)
