"""Models, layouts and plans as the outputs of a notebook's cells."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest
from IPython.core.formatters import DisplayFormatter

import omnitrain as ot
from omnitrain.exports import show_in_notebooks
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe.parallel import Section
from omnitrain.report.notebook import as_html
from tests.parallel.laid_out import laid_out
from tests.tiny import tiny_model


def cells(html: str) -> list[list[str]]:
    """The words of each row of its tables."""
    assert html.startswith("<style>") and html.count("<div") == html.count("</div>") and "http" not in html
    return [re.findall(r"<t[hd][^>]*>(?:<data[^>]*>)?([^<]*)", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_a_model_shows_its_components() -> None:
    model = tiny_model()
    model.image_encoder.requires_grad_(False)
    titles, foundation, *others = cells(as_html(model))
    assert titles[:4] == ["component", "class", "parameters", "trainable"]
    size = f"{sum(p.numel() for p in model.components['foundation'].values()):,}"
    assert foundation[:4] == ["foundation", "Qwen3ForCausalLM", size, size]
    trainable = {row[0]: row[3] for row in others}
    assert trainable["image_encoder"] == "frozen" and set(trainable) == set(model.components) - {"foundation"}


def shown() -> tuple[str, str]:
    layout = ot.parallel.layout_of(model := laid_out(components={"image_encoder": {"mode": "replicate"}}))
    return as_html(layout), as_html(layout.table(model))


def test_a_layout_shows_its_ranks_and_components(ranks: RankPool) -> None:
    layout, table = ranks.run(shown, timeout_s=60, world=2)[0]
    assert layout.count('class="rank"') == 2 and "dp_shard 2" in layout
    rows = {row[0]: row for row in cells(layout)}
    assert rows["component"][:4] == ["component", "mode", "mesh", "units"] and "parameters" not in rows["component"]
    assert rows["image_encoder"][1:3] == ["replicate", "2 x 1"] and rows["foundation"][1:3] == ["fsdp2", "1 x 2"]
    assert {row[0]: row[4] for row in cells(table)}["image_encoder"] == "7,008"  # parameters


def test_a_plan_shows_what_it_sets() -> None:
    plan = ot.ParallelPlan(
        default=ot.ComponentPlan(memory={"recompute": "full"}),
        components={"foundation": ot.ComponentPlan(tp=2, precision=ot.recipe.Precision(compute="bfloat16"))},
        sections={"vision": Section(components=["image_encoder"], ranks=2)},
        tp_plan={"layers.*.q<proj": "colwise"},
    )
    titles, default, foundation, vision, globs, glob = cells(as_html(plan))
    assert titles == ["", "memory", "tp", "precision", "components", "ranks"]
    assert default == ["default", "recompute: full", "", "", "", ""]
    assert foundation == ["foundation", "", "2", "compute: bfloat16", "", ""]
    assert vision == ["vision", "", "", "", "image_encoder", "2"]
    assert (globs, glob) == (["glob", "value"], ["layers.*.q&lt;proj", "colwise"])


def test_a_cell_shows_them_by_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    show_in_notebooks(ot._SHOWN_IN_NOTEBOOKS)
    plan = ot.ParallelPlan(default=ot.ComponentPlan(memory={"recompute": "full"}))
    shown, _ = shell.display_formatter.format(plan)
    assert shown["text/html"] == as_html(plan) and "text/plain" in shown
    for path in ot._SHOWN_IN_NOTEBOOKS:
        module, name = path.rsplit(".", 1)
        assert as_html.dispatch(getattr(importlib.import_module(module), name)) is not as_html.dispatch(object)
