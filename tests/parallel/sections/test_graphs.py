"""Random sections, and random graphs in which sections read features of sections, train as one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel import parallelize
from omnitrain.parallel.resolve import dtype_of
from omnitrain.parallel.schedule import executor
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import MAIN, Section
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import samples
from tests.parallel.sections.test_training import Step, require_close, require_equal, step, together
from tests.tiny import TASKS, tiny_model, tiny_processor, tiny_samples

pytestmark = pytest.mark.ranks
ENCODERS = ("image_encoder", "audio_encoder")
LAYOUTS_OF_MAIN = ("dp1", "dp2", "dp3", "pp2", "sp2", "cp2", "tp2", "replicate2")


def small_model() -> OmniModel:
    """Both encoders, no decoders."""
    return tiny_model(decoders={})


def small_model_in_float64() -> OmniModel:
    return small_model().double()


def with_frozen(make: Callable[[], OmniModel], parts: Sequence[str]) -> OmniModel:
    """A model in which these modules do not train."""
    model = make()
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    return model


def in_float64(*args: Any) -> Step:
    """:func:`step` with all that a plan has in float32 in float64: then another order of sums shows in no digit."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (parallelize, executor):
            patch.setattr(module, "dtype_of", lambda name: torch.float64 if name == "float32" else dtype_of(name))
        return step(*args)


def gradients_of_both(
    sections: RankPool, rng: random.Random, layout: Layout, make: Callable[[], OmniModel]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients of a layout and those of one process, for random samples; loss and gradients must be close."""
    tasks = [task for task in TASKS if "to_text" in task or task == "text"]
    given = tiny_samples(tiny_processor(small_model()), rng.randint(2, 9), rng.sample(tasks, 3))
    found = sections.run(in_float64, layout, make, None, given, timeout_s=180, world=layout.num_ranks)
    data_ranks = layout.dp_shard * layout.dp_replicate
    packs = [pack for of_rank in micro_batches(make(), given, data_ranks, layout.accumulation) for pack in of_rank]
    (expected,) = sections.run(in_float64, parse_layout("dp1"), make, [packs], [], timeout_s=180, world=1)
    assert found[0].loss == pytest.approx(expected.loss, rel=1e-6), str(layout)
    require_close(together(found), expected.gradients, 1e-6)
    return together(found), expected.gradients


def random_sections(rng: random.Random) -> Layout:
    """One or two sections of one or two ranks each, and their settings, beside one to three ranks of ``main``."""
    words = []
    for name in rng.choice([("vision",), ("audio",), ("encoders",), ("vision", "audio")]):
        settings = [f"window{rng.randint(1, 3)}", f"slots{rng.randint(1, 3)}"]
        settings += rng.choice([["twice"], [f"flight{rng.randint(2, 4)}"], []])
        words.append(".".join([f"{name}{rng.randint(1, 2)}", *settings]))
    main = rng.choice(LAYOUTS_OF_MAIN)
    return parse_layout("+".join([*words, f"{main}.accum{rng.randint(2, 4)}"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_sections_give_the_gradients_of_one_process(sections: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    _, expected = gradients_of_both(sections, rng, random_sections(rng), small_model)
    assert {gradient.dtype for gradient in expected.values()} == {torch.float64}


def random_places(rng: random.Random) -> dict[str, str]:
    """Component -> its section. Each encoder is in one, or its tower and its projector are in two, one often `main`."""
    places = {}
    for encoder in ENCODERS:
        tower, projector = rng.choice([("a", "b"), ("a", "b"), ("a", MAIN), ("b", MAIN), ("c", "b"), ("a", "a")])
        apart = {f"{encoder}.tower": tower, f"{encoder}.projector": projector}
        places |= {encoder: tower} if tower == projector else apart
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_graphs_of_sections_give_the_gradients_of_one_process(sections: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    layout, frozen, _ = random_graph(rng)
    found, expected = gradients_of_both(sections, rng, layout, partial(with_frozen, small_model_in_float64, frozen))
    assert expected.keys() <= found.keys()


@pytest.mark.parametrize(
    ("word", "frozen"),
    [
        pytest.param("towers1.twice+projectors1+pp2.accum4", [], marks=pytest.mark.slow),
        pytest.param("vision_tower1+dp2.accum2", [], marks=pytest.mark.slow),
        pytest.param("towers2.window2+vision_projector1.window2+sp2.recompute.accum4", [], marks=pytest.mark.slow),
        pytest.param("vision_tower1.ahead+dp2.accum3", ["image_encoder.tower"], marks=pytest.mark.slow),
        pytest.param(
            "vision_tower1.ahead+vision_projector1+tp2.accum3", ["image_encoder.tower"], marks=pytest.mark.slow
        ),
    ],
)
def test_towers_and_projectors_apart_train_as_one_process(sections: RankPool, word: str, frozen: list[str]) -> None:
    require_equal(sections, partial(with_frozen, any_to_any, frozen), samples(), word)
