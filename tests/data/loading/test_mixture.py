"""Weights, stages, epochs and pieces of rows, in a loader whose rows are samples already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from omnitrain.data.loading.loader import LoaderOptions, StepLoader, order_names
from omnitrain.data.loading.slots import LoaderState, merge_states
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Data
from omnitrain.recipe.problems import problem_lines

SLOTS = 2


def text(name: str, length: int) -> Sample:
    ids = np.arange(length)
    return Sample(name, name.split()[0], input_ids=ids, loss_mask=ids > 0, position_ids=ids)


class Ready:
    """In place of a processor: its rows are samples already. Those of ``books`` have three pieces."""

    def sample(self, row: Sample, max_tokens: int | None, **options: bool) -> Sample:
        if row.source != "books":
            return row
        pieces = [replace(row, piece=piece, num_pieces=3) for piece in range(3)]
        return replace(pieces[0], more=tuple(pieces[1:]))


IDLE = replace(text("idle 0", 2), loss_mask=np.zeros(2, dtype=bool), index=-1)
ROWS = {"web": (200, 10), "code": (90, 30), "books": (40, 20)}  # rows and tokens of each


def loader(
    names: Sequence[str], rank: int = 0, ranks: int = 1, state: LoaderState | None = None, **data: Any
) -> StepLoader:
    of_source = data.pop("of_source", {})
    sources = [{"path": f"{name}.jsonl", **of_source.get(name, {})} for name in names]
    rows = [[text(f"{name} {i}", ROWS[name][1]) for i in range(ROWS[name][0])] for name in names]
    defaults = {"pack_tokens": 100, "packing_buffer": 6, "workers": 0}
    node = Data.model_validate({"train": sources, **defaults, **data})
    options = LoaderOptions(seed=3, state=state, slots=SLOTS, rank=rank, ranks=ranks, idle=IDLE)
    return StepLoader(rows, Ready(), node, options)


def pieces(packs: Sequence[Pack]) -> list[tuple[str, ...]]:
    return [tuple(sorted(name for name in pack.info.ids if not name.startswith("idle"))) for pack in packs]


def run(steps: int, loaders: Sequence[StepLoader]) -> list[list[str]]:
    """The rows of each step, whichever rank has them."""
    streams = [iter(one) for one in loaders]
    made = [[next(stream) for stream in streams] for _ in range(steps)]
    for stream in streams:
        stream.close()
    return [sorted(name for packs in step for pack in pieces(packs) for name in pack) for step in made]


STAGES = [
    {"from_step": 7, "weights": {"web": 0, "code": 2}},
    {"from_step": 15, "weights": {"web": 1}},
]


@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), (1, 1), (3, 2)])
def test_stages_change_the_weights_at_their_step_however_far_ahead_rows_are_prepared(workers: int, ranks: int) -> None:
    alone = run(20, [loader(["web", "code"], stages=STAGES)])
    assert run(20, [loader(["web", "code"], r, ranks, stages=STAGES, workers=workers) for r in range(ranks)]) == alone
    of_step = [Counter(name.split()[0] for name in step) for step in alone]
    assert all(of_step[step]["web"] and of_step[step]["code"] for step in range(7))
    assert not any(of_step[step]["web"] for step in range(9, 15))  # what the buffer held is used up
    assert of_step[18]["web"]


@pytest.mark.parametrize(("stop", "ranks", "workers"), [(5, 1, 0), (7, 2, 3), (11, 3, 1), (16, 2, 0)])
def test_a_run_resumes_in_any_stage_and_loses_no_piece_of_a_row(stop: int, ranks: int, workers: int) -> None:
    names = ["web", "code", "books"]
    uncut = run(20, [loader(names, stages=STAGES)])
    first = [loader(names, rank, 2, stages=STAGES) for rank in range(2)]
    begun = run(stop, first)
    state = LoaderState.from_saved(asdict(merge_states([one.state() for one in first])))
    assert any(slot.held_pieces for slot in state.slots.values())
    rest = [loader(names, r, ranks, state, stages=STAGES, workers=workers) for r in range(ranks)]
    assert begun + run(20 - stop, rest) == uncut
    counts = Counter(name for step in uncut for name in step if name.startswith("books"))
    assert max(counts.values()) == 3


@pytest.mark.parametrize("version", [{}, {"order_version": 2}])
def test_a_run_that_began_with_an_earlier_order_is_refused(version: dict[str, int]) -> None:
    saved = asdict(loader(["web", "code"]).state())
    del saved["order_version"]  # as the first checkpoints are
    with pytest.raises(
        UserError, match=f"version {version.get('order_version', 1)} of the order of data.*only version 3"
    ):
        LoaderState.from_saved(saved | version)


def test_weights_of_tokens_are_shares_of_tokens() -> None:
    weights = {"web": {"weight": 1.0}, "code": {"weight": 3.0}, "books": {"weight": 1.0}}
    whole = loader(["web", "code", "books"], weights_by="tokens", of_source=weights)
    steps = list(islice(iter(whole), 60))
    tokens = Counter()
    for pack in (pack for packs in steps for pack in packs):
        for source, length in zip(pack.info.sources, pack.info.lengths, strict=True):
            tokens[source] += length
    shares = {source: count / sum(tokens.values()) for source, count in tokens.items()}
    assert shares == pytest.approx({"web": 0.2, "code": 0.6, "books": 0.2}, abs=0.02)
    assert whole.state().tokens_per_draw == (10.0, 30.0, 60.0)
    resumed = loader(["web", "code", "books"], state=whole.state(), weights_by="tokens", of_source=weights)
    assert resumed.order.draw(999) == whole.order.draw(999)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_is_trained_in_all_its_epochs_and_then_the_data_end(workers: int) -> None:
    limits = {"web": {"epochs": 1}, "code": {"epochs": 2}}
    one = loader(["web", "code"], of_source=limits, workers=workers)
    seen: list[str] = []
    with pytest.raises(DataError, match=r"after \d+ steps; set train\.steps=\d+, or raise `epochs`") as ended:
        for packs in one:
            seen += [name for pack in pieces(packs) for name in pack]
    counts = Counter(seen)
    drawn = {index for state in one.state().slots.values() for index in state.held}
    missing = {one.order.sources[draw[1]].name.split()[0] for draw in map(one.order.draw, drawn)}
    assert missing <= {"web", "code"} and len(drawn) < 20  # of the slot that had more left
    assert sum(counts.values()) + len(drawn) >= 200 + 2 * 90 - 20
    assert {count for name, count in counts.items() if name.startswith("web")} == {1}
    assert max(counts.values()) == 2
    assert f"set train.steps={len(one.state().slots) and one.state().slots[0].num_packs}" in str(ended.value)


def test_data_that_are_too_few_for_a_step_are_named_before_the_first() -> None:
    few = loader(["web"], of_source={"web": {"epochs": 0.005}})  # a row, for two packs
    message = r"but they are too few for the first step, which has 2 packs \(train\.packs_per_step\); raise `epochs`"
    with pytest.raises(DataError, match=message):
        next(iter(few))


def test_names_of_the_order_are_of_the_recipe_or_the_file_and_unique() -> None:
    sources = [{"path": "a/rows.jsonl"}, {"path": "b/rows.jsonl"}, {"path": "c.jsonl", "name": "rows"}, {"path": "d"}]
    assert order_names(Data.model_validate({"train": sources})) == ["rows 0", "rows 1", "rows 2", "d 0"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"stages": [{"from_step": 3, "weights": {"cod": 1}}]},
            "stages.0.weights.cod: unknown data set; did you mean `code`?",
        ),
        (
            {"stages": [{"from_step": 3, "weights": {"web": 1}}, {"from_step": 3, "weights": {"web": 2}}]},
            "stages.1.from_step: found 3, but the stage before begins at 3; put them in order",
        ),
        ({"stages": [{"from_step": 3, "weights": {"web": 0, "code": 0}}]}, "stages.0.weights: all weights are 0"),
        ({"of_source": {"web": {"weight": 0}}}, "train.0.weight: found 0.0, and no stage has another weight for it"),
    ],
)
def test_weights_that_cannot_be_are_refused_with_what_to_do(data: dict[str, Any], message: str) -> None:
    of_source = data.get("of_source", {})
    train = [{"path": f"{name}.jsonl", **of_source.get(name, {})} for name in ("web", "code")]
    with pytest.raises(ValidationError) as refused:
        Data.model_validate({"train": train, "stages": data.get("stages", [])})
    assert message in "\n".join(problem_lines(refused.value, Data))
