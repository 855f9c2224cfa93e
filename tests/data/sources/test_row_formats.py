"""Rows of eight formats by name: what is trained is what the format's own package trains."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.recipe import DataSource
from tests.data.sources.goldens.chatml import HERE, TEMPLATE, summary, tokenizer
from tests.data.sources.goldens.rows import DOCUMENTED, ROWS
from tests.tiny import png, webp
from tests.tiny_processors import qwen2_vl

EACH = [(format, name) for format, rows in ROWS.items() for name in rows]


@cache
def goldens() -> dict[tuple[str, str], dict[str, Any]]:
    """(format, row) -> what the package trains, of all files of goldens."""
    made = [json.loads(file.read_text()) for file in sorted(HERE.glob("*.json"))]
    return {(f, n): golden for file in made for f, rows in file.items() if f != "made by" for n, golden in rows.items()}


@cache
def processor() -> OmniProcessor:
    """Reads images and videos, and has the template of the goldens, without its marks of what is generated."""
    made, native = qwen2_vl()
    made.tokenizer = tokenizer()
    made.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return OmniProcessor(TemplateRenderer(made, native), {}, {})


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for digit, name in enumerate(("cat.png", "dog.png")):
        (folder / name).write_bytes(png(digit))
    (folder / "cat.webp").write_bytes(webp(3))
    return folder


def opened(folder: Path, rows: list[dict[str, Any]], suffix: str = "jsonl", **node: Any) -> RowSource:
    path = folder / f"rows.{suffix}"
    if suffix == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_sources([DataSource.model_validate({"path": str(path), **node})])[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("format", "name"), EACH)
def test_a_row_trains_what_the_package_of_its_format_trains(
    tmp_path: Path, media: Path, format: str, name: str, suffix: str
) -> None:
    row = ROWS[format][name]
    folder = {"media_folder": str(media)} if ".png" in str(row) or ".webp" in str(row) else {}
    found = processor().sample(opened(tmp_path, [row], suffix, format=format, **folder)[0])
    assert isinstance(found, Sample), found
    golden = goldens()[format, DOCUMENTED.get((format, name), name)]
    assert summary(found.input_ids.tolist(), found.loss_mask.tolist(), tokenizer()) == golden
