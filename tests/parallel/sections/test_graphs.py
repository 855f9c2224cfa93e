"""Random graphs of sections, in which sections read features of sections, train as one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import MAIN, Section
from tests.parallel.sections.test_training import in_float64, require_close, small_model, together
from tests.tiny import TASKS, tiny_processor, tiny_samples

pytestmark = pytest.mark.ranks
ENCODERS = ("image_encoder", "audio_encoder")
LAYOUTS_OF_MAIN = ("dp1", "dp2", "dp3", "pp2", "sp2", "cp2", "tp2", "replicate2")


def with_frozen(parts: Sequence[str]) -> OmniModel:
    """Both encoders, no decoders, in float64; these modules do not train."""
    model = small_model().double()
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    return model


def random_places(rng: random.Random) -> dict[str, str]:
    """Component -> its section. Each encoder is in one, or its tower and its projector are in two, one often `main`."""
    places = {}
    for encoder in ENCODERS:
        tower, projector = rng.choice([("a", "b"), ("a", "b"), ("a", MAIN), ("b", MAIN), ("c", "b"), ("a", "a")])
        parts = (
            {encoder: tower} if tower == projector else {f"{encoder}.tower": tower, f"{encoder}.projector": projector}
        )
        places |= parts
    return places


def is_two_levels(places: dict[str, str]) -> bool:
    """Whether a section reads features of a section."""
    return any(name.endswith(".projector") and section != MAIN for name, section in places.items())


def random_graph(rng: random.Random) -> Layout:
    """Two or three sections of one or two ranks each, and their settings, beside one to three ranks of ``main``."""
    places = random_places(rng)
    while not is_two_levels(places):
        places = random_places(rng)
    window = rng.randint(1, 2)
    sections = {
        name: Section(
            components=[component for component, section in places.items() if section == name],
            ranks=rng.randint(1, 2),
            micro_batch=window,
            slots=rng.randint(1, 3),
            encode_twice=rng.random() < 0.3,
        )
        for name in sorted({*places.values()} - {MAIN})
    }
    main = parse_layout(f"{rng.choice(LAYOUTS_OF_MAIN)}.accum{rng.randint(2, 4)}")
    return replace(main, sections=tuple(sections.items()))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_random_graphs_of_sections_give_the_gradients_of_one_process(sections: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    layout = random_graph(rng)
    parts = sorted(component for _, section in layout.sections for component in section.components)
    make = partial(with_frozen, [part for part in parts if rng.random() < 0.3])
    tasks = [task for task in TASKS if "to_text" in task or task == "text"]
    given = tiny_samples(tiny_processor(small_model()), rng.randint(2, 9), rng.sample(tasks, 3))
    found = sections.run(in_float64, layout, make, None, given, timeout_s=180, world=layout.num_ranks)
    data_ranks = layout.dp_shard * layout.dp_replicate
    packs = [pack for of_rank in micro_batches(make(), given, data_ranks, layout.accumulation) for pack in of_rank]
    (expected,) = sections.run(in_float64, parse_layout("dp1"), make, [packs], [], timeout_s=180, world=1)
    assert found[0].loss == pytest.approx(expected.loss, rel=1e-6), str(layout)
    require_close(together(found), expected.gradients, 1e-6)
