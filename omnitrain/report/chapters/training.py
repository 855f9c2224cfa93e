"""The chapters of a run's metrics: overview, loss, optimizer, speed, held-out data, packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnitrain.page.html import Cell, chapter, heading, note, table
from omnitrain.report.chapters.plots import Plots, grid
from omnitrain.report.curves import Curve, Metrics
from omnitrain.report.run_record import Line, RunRecord

_MOST_LAYERS = 64  # rows of a table
_MOST_REASONS = 32


def overview(runs: Sequence[RunRecord]) -> str:
    """Return one row for each run, with its last values."""
    titles = ("run", "steps", "of", "loss", "held-out loss", "tokens/s", "peak memory (MiB)", "rows skipped", "ranks")
    rows: list[list[Cell]] = []
    for run in runs:
        last, heldout = run.last, _heldout_lines(run)
        rows.append(
            [
                run.label,
                last["step"],
                run.recipe.get("train", {}).get("steps"),
                last.get("loss"),
                heldout[-1]["heldout"].get("loss") if heldout else None,
                last.get("tokens_per_second"),
                last.get("memory_mb"),
                sum(last.get("rejected", {}).values()),
                _num_ranks(run),
            ]
        )
    return chapter("overview", "Overview", [table(titles, rows)])


def loss(metrics: Metrics, plots: Plots) -> str:
    """Return losses: total, and by all that a line of metrics divides them: heads, sources, modalities."""
    figures = [
        plots.curves("Total loss", metrics.take({"loss": "loss"})),
        plots.curves("Loss by head", metrics.take(metrics.matching("heads/", "/loss"))),
        plots.curves("Loss by modality", metrics.take(metrics.matching("modalities/", "/loss"))),
        *_by_head("Loss by source", "sources/", metrics, plots),
    ]
    return chapter(
        "loss", "Loss", [note("Mean loss per predicted token since the previous line of metrics."), grid(figures)]
    )


def optimizer(metrics: Metrics, plots: Plots) -> str:
    """Return the gradient norm and the learning rates."""
    rates = {"learning_rate": "learning_rate", **metrics.matching("learning_rates/")}
    figures = [
        plots.curves("Gradient norm before clipping", metrics.take({"grad_norm": "grad_norm"})),
        plots.curves("Learning rate", metrics.take(rates)),
    ]
    return chapter("optimizer", "Gradient norm and learning rate", [grid(figures)])


def speed(metrics: Metrics, plots: Plots) -> str:
    """Return throughput (all metrics per second), data wait, memory and exposed communication."""
    memory = {"memory_mb": "memory_mb", **{path: path for path in metrics.others() if path.startswith("memory")}}
    figures = [
        plots.curves("Tokens per second", metrics.take({"tokens_per_second": "tokens_per_second"})),
        plots.curves(
            "Throughput by part", metrics.take({path: path for path in metrics.others() if "_per_second" in path})
        ),
        plots.curves(
            "Share of the time that the slowest rank waited for data", metrics.take({"data_wait": "data_wait"})
        ),
        plots.curves("Peak memory (MiB)", metrics.take(memory)),
        plots.curves("Share of the peak FLOPs", metrics.take({name: name for name in ("mfu", "hfu")})),
        plots.curves(
            "Share of the step in which ranks waited for experts' exchanges",
            metrics.take({"exposed_communication/share": "share"}),
        ),
    ]
    metrics.drop("exposed_communication/")
    return chapter("speed", "Speed and memory", [grid(figures)])


def heldout(runs: Sequence[RunRecord], metrics: Metrics, plots: Plots) -> str:
    """Return held-out losses and scores."""
    metrics.drop("heldout/")
    losses = Metrics([_heldout_lines(run) for run in runs])
    scores = Metrics([run.evaluations for run in runs])
    scores.drop("losses/")
    scores.drop("seconds")
    figures = [
        plots.curves("Held-out loss", losses.take({"heldout/loss": "loss"})),
        plots.curves("Held-out loss by head", losses.take(losses.matching("heldout/heads/", "/loss"))),
        *_by_head("Held-out loss by source", "heldout/sources/", losses, plots),
        plots.curves("Scores", scores.take({path: path for path in scores.others()})),
    ]
    shown = grid(figures) or note("Nothing was evaluated yet, or the recipe has no evaluation.")
    return chapter("heldout", "Held-out losses and scores", [shown])


def packing(runs: Sequence[RunRecord], metrics: Metrics, plots: Plots) -> str:
    """Return how full packs are, and how evenly encoders and experts are busy."""
    figures = [
        plots.curves("Fill of packs", metrics.take({"fill": "fill"})),
        plots.curves("Tokens of the busiest rank / mean", metrics.take({"imbalance": "imbalance"})),
        plots.curves("Samples by source since the previous line", metrics.take(metrics.matching("data/", "/samples"))),
        plots.curves("Tokens of sources and of their media", metrics.take(metrics.matching("data/", "/tokens"))),
        plots.curves("Media items of sources", metrics.take(metrics.matching("data/", "/items"))),
        plots.curves("Rows skipped", metrics.take(metrics.matching("rejected/"))),
        plots.curves("Predicted tokens since the previous line", metrics.take(metrics.matching("heads/", "/tokens"))),
        plots.curves(
            "Cost of encoders on the busiest rank / mean", metrics.take(metrics.matching("encoders/", "/imbalance"))
        ),
        plots.curves(
            "Seconds of a step that ranks waited for features", metrics.take(metrics.matching("encoders/", "/waited"))
        ),
        plots.curves("Tokens of the busiest expert / mean, in the worst layer", _worst_load(runs)),
    ]
    for start in ("sources/", "rejected_reasons/", "encoders/", "experts/"):
        metrics.drop(start)
    words = "Fill: tokens of a step / (micro_batches x pack_tokens). Imbalance: 1 is even."
    return chapter(
        "packing", "Packing and balance", [note(words), grid(figures), *map(_skipped, runs), *map(_encoders, runs)]
    )


def others(metrics: Metrics, plots: Plots) -> str:
    """Return the metrics that no other chapter has, by the first part of their names."""
    groups: dict[str, dict[str, str]] = {}
    for path in metrics.others():
        first, _, rest = path.partition("/")
        groups.setdefault(first, {})[path] = rest or first
    taken = {first: metrics.take(names) for first, names in groups.items()}
    zeros = [name for name, curves in taken.items() if not any(any(curve.values) for curve in curves)]
    figures = [plots.curves(name, curves) for name, curves in taken.items() if name not in zeros]
    words = [note(f"0 in every line: {', '.join(zeros)}.")] if zeros else []
    return chapter("others", "Other metrics", [*words, grid(figures)])


def _by_head(title: str, start: str, metrics: Metrics, plots: Plots) -> list[str]:
    """A figure for each head of ``START SOURCE/HEAD/loss``, with a curve for each source."""
    heads: dict[str, dict[str, str]] = {}
    for path, name in metrics.matching(start, "/loss").items():
        source, _, head = name.rpartition("/")
        heads.setdefault(head, {})[path] = source
    return [plots.curves(f"{title}: {head}", metrics.take(names)) for head, names in sorted(heads.items())]


def _heldout_lines(run: RunRecord) -> list[Line]:
    """Steps with held-out losses, from metrics and from evaluations, which also measure them."""
    found = {line["step"]: line["losses"] for line in run.evaluations if line.get("losses")}
    found |= {line["step"]: line["heldout"] for line in run.lines if line.get("heldout")}
    return [{"step": step, "heldout": losses} for step, losses in sorted(found.items())]


def _num_ranks(run: RunRecord) -> int | None:
    if run.layout is None:
        return None
    sizes = [_product(section["axes"]) for section in run.layout["sections"]]
    return sum(sizes) or 1


def _product(axes: Mapping[str, int]) -> int:
    product = 1
    for size in axes.values():
        product *= size
    return product


def _worst_load(runs: Sequence[RunRecord]) -> list[Curve]:
    curves = []
    for index, run in enumerate(runs):
        loads = [(line["step"], [row["load"] for row in line.get("experts", {}).values()]) for line in run.lines]
        if any(of_layers for _, of_layers in loads):
            curves.append(Curve(index, "load", [(step, max(known, default=None)) for step, known in loads]))
    return curves


def _skipped(run: RunRecord) -> str:
    """A table of the rows skipped up to the last line, by source and reason."""
    reasons = run.last.get("rejected_reasons") or {}
    rows = [(source, reason, count) for source, counts in reasons.items() for reason, count in counts.items()]
    if not rows:
        return ""
    shown = sorted(rows, key=lambda row: -row[2])[:_MOST_REASONS]
    more = [note(f"{len(rows) - len(shown)} more reasons")] if len(rows) > len(shown) else []
    return "".join([heading(f"{run.label}: rows skipped"), table(("source", "reason", "rows"), shown), *more])


def _encoders(run: RunRecord) -> str:
    """Tables of the last line: how encoders' items and experts' tokens are divided."""
    parts = []
    if rows := run.last.get("encoders"):
        titles = ("encoder", "items", "moved", "as drawn", "imbalance", "bytes moved", "waited (s)", "busy share")
        of_row = ("items", "moved", "imbalance_drawn", "imbalance", "bytes_moved", "waited", "busy_share")
        parts += [heading(f"{run.label}: encoders in step {run.last['step']}")]
        parts += [table(titles, [[name, *map(row.get, of_row)] for name, row in rows.items()])]
        parts += [_costs(rows)]
    if layers := run.last.get("experts"):
        shown = list(layers.items())[:_MOST_LAYERS]
        keys = ("load", "entropy", "bytes", "exposed")
        parts += [heading(f"{run.label}: experts in step {run.last['step']}")]
        parts += [table(("layer", *keys), [[name, *map(row.get, keys)] for name, row in shown])]
        parts += [note(f"{len(layers) - len(shown)} more layers")] if len(layers) > len(shown) else []
    return "".join(parts)


def _costs(rows: Mapping[str, Line]) -> str:
    """The cost of each rank's items, if few ranks are listed."""
    by_rank = {name: row["cost"]["by_rank"] for name, row in rows.items() if "by_rank" in row.get("cost", {})}
    if not by_rank:
        return ""
    ranks = range(max(map(len, by_rank.values())))
    return table(["cost by rank", *(f"rank {rank}" for rank in ranks)], [[name, *c] for name, c in by_rank.items()])
