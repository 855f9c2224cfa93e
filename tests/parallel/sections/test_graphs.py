"""Random graphs of sections, in which sections read features of sections, train as one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import MAIN, Section
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import samples
from tests.parallel.sections.test_training import in_float64, require_close, require_equal, small_model, together
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


def any_to_any_with_frozen(parts: Sequence[str]) -> OmniModel:
    model = any_to_any()
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


class Graph(NamedTuple):
    """A random graph of sections.

    Attributes:
        layout: two or three sections of one or two ranks each, beside one to three ranks of ``main``.
        frozen: components that do not train.
        edges: (section, section that reads its features).
    """

    layout: Layout
    frozen: list[str]
    edges: set[tuple[str, str]]


def edges_of(places: Mapping[str, str]) -> set[tuple[str, str]]:
    read = [name for name in places if not name.endswith(".projector")]
    readers = {name: places.get(name.replace(".tower", ".projector"), MAIN) for name in read if ".tower" in name}
    edges = {(section, readers.get(name, MAIN)) for name, section in places.items()}
    return {(section, reader) for section, reader in edges if section != reader}


def random_graph(rng: random.Random) -> Graph:
    """Some section reads features of a section."""
    places = random_places(rng)
    while all(reader == MAIN for _, reader in edges_of(places)):
        places = random_places(rng)
    frozen, window = [name for name in sorted(places) if rng.random() < 0.3], rng.randint(1, 2)
    sections = {}
    for name in sorted({*places.values()} - {MAIN}):
        components = [component for component, section in places.items() if section == name]
        trains = any(component not in frozen for component in components)
        settings = rng.choice([{"encode_twice": True}, {"in_flight": rng.randint(3, 4)}, {}]) if trains else {}
        shared = {"components": components, "micro_batch": window, "slots": rng.randint(1, 3)}
        sections[name] = Section(ranks=rng.randint(1, 2), **shared, **settings)
    main = parse_layout(f"{rng.choice(LAYOUTS_OF_MAIN)}.accum{rng.randint(2, 4)}")
    return Graph(replace(main, sections=tuple(sections.items())), frozen, edges_of(places))


def test_the_random_graphs_have_sections_with_two_readers_and_with_two_feeders() -> None:
    graphs = [random_graph(random.Random(seed)) for seed in range(20)]
    assert all(any(reader != MAIN for _, reader in graph.edges) for graph in graphs)
    assert any(max(Counter(section for section, _ in graph.edges).values()) == 2 for graph in graphs)
    assert any(max(Counter(reader for _, reader in graph.edges if reader != MAIN).values()) == 2 for graph in graphs)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_random_graphs_of_sections_give_the_gradients_of_one_process(sections: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    layout, frozen, _ = random_graph(rng)
    make = partial(with_frozen, frozen)
    tasks = [task for task in TASKS if "to_text" in task or task == "text"]
    given = tiny_samples(tiny_processor(small_model()), rng.randint(2, 9), rng.sample(tasks, 3))
    found = sections.run(in_float64, layout, make, None, given, timeout_s=180, world=layout.num_ranks)
    data_ranks = layout.dp_shard * layout.dp_replicate
    packs = [pack for of_rank in micro_batches(make(), given, data_ranks, layout.accumulation) for pack in of_rank]
    (expected,) = sections.run(in_float64, parse_layout("dp1"), make, [packs], [], timeout_s=180, world=1)
    assert found[0].loss == pytest.approx(expected.loss, rel=1e-6), str(layout)
    require_close(together(found), expected.gradients, 1e-6)
    assert expected.gradients.keys() <= together(found).keys()


@pytest.mark.parametrize(
    ("word", "frozen"),
    [
        ("towers1.twice+projectors1+pp2.accum4", []),
        pytest.param("vision_tower1+dp2.accum2", [], marks=pytest.mark.slow),
        pytest.param("towers2.window2+vision_projector1.window2+sp2.recompute.accum4", [], marks=pytest.mark.slow),
        pytest.param("vision_tower1.ahead+dp2.accum3", ["image_encoder.tower"], marks=pytest.mark.slow),
        pytest.param(
            "vision_tower1.ahead+vision_projector1+tp2.accum3", ["image_encoder.tower"], marks=pytest.mark.slow
        ),
    ],
)
def test_towers_and_projectors_apart_train_as_one_process(sections: RankPool, word: str, frozen: list[str]) -> None:
    require_equal(sections, partial(any_to_any_with_frozen, frozen), samples(), word)
