from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from omnitrain.data.loader import require_usable
from omnitrain.data.rows import Row, RowSource, open_sources
from omnitrain.errors import UserError
from omnitrain.recipe import DataSource
from tests.tiny import TASKS, part, tiny_model, tiny_processor, tiny_row, write_parquet


def source(folder: Path, rows: list[Row]) -> RowSource:
    return open_sources([DataSource(path=str(write_parquet(folder / "rows.parquet", rows)))])[0]


def plain(folder: Path, messages: list[Any]) -> RowSource:
    Dataset.from_dict({"messages": messages}).to_parquet(str(folder / "rows.parquet"))
    return open_sources([DataSource(path=str(folder / "rows.parquet"))])[0]


def test_the_first_row_of_each_kind_is_found_however_late_it_comes(tmp_path: Path) -> None:
    rows = [tiny_row("text", i) for i in range(40)]
    rows[30], rows[31], rows[35] = (
        tiny_row("image_to_text", 0),
        tiny_row("image_to_text", 1),
        tiny_row("text_to_image", 0),
    )
    assert source(tmp_path, rows).first_of_each_kind() == [0, 30, 35]


def test_texts_without_parts_have_roles_only(tmp_path: Path) -> None:
    def said(*roles: str) -> list[dict[str, str]]:
        return [{"role": role, "content": "hello"} for role in roles]

    rows = [said("user", "assistant"), said("user", "assistant"), said("system", "user", "assistant")]
    assert plain(tmp_path, rows).first_of_each_kind() == [0, 2]


def test_a_column_that_holds_no_messages_has_no_kinds(tmp_path: Path) -> None:
    assert plain(tmp_path, ["hello", "world"]).first_of_each_kind() == []


def test_whatever_a_late_row_asks_in_vain_is_one_error_before_training(tmp_path: Path) -> None:
    rows = [tiny_row("text", i) for i in range(40)]
    rows[20], rows[38] = tiny_row("text_to_image", 0), tiny_row("video_to_text", 0)
    rows[39] = Row("late", "text", [{"role": "tool", "content": [part("text", "no")]}], dict(rows[0].media), {})
    processor = tiny_processor(tiny_model(encoders={}))
    with pytest.raises(UserError) as caught:
        require_usable([source(tmp_path, rows)], processor)
    problems = str(caught.value).splitlines()
    assert len(problems) == 2 and "asks the model to read video" in problems[0] and "message role 'tool'" in problems[1]
    require_usable([source(tmp_path, [tiny_row(task, 0) for task in TASKS])], tiny_processor(tiny_model()))
