"""The coverage of a model: a cell for each feature, and the page of all families."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from omnitrain.models.omni.save import save_whole
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify import coverage
from tests.models.coverage import FILE, PAGE, page
from tests.models.every_family import every_family, peaked_model, probes_of

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.slow
def test_each_feature_of_a_model_has_its_word_and_a_refusal_its_reason(ranks: RankPool) -> None:
    found = coverage.measure(partial(peaked_model, "gpt_oss"), probes_of("gpt_oss"), ranks)
    assert found.components == {"foundation": "own component"}
    words = {name: cell.result for name, cell in found.cells.items()}
    assert words == dict.fromkeys(coverage.COLUMNS, "equal") | {"tensor parallel": "refused"}
    assert "tp" in found.cells["tensor parallel"].why


def test_an_export_that_changes_a_tensor_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peaked_model("qwen3")
    assert coverage._of_export(model) == coverage.CoverageCell("equal")

    def changing(exported: torch.nn.Module, *others: object) -> None:
        exported.model.norm.weight.data[0] += 1
        save_whole(exported, *others)

    monkeypatch.setattr(coverage, "save_whole", changing)
    assert coverage._of_export(model) == coverage.CoverageCell("wrong", "1 tensors differ, such as model.norm.weight")


def test_the_page_is_that_of_the_figures_and_the_first_screen_says_how_many_there_are() -> None:
    families = json.loads(FILE.read_text())["families"]
    assert PAGE.read_text() == page(families)
    assert families.keys() <= set(every_family())
    said = re.search(r"(\d+) of (\d+) measured so far", README.read_text())
    assert said is not None and (int(said[1]), int(said[2])) == (len(families), len(every_family()))
