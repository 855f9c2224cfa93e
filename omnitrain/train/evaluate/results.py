"""Write the results of a run's evaluation: ``eval.json``, sample answers, and skipped rows."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.data.packing.sample import Rejected
from omnitrain.train.evaluate.evaluate import Evaluation
from omnitrain.train.evaluate.media_files import save_samples
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import show_scores
from omnitrain.train.metrics.trackers import ShownSample
from omnitrain.train.run_state.run_folder import RunFolder


def write_results(
    run: RunFolder,
    step: int,
    result: Evaluation,
    scores: dict[str, float],
    skipped: Sequence[Rejected],
    per_source: int,
) -> list[ShownSample]:
    """Write and print the results, and return the answers that were written. Only the first rank calls this.

    ``scores`` has other numbers to report, too; ``skipped`` are those of the whole run; at most ``per_source`` answers
    of each source are written.
    """
    written = run.write_scores({"step": step} | scores | {"losses": result.losses})
    page, samples = save_samples(result.answers, run.path / "samples", per_source, step)
    show_scores(scores, title=f"{len(result.answers)} held-out answers")
    listed = run.list_rejected(skipped)
    console.print(f"scores: {written}\nsamples: {page}")
    if skipped:
        console.print(f"rows skipped: {len(skipped)}, listed in {listed}")
    return samples
