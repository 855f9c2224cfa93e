"""Put the chapters of a report into one page."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.page.whole import whole_page
from omnitrain.report.chapters import layout, samples, settings, step, training
from omnitrain.report.chapters.plots import Plots
from omnitrain.report.curves import Metrics
from omnitrain.report.run_record import RunRecord

_LARGEST = 4_700_000  # bytes of a page, media included


def page_of(runs: Sequence[RunRecord]) -> str:
    """Return the page about one or several runs, as HTML."""
    plots, metrics = Plots([run.label for run in runs]), Metrics([run.lines for run in runs])
    before = [
        training.overview(runs),
        training.loss(metrics, plots),
        training.heldout(runs, metrics, plots),
        training.optimizer(metrics, plots),
        training.speed(metrics, plots),
        training.packing(runs, metrics, plots),
        training.others(metrics, plots),
        step.step(runs, plots),
        layout.layout(runs, plots),
        settings.recipe(runs),
        settings.environment(runs),
    ]
    room = _LARGEST - len("".join(before).encode())
    chapters = [*before[:3], samples.samples(runs, room), *before[3:]]
    return whole_page(", ".join(run.label for run in runs), "report", chapters)
