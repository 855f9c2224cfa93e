"""``omnitrain generate``: load a saved model, and answer one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import MODALITIES, Row, open_sources
from omnitrain.errors import DataError, UserError
from omnitrain.models.omni.generate import Answer, generate, is_guided
from omnitrain.models.omni.writers import WORDS, writers_of
from omnitrain.recipe import DataSource, Sampling, Train
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.device import use_device
from omnitrain.train.evaluate.media_files import free_stem, require_mp4, write_parts
from omnitrain.train.metrics.display import quiet_libraries


class Answerer:
    """A saved model, on CUDA if available, that answers prompts; ``limit``: the most tokens of an answer."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        output_dir: str | Path = ".",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        guidance: float = 1.0,
        size: str | None = None,
        films: str = "webp",
        seed: int = 0,
    ) -> None:
        """Load the model: a saved omni model, or the folder of a run (its newest checkpoint); else a UserError.

        Generated media are written to ``output_dir``. ``temperature`` 0 is greedy, ``guidance`` 1 none; decoders write
        images of ``size`` (``WIDTHxHEIGHT``), or as the model chooses. ``films``: ``webp`` or ``mp4``.
        """
        if films == "mp4":
            require_mp4()
        quiet_libraries()
        self._model, self._processor = load_checkpoint(checkpoint, init_device=str(use_device(Train())))
        self.limit, self._seed = max_new_tokens, seed
        of_images = self._processor.writers.get("image", {})
        writers = writers_of(self._model, self._processor, None if of_images else size)
        if guidance != 1 and not writers:
            raise UserError(f"guidance {guidance:g}: the model writes no media; leave it out")
        of_words = {"guidance": guidance, "size": size} if WORDS in writers else {}
        self._sampling = {"text": Sampling(temperature=temperature, **of_words)}
        for name, decoder in self._model.decoders.items():
            own = size if name in of_images else None
            decoder.next_classes([], own)  # raises for a size that it cannot write
            self._sampling[name] = Sampling(temperature=temperature, guidance=guidance, size=own)
        self._folder, self._films = Path(output_dir), films

    def answers(self, rows: Sequence[Row], first: int = 0) -> list[Answer | Rejected]:
        """Answer all rows in one batch; ``first``: number of the first, which its draws follow from."""
        guided, prompt = is_guided(self._sampling), self._processor.prompt
        prepared = [prompt(row, index, is_guided=guided) for index, row in enumerate(rows, first)]
        prompts = [prompt for prompt in prepared if not isinstance(prompt, Rejected)]
        generated = iter(
            generate(
                self._model,
                self._processor,
                prompts,
                max_new_tokens=self.limit,
                sampling=self._sampling,
                seed=self._seed,
                numbers=[prompt.index for prompt in prompts],
            )
            if prompts
            else []
        )
        return [prompt if isinstance(prompt, Rejected) else next(generated) for prompt in prepared]

    def answer(self, prompt: str, media: Mapping[str, Sequence[str]]) -> tuple[Answer, list[str | Path]]:
        """Answer one prompt with files; return the answer and what :meth:`write` does; UserError: no such file."""
        require_files(media)
        of_row = {modality: list(media.get(modality, ())) for modality in MODALITIES}
        row = Row(id="prompt", source="prompt", messages=[user_message(prompt, of_row)], media=of_row, extra={})
        (answered,) = self.answers([row])
        if isinstance(answered, Rejected):
            raise UserError(answered.reason)
        return answered, self.write(answered)

    def write(self, answer: Answer, stem: str | None = None) -> list[str | Path]:
        """Write media as files ``STEM_N``, under a free stem; return texts and paths."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return write_parts(answer.parts, self._folder, stem or free_stem(self._folder, "answer"), self._films)


def user_message(prompt: str, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return a user's message with ``media`` (modality -> files) before the text of ``prompt``."""
    shown: list[dict[str, Any]] = [{"type": modality, "text": None} for modality, files in media.items() for _ in files]
    return {"role": "user", "content": [*shown, {"type": "text", "text": prompt}]}


def require_files(media: Mapping[str, Sequence[str]]) -> None:
    """Raise UserError, with a line for each file that does not exist."""
    if missing := [f"no {m} at {str(f)!r}" for m, files in media.items() for f in files if not Path(f).is_file()]:
        raise UserError(*missing)


def what_was_cut(answer: Answer, max_new_tokens: int) -> str | None:
    """Return what ``max_new_tokens`` cut short, as a sentence; None: nothing."""
    if answer.is_finished:
        return None
    item = answer.unfinished_item
    what = "the answer has no end" if item is None else f"{item} did not finish its last item, which is left out"
    return f"{what}: --max-new-tokens {max_new_tokens} was reached; raise it"


def answer_file(
    answerer: Answerer, prompts: Path, answers: Path, batch_size: int, notify: Callable[[int, int], Any]
) -> int:
    """Answer every prompt of a file, and write a line for each, batch by batch; return how many have no answer.

    A line has the ``id`` of its prompt, the ``answer`` (its texts, joined), its ``parts`` (texts, and paths of written
    media), and whether it ``is_finished``; or an ``error``. ``notify`` gets the number of prompts that are done, and of
    all.
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
    """Read the prompts of a file: JSON Lines or parquet with ``messages``, as data sets are, or JSON Lines with texts.

    Such objects have a text ``prompt``, and perhaps an ``id``, and ``images``, ``audios`` and ``videos`` (paths).
    Raises DataError: a line is neither.
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
