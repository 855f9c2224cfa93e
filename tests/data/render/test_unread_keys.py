"""Each key of a row, message, part or file is read, harmless, or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from omnitrain.data.render.renderer import Renderer
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.render.unread import unread_notes
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.recipe import DataSource, Recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from omnitrain.train.verbs.preview import data_stats, preview
from tests.tiny import tiny_model, tiny_processor, tiny_recipe
from tests.tiny_processors import byte_tokenizer

TEXT = {"type": "text", "text": "what?"}
OPENAI = {
    "messages": [
        {"role": "system", "content": [TEXT], "weight": 0},
        {"role": "user", "content": [{"type": "image", "image": {"url": "a.png"}}, TEXT]},
        {"role": "assistant", "content": [TEXT], "loss": True, "name": "bot", "reasoning": None},
    ],
    "tools": None,
    "images": [{"path": "b.png"}],
    "zoom": None,
}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "7", "train": True}],
    "system": "Be brief.",
    "zoom": None,
}
PLACES = {
    "row": "column 'zoom'",
    "message": "`zoom` of a message (1 of 33 rows, first 'chats[40]'); column 'zoom'",
    "part": "`zoom` of a part (1 of 33 rows, first 'chats[40]'); column 'zoom'",
    "part of a file": "`zoom` of a part (1 of 33 rows, first 'chats[40]'); column 'zoom'",
    "file": "`zoom` of a file (32 of 32 rows, first 'chats[0]'); column 'zoom'",
}


def opened(folder: Path, rows: list[dict[str, Any]], format: str = "jsonl", **node: Any) -> RowSource:
    path = folder / f"chats.{format}"
    if format == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_sources([DataSource.model_validate({"path": str(path), **node})])[0]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return tiny_processor(tiny_model()).renderer


def recipe_of(scorer: str | None) -> Recipe:
    model, data = {"foundation": "ORG/NAME"}, {"train": [{"path": "chats.jsonl"}], "heldout": [{"path": "chats.jsonl"}]}
    run = {"model": model, "data": data, "output_dir": "run", "train": {"steps": 1}}
    return Recipe.model_validate(run | {"evaluation": {"scorer": scorer}})


def with_keys(row: dict[str, Any], place: str) -> dict[str, Any]:
    """A copy with the key ``zoom`` in a place, and with null and a harmless key there."""
    row, more = json.loads(json.dumps(row)), {"zoom": 2, "blank": None, "id": "x"}
    if place == "row":
        return row | {"zoom": 2}
    if place == "file":
        return row | {"images": [{"path": "b.png", **more}]}
    turn = row["messages" if "messages" in row else "conversations"][1]
    part = turn if place == "message" else turn["content"][0]
    (part["image"] if place == "part of a file" else part).update(more)
    return row


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "place"), [*((OPENAI, place) for place in PLACES), (SHAREGPT, "row"), (SHAREGPT, "message")]
)
def test_an_unknown_key_is_named_on_every_level_however_late_it_comes(
    tmp_path: Path, renderer: Renderer, row: dict[str, Any], place: str, format: str
) -> None:
    rows = [row] * 40 + [with_keys(row, place)]
    if place == "file":  # files are searched in the first rows
        rows = rows[::-1] if format == "jsonl" else [rows[-1]] * 32
    messages = next(name for name in ("messages", "conversations") if name in row)
    source = opened(tmp_path, rows, format, columns={"messages": messages})
    note = PLACES[place].replace("32 of 32", "1 of 32" if format == "jsonl" else "32 of 32")
    assert unread_notes([source], renderer, recipe_of(None)) == [f"data 'chats': nothing reads {note}"]


def test_what_the_template_or_a_scorer_may_read_is_not_named(tmp_path: Path, renderer: Renderer) -> None:
    tokenizer = byte_tokenizer(["<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m['mood'] }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = [{"role": "user", "content": "a", "mood": "glad"}, {"role": "assistant", "content": "b", "speed": 2}]
    source = opened(tmp_path, [{"messages": talk, "score": 1}, {"messages": talk, "url": "x", "id": "one"}])
    (note,) = unread_notes([source], TemplateRenderer(tokenizer), recipe_of(None))
    assert (
        note
        == "data 'chats': nothing reads `speed` of a message (2 of 2 rows, first 'chats[0]'); columns 'score', 'url'"
    )
    (note,) = unread_notes([source], renderer, recipe_of("my.py:score"))
    assert note == (
        "data 'chats': nothing reads `mood` of a message (2 of 2 rows, first 'chats[0]'); "
        "`speed` of a message (2 of 2 rows, first 'chats[0]')"
    )


def test_twenty_columns_are_one_line(tmp_path: Path, renderer: Renderer) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (note,) = unread_notes(
        [opened(tmp_path, [{"messages": talk} | {f"c{n}": n for n in range(20)}])], renderer, recipe_of(None)
    )
    assert note.endswith("columns 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', 'c8', 'c9', 'c10', 'c11' and 8 more")


def test_a_row_that_is_skipped_does_not_make_a_column_unread(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"prompt": "a", "completion": "b", "system": "c"}, {"prompt": None, "completion": "b", "system": "c"}]
    recognised = "data 'chats': read as `format: trl`, because its rows have `completion` and `prompt`"
    assert unread_notes([opened(tmp_path, rows)], renderer, recipe_of(None)) == [recognised]


def test_check_preview_stats_and_the_run_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_recipe(tmp_path, text_only=True, steps=1)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "speed": 2}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    recipe = Recipe.load(str(path), [f"data.train=[{{path: {tmp_path / 'chats.jsonl'}}}]"])
    note = "note: data 'chats': nothing reads `speed` of a message (1 of 1 rows, first 'chats[0]')"
    assert check_recipe(recipe) == [] and note in capsys.readouterr().out
    for shown in (preview(recipe), data_stats(recipe)):
        assert note in str(shown)
        assert "Keys that nothing reads" in shown.save(tmp_path / "page.html").read_text()
    capsys.readouterr()
    Trainer(recipe)
    assert note in capsys.readouterr().out
