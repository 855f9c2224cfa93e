"""``omnitrain generate --prompts``: answer the prompts of a file in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import MODALITIES, Row, open_sources
from omnitrain.errors import DataError
from omnitrain.recipe import DataSource
from omnitrain.train.verbs.answer import Answerer, user_message


def answer_file(
    answerer: Answerer, prompts: Path, answers: Path, batch_size: int, notify: Callable[[int, int], Any]
) -> int:
    """Answer every prompt of a file, and write a line for each, batch by batch.

    A line has the ``id`` of its prompt, the ``answer`` (its texts, joined), its ``parts`` (texts, and paths of written
    media), and whether it ``is_finished``; or an ``error``.

    Args:
        answerer: the model.
        prompts: see :func:`prompts_of`.
        answers: JSON Lines file to write, with its folder; replaced if it exists.
        batch_size: number of prompts to answer at once.
        notify: called after each batch with the number of prompts that are done, and of all.

    Returns:
        The number of prompts without an answer.
    """
    rows = prompts_of(prompts)
    answers.parent.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with answers.open("w", encoding="utf-8") as stream:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            answered_batch = answerer.answers(batch, start)
            for number, (row, answered) in enumerate(zip(batch, answered_batch, strict=True), start):
                if isinstance(answered, Rejected):
                    line: dict[str, Any] = {"id": row.id, "error": answered.reason}
                    num_failed += 1
                else:
                    parts = [*map(str, answerer.write(answered, f"answer_{number}"))]
                    line = {"id": row.id, "answer": answered.text, "parts": parts, "is_finished": answered.is_finished}
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            stream.flush()
            notify(start + len(batch), len(rows))
    return num_failed


def prompts_of(file: Path) -> list[Row]:
    """Read the prompts of a file: rows as of a data set, or lines with ``prompt``, and with files of media.

    Args:
        file: JSON Lines or parquet, as data sets are (:class:`DataSource`), with ``messages``; or JSON Lines whose
            objects have a text ``prompt``, and perhaps an ``id``, and ``images``, ``audios`` and ``videos`` (paths).

    Raises:
        DataError: a line is neither.
    """
    has_lines = file.suffix == ".jsonl" and file.is_file()
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()] if has_lines else []
    if has_lines and not (lines and '"messages"' in lines[0]):
        return [_row(file, number, line) for number, line in enumerate(lines, 1)]
    (rows,) = open_sources([DataSource(path=str(file))])
    return list(rows)


def _row(file: Path, number: int, line: str) -> Row:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise DataError(
            f"{file}, prompt {number}: expected an object with a text `prompt` (and `images`, `audios`, `videos`: "
            "paths), or with `messages` as a row of a data set"
        )
    media = {modality: _paths(record.get(f"{modality}s")) for modality in MODALITIES}
    message = user_message(record["prompt"], media)
    return Row(str(record.get("id", number)), file.stem, [message], media, extra={})


def _paths(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] if value else []
