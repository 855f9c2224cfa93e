"""What a small model writes of a text: images of digits by three decoders, and films of moving digits.

The quickstart's language model and data; each run learns one task with one decoder. A run is kept in its folder, so a
second call of this program makes only what is left.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from harness import QUICKSTART, ROOT, Result, parser, report, start
from PIL import Image

from omnitrain.data.sources.clips import Clip
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.models.omni.generate import generate
from omnitrain.recipe import DataSource, Recipe, Sampling
from omnitrain.train.trainer import Trainer

TASKS = ROOT / "tasks" / "quickstart"
sys.path.insert(0, str(TASKS))
from judges import ImageJudge, VideoJudge, media_of  # noqa: E402
from make_films import make_films  # noqa: E402

FORMULA = (
    "share of the held-out prompts whose answer a judge, fitted on real media alone, reads as the label of the prompt; "
    "seconds of training and of the guided answers; medians of the seeds"
)
PROMPTS_AT_ONCE = 100
IMAGE = "image_size: 8"
FILM = "image_size: 12, num_frames: 4, fps: 4"
PATCHES = "{{config: {{model_type: omnitrain_patches, patch_size: {}}}}}"


class Run(NamedTuple):
    """A decoder, and how it learns and writes.

    Attributes:
        writes: ``image`` or ``video``.
        decoder: its settings in a recipe; ``{rows}`` is the folder of the data.
        steps: of training.
        sampling: of its answers.
    """

    writes: str
    decoder: str
    steps: int
    sampling: Sampling


CODES = Sampling(temperature=1.0, guidance=2)
LATENTS = Sampling(guidance=2)
RUNS = {
    "image_codes": Run("image", f"{{tokenizer: {TASKS}/tokenizers/image_vq, {IMAGE}}}", 800, CODES),
    "image_flow_head": Run("image", f"{{tokenizer: {PATCHES.format(2)}, {IMAGE}, flow: {{width: 128}}}}", 800, LATENTS),
    "image_in_context": Run(
        "image", f"{{tokenizer: {PATCHES.format(2)}, {IMAGE}, flow: {{kind: in_context}}}}", 800, LATENTS
    ),
    "film_flow_head": Run("video", f"{{tokenizer: {PATCHES.format(4)}, {FILM}, flow: {{width: 256}}}}", 2500, LATENTS),
    "film_in_context": Run(
        "video", f"{{tokenizer: {PATCHES.format(6)}, {FILM}, flow: {{kind: in_context}}}}", 2500, LATENTS
    ),
}
JUDGES: dict[str, type[ImageJudge | VideoJudge]] = {"image": ImageJudge, "video": VideoJudge}


def write_rows(folder: Path) -> None:
    """Write the rows of both tasks into folders of what they write."""
    make_films(folder / "video")
    (folder / "image").mkdir(exist_ok=True)
    for split in ("train", "heldout"):
        table = pq.read_table(TASKS / "data" / f"{split}.parquet", filters=[("task", "==", "text_to_image")])
        pq.write_table(table, folder / "image" / f"{split}.parquet")


def recipe(run: Run, folder: Path, rows: Path, seed: int, steps: int) -> Recipe:
    """The quickstart without encoders, and with one decoder."""
    own = [f"model.decoders={{decoder: {run.decoder}}}", "model.encoders={}", "evaluation=null"]
    own += [f"data.train=[{{path: {rows}/train.parquet}}]", "data.heldout=[]", "data.condition_dropout=0.1"]
    own += [f"train.steps={steps}", f"train.seed={seed}", "train.report=false", f"output_dir={folder}"]
    return Recipe.load(QUICKSTART, own)


def share_right(trainer: Trainer, judge: ImageJudge | VideoJudge, rows: Sequence[Row], sampling: Sampling) -> float:
    """Return the share of right answers to the questions of rows. An answer without a medium is wrong."""
    right, processor = 0, trainer.processor
    for first in range(0, len(rows), PROMPTS_AT_ONCE):
        some = rows[first : first + PROMPTS_AT_ONCE]
        numbers = range(first, first + len(some))
        prompts = [processor.prompt(row, number, is_guided=True) for number, row in zip(numbers, some, strict=True)]
        answers = generate(
            trainer.model,
            processor,
            prompts,
            max_new_tokens=160,
            sampling={"decoder": sampling},
            numbers=numbers,
        )
        media = [medium(answer.parts) for answer in answers]
        labels = [row.extra["label"] for row, written in zip(some, media, strict=True) if written is not None]
        guesses = judge.predict([written for written in media if written is not None])
        right += sum(guess == label for guess, label in zip(guesses, labels, strict=True))
    return right / len(rows)


def medium(parts: Sequence[Any]) -> Any:
    """Return the first image, or the frames of the first film."""
    written = next((part for part in parts if isinstance(part, Image.Image | Clip)), None)
    return written.frames if isinstance(written, Clip) else written


def measured(name: str, folder: Path, rows: Path, seed: int, steps: int, prompts: int) -> dict[str, float]:
    """Train and judge a run, or read what an earlier call found."""
    run, found = RUNS[name], folder / "shares.json"
    if found.is_file():
        kept: dict[str, float] = json.loads(found.read_text())
        return kept
    judge = JUDGES[run.writes]().fit(*media_of(TASKS / "data" / "train.parquet", run.writes))
    (source,) = open_sources([DataSource(path=str(rows / "heldout.parquet"))])
    asked = list(source)[:prompts]
    begun = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was stopped: nobody knows its seconds
    trainer = Trainer(recipe(run, folder, rows, seed, steps or run.steps))
    if trainer.fit().interrupted:
        raise SystemExit(130)
    guided = share_right(trainer, judge, asked, run.sampling)
    seconds = time.perf_counter() - begun
    plain = share_right(trainer, judge, asked, run.sampling.model_copy(update={"guidance": 1.0}))
    shares = {"guided": guided, "unguided": plain, "seconds": seconds}
    found.write_text(json.dumps(shares))
    return shares


def main() -> None:
    """Make every run of every seed, the first seed of all runs first; report what is right."""
    options = parser(__doc__ or "", rounds=3, steps=0)
    options.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="some runs")
    options.add_argument("--folder", type=Path, default=Path("runs/any_to_any"), help="keeps what is done")
    options.add_argument("--prompts", type=int, default=200, help="of the held-out ones")
    given = start(options)
    write_rows(given.folder)
    rounds: dict[str, list[float]] = {}
    for seed in range(given.rounds):
        for name in given.only:
            rows = given.folder / RUNS[name].writes
            shares = measured(name, given.folder / f"{name}_{seed}", rows, seed, given.steps, given.prompts)
            for key, value in shares.items():
                rounds.setdefault(f"{name} {key}", []).append(value)
    figures = {key: float(median(values)) for key, values in rounds.items()}
    report(Result("any_to_any", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()
