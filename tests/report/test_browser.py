"""Reports of real runs in a real browser. It must be there: without Chromium these tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.report.write import write_report
from omnitrain.train import Trainer
from tests.report.browser import Theme, opened
from tests.report.runs import whole_run
from tests.tiny import tiny_recipe
from tests.train.test_ranks import fit

pytestmark = pytest.mark.slow

EVALUATED = ["train.report=true", "evaluation.max_new_tokens=8", "evaluation.examples_per_source=2"]


@pytest.fixture(scope="module")
def reports(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> the report of a run in one process, of one on two pipeline ranks with a trace, and of two runs."""
    alone, stages = (tmp_path_factory.mktemp(name) for name in ("alone", "stages"))
    Trainer(Recipe.load(str(tiny_recipe(alone, evaluated=True)), EVALUATED)).fit()
    pipeline = ["parallel.components.foundation.pp=2", "train.micro_batches=4", "train.trace.steps=[3]"]
    ranks.run(fit, tiny_recipe(stages, evaluated=True), [*EVALUATED, *pipeline], timeout_s=120, world=2)
    runs = [alone / "run", stages / "run", whole_run(tmp_path_factory.mktemp("made") / "run")]
    both = write_report(runs, alone / "both.html")
    return {"alone": runs[0] / "report.html", "stages": runs[1] / "report.html", "both": both}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["alone", "stages", "both"])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_report_shows_everything_and_asks_for_nothing(
    reports: dict[str, Path], name: str, theme: Theme, width: int
) -> None:
    with opened(reports[name], theme, width) as found:
        asked = [url for url in found.requests if not url.startswith("data:")]
        assert (found.errors, asked) == ([], [reports[name].absolute().as_uri()])
        figures = found.page.query_selector_all("svg, img, audio")
        boxes = [figure.bounding_box() for figure in figures]
        assert len(boxes) > 10 and all(box is not None and box["width"] > 20 and box["height"] > 20 for box in boxes)
        broken = "[...document.images].filter(image => !image.naturalWidth).length"
        assert found.page.evaluate(broken) == 0
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways


def test_the_button_changes_the_colours_of_page_and_figures(reports: dict[str, Path]) -> None:
    colours = "[document.body, document.querySelector('svg text')].map(e => [e => getComputedStyle(e)][0](e))"
    colours += ".map((style, i) => i ? style.fill : style.backgroundColor)"
    with opened(reports["alone"], "light") as found:
        light = found.page.evaluate(colours)
        found.page.click("button")
        dark = found.page.evaluate(colours)
        found.page.click("button")
        assert found.page.evaluate(colours) == light
    assert light == ["rgb(255, 255, 255)", "rgb(28, 30, 33)"]
    assert dark == ["rgb(22, 24, 27)", "rgb(227, 229, 232)"]
