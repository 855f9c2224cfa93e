"""Pages about real runs and their data in a real browser. It must be there: without Chromium these tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.report.write import write_report
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.preview import data_stats, preview
from tests.report.browser import Opened, Theme, opened
from tests.report.runs import whole_run
from tests.report.test_preview import recipe_with_a_damaged_row
from tests.tiny import tiny_recipe
from tests.train.test_ranks import fit

pytestmark = pytest.mark.slow

EVALUATED = ["train.report=true", "evaluation.max_new_tokens=8", "evaluation.examples_per_source=2"]


@pytest.fixture(scope="module")
def reports(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> the report of a run in one process, of one on two pipeline ranks with a trace, and of two runs."""
    alone, stages = (tmp_path_factory.mktemp(name) for name in ("alone", "stages"))
    Trainer(Recipe.load(str(tiny_recipe(alone, evaluated=True)), EVALUATED)).fit()
    pipeline = ["parallel.components.foundation.pp=2", "train.packs_per_step=4", "train.trace.steps=[3]"]
    ranks.run(fit, tiny_recipe(stages, evaluated=True), [*EVALUATED, *pipeline], timeout_s=120, world=2)
    runs = [alone / "run", stages / "run", whole_run(tmp_path_factory.mktemp("made") / "run")]
    both = write_report(runs, alone / "both.html")
    return {"alone": runs[0] / "report.html", "stages": runs[1] / "report.html", "both": both}


def shows_everything(found: Opened, file: Path, at_least: int) -> None:
    """No script fails, nothing but the file is loaded, and ``at_least`` figures and media are all seen."""
    asked = [url for url in found.requests if not url.startswith("data:")]
    assert (found.errors, asked) == ([], [file.absolute().as_uri()])
    boxes = [figure.bounding_box() for figure in found.page.query_selector_all("svg, img, audio")]
    assert len(boxes) >= at_least
    assert all(box is not None and box["width"] > 20 and box["height"] > 20 for box in boxes)
    assert found.page.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["alone", "stages", "both"])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_report_shows_everything_and_asks_for_nothing(
    reports: dict[str, Path], name: str, theme: Theme, width: int
) -> None:
    with opened(reports[name], theme, width) as found:
        shows_everything(found, reports[name], at_least=11)
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


@pytest.fixture(scope="module")
def data_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> a page about data with a damaged row."""
    folder = tmp_path_factory.mktemp("data")
    recipe = recipe_with_a_damaged_row(folder)
    shown = preview(recipe, packs=2)
    notebook = folder / "notebook.html"  # a cell's output between the rules and the texts of a notebook
    notebook.write_text(f"<html><body style='color:teal'><h2>cell</h2>{shown._repr_html_()}</body></html>")
    stats = data_stats(recipe).save(folder / "stats.html")
    return {"preview": shown.save(folder / "preview.html"), "stats": stats, "notebook": notebook}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["preview", "stats", "notebook"])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_page_about_data_shows_everything_and_asks_for_nothing(
    data_pages: dict[str, Path], name: str, theme: Theme, width: int
) -> None:
    with opened(data_pages[name], theme, width) as found:
        shows_everything(found, data_pages[name], at_least=3)
        if name != "notebook":
            assert found.page.evaluate("document.documentElement.scrollWidth") <= width
        damaged = found.page.query_selector("#rejected .bad, #rejected td:nth-child(3)")
        assert damaged is not None and damaged.is_visible() and "unreadable image of" in damaged.inner_text()


def test_predicted_tokens_have_the_colour_of_their_sample_and_media_are_seen(data_pages: dict[str, Path]) -> None:
    looks = "e => [e.tagName, getComputedStyle(e).backgroundColor, getComputedStyle(e).borderBottomColor]"
    with opened(data_pages["preview"], "light") as found:
        samples = found.page.query_selector_all("#pack1 .sample")
        colours = []
        for sample in samples:
            border = sample.evaluate("e => getComputedStyle(e).borderLeftColor")
            tokens = [token.evaluate(looks) for token in sample.query_selector_all(".tokens > b")]
            read = [token.evaluate(looks) for token in sample.query_selector_all(".tokens > span:not(.item)")]
            assert tokens and {bottom for _, _, bottom in tokens} == {border}
            assert {back for _, back, _ in read} == {"rgba(0, 0, 0, 0)"} and read[0][1] not in {t[1] for t in tokens}
            colours.append(border)
        assert len(set(colours)) == len(samples) > 3
        sizes = "e => [e.naturalWidth, e.naturalHeight, e.clientWidth, e.clientHeight]"
        pictures = [picture.evaluate(sizes) for picture in found.page.query_selector_all("#pack1 .item img")]
        assert all(min(picture) > 0 and picture[3] >= 60 for picture in pictures)
        assert any(width > 2 * height for width, height, *_ in pictures)  # a strip of a video, a spectrogram
        seconds = (
            "e => new Promise(done => e.duration ? done(e.duration) : e.onloadedmetadata = () => done(e.duration))"
        )
        assert all(player.evaluate(seconds) > 0.1 for player in found.page.query_selector_all("#pack1 audio"))


def test_a_part_of_a_page_leaves_the_rest_of_a_notebook_alone(data_pages: dict[str, Path]) -> None:
    with opened(data_pages["notebook"], "dark") as found:
        style = "s => getComputedStyle(document.querySelector(s))"
        assert found.page.evaluate(f"({style})('body > h2').color") == "rgb(0, 128, 128)"
        assert found.page.evaluate(f"({style})('body > h2').borderBottomWidth") == "0px"
        assert found.page.evaluate(f"({style})('div.omnitrain').backgroundColor") == "rgb(22, 24, 27)"
