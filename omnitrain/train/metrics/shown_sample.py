"""An answer to a held-out row, as a run shows it in files and trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Part = str | Path  # a text, or the file of an image, a sound or a video


@dataclass(frozen=True)
class ShownSample:
    """What was asked, answered and expected.

    Attributes:
        name: the source, and the number of the row in it.
        prompt: parts of the question.
        answer: parts of the answer.
        reference: parts of the row's last assistant message; empty if it has none.
    """

    name: str
    prompt: list[Part]
    answer: list[Part]
    reference: list[Part]

    def by_role(self) -> dict[str, list[Part]]:
        """Return ``prompt``, ``answer`` and ``reference`` by these names."""
        return {"prompt": self.prompt, "answer": self.answer, "reference": self.reference}
