"""The quickstart's scorer: compares text, and judges media with classifiers trained on real training media."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from omnitrain.data.sources.media import Waveform
from omnitrain.train.evaluate.evaluate import Answered

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
try:
    from judges import load_judges, media_of
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; install it with: pip install 'omnitrain[quickstart]'") from missing

TEXT_TASKS = ("image_to_text", "speech_to_text", "video_to_text", "images_to_text")
IMAGE_TASKS = ("text_to_image", "speech_to_image")
SPEECH_TASKS = ("text_to_speech", "image_to_speech")


def score(answers: Sequence[Answered]) -> dict[str, float]:
    """Return the share of correct answers per task, and the accuracy of the judges on real held-out media.

    An answer without the expected image or clip counts as wrong.
    """
    image_judge, speech_judge = load_judges(HERE / "data" / "train.parquet")
    scores = {task: _share([a.answer.text == label(a) for a in of(answers, task)]) for task in TEXT_TASKS}
    for task in IMAGE_TASKS:
        scores[task] = _judged(image_judge, of(answers, task), Image.Image)
    for task in SPEECH_TASKS:
        scores[task] = _judged(speech_judge, of(answers, task), Waveform)
    for name, judge, kind in (("judge_image", image_judge, "image"), ("judge_speech", speech_judge, "speech")):
        media, labels = media_of(HERE / "data" / "heldout.parquet", kind)
        scores[name] = _share([guess == truth for guess, truth in zip(judge.predict(media), labels, strict=True)])
    return scores


def of(answers: Sequence[Answered], task: str) -> list[Answered]:
    """Return the answers of one task."""
    return [answered for answered in answers if answered.row.source == task]


def label(answered: Answered) -> str:
    """Return the correct label of a row."""
    return answered.row.extra["label"]


def _judged(judge: Any, answers: Sequence[Answered], kind: type) -> float:
    media = [next((p for p in a.answer.parts if isinstance(p, kind) and not _is_silent(p)), None) for a in answers]
    present = [i for i, part in enumerate(media) if part is not None]
    guesses = judge.predict([_plain(media[i]) for i in present]) if present else []
    return _share([guess == label(answers[i]) for i, guess in zip(present, guesses, strict=True)], of=len(answers))


def _is_silent(part: Any) -> bool:
    return isinstance(part, Waveform) and not part.samples.any()


def _plain(part: Any) -> Any:
    return part.samples if isinstance(part, Waveform) else part


def _share(right: Sequence[bool], of: int | None = None) -> float:
    return sum(right) / max(1, len(right) if of is None else of)
