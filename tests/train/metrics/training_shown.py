"""A run as its display sees it; imports no torch, for the notebook of a test."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from omnitrain.train.metrics.progress import Activity, StepProgress

VALUES = ["loss 2.582", "audio_decoder 1.234", "image_decoder 1.302", "text 0.108", "7,718 tokens/s"]


class Clock:
    """Takes the place of the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def show_training(console: Console, clock: Any) -> None:
    """A resumed run: a line of metrics every 42 seconds, and an evaluation of 80 seconds."""
    with StepProgress(console, 2000, 200) as shown:
        for step in range(201, 1201):
            clock.now += 0.07
            values = VALUES + ["held-out text 0.201", "rows skipped: 3 (rejected.jsonl)"] * (step == 1200)
            shown.advance(step, 5 - step / 400, values if step % 600 == 0 else ())
    with Activity(console, "evaluation") as activity:
        for answers in range(0, 1600, 400):
            clock.now += 20
            activity.update(f"answers {answers}/1600")
    console.print("saved runs/quickstart/checkpoints/step-00002000")
