"""Held-out loss, generated answers and their scores."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnitrain.data.packing import pack_all
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import Row, RowSource
from omnitrain.data.sample import Rejected, Sample
from omnitrain.errors import UserError
from omnitrain.models.generation import Answer, generate
from omnitrain.models.omni import OmniModel
from omnitrain.recipe import Recipe
from omnitrain.train.metrics import LossMeter

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Answered:
    """A held-out row and what the model answered.

    Attributes:
        row: the whole row, its reference answer and extra columns included.
        answer: the generated answer.
    """

    row: Row
    answer: Answer


Scorer = Callable[[Sequence[Answered]], dict[str, float]]


@dataclass(frozen=True)
class Evaluation:
    """Held-out results.

    Attributes:
        losses: as :meth:`LossMeter.read` gives them.
        answers: one per held-out row that could be read.
        scores: what the scorer made of the answers.
        rejected: rows that could not be read.
    """

    losses: dict[str, Any]
    answers: list[Answered]
    scores: dict[str, float]
    rejected: list[Rejected]


def evaluate(
    model: OmniModel,
    processor: OmniProcessor,
    heldout: Sequence[RowSource],
    recipe: Recipe,
    notify: Progress = lambda _: None,
) -> Evaluation:
    """Run a recipe's evaluation.

    Args:
        model: in any mode; left in evaluation mode.
        processor: of the model.
        heldout: the held-out data sets.
        recipe: with an ``evaluation`` node and held-out data.
        notify: told what is going on.

    Raises:
        UserError: no such scorer.
    """
    settings = recipe.evaluation
    assert settings is not None
    score = load_scorer(settings.scorer)
    model.eval()
    rows = list(heldout_rows(heldout, settings.examples_per_source))
    prepared = [processor.sample(row, index, recipe.data.pack_tokens) for index, row in enumerate(rows)]
    samples = [item for item in prepared if isinstance(item, Sample)]
    notify(f"held-out loss over {len(samples)} samples")
    losses = heldout_loss(model, samples, recipe.data.pack_tokens)
    answers: list[Answered] = []
    readable = [rows[sample.index] for sample in samples]
    readable.sort(key=lambda row: row.source)  # prompts of one source have similar lengths
    for start in range(0, len(readable), settings.batch_size):
        notify(f"answers {start}/{len(readable)}")
        batch = readable[start : start + settings.batch_size]
        prompts = [processor.prompt(row) for row in batch]
        made = generate(
            model,
            processor,
            [prompt for prompt in prompts if isinstance(prompt, Sample)],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            seed=recipe.train.seed + start,
        )
        answers += [Answered(row, answer) for row, answer in zip(batch, made, strict=True)]
    rejected = [item for item in prepared if isinstance(item, Rejected)]
    return Evaluation(losses, answers, score(answers), rejected)


def heldout_rows(heldout: Sequence[RowSource], limit: int | None) -> Iterator[Row]:
    """Held-out rows, ``limit`` of each source at most."""
    for table in heldout:
        for positions in table.by_source().values():
            yield from (table[position] for position in positions[:limit])


@torch.no_grad()
def heldout_loss(model: OmniModel, samples: Sequence[Sample], pack_tokens: int) -> dict[str, Any]:
    """Mean loss and tokens, per head and per source (:meth:`LossMeter.read`)."""
    meter = LossMeter()
    for pack in pack_all(samples, pack_tokens, alone=not model.runner.contract.packs):
        pack = pack.to(model.device)
        meter.add(pack, model(pack).losses)
    return meter.read()


def exact_match(answers: Sequence[Answered]) -> dict[str, float]:
    """Share of answers whose text equals the reference's, per source; sources with text references only."""
    hits: dict[str, list[bool]] = {}
    for answered in answers:
        reference = reference_text(answered.row)
        if reference:
            hits.setdefault(answered.row.source, []).append(answered.answer.text == reference)
    return {source: sum(values) / len(values) for source, values in hits.items()}


def reference_text(row: Row) -> str:
    """Text of the row's last message, if an assistant said it; else empty."""
    last = row.messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return "".join(parts).strip()


def load_scorer(name: str | None) -> Scorer:
    """The function behind ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; None: :func:`exact_match`.

    Raises:
        UserError: no such file, module or function.
    """
    if name is None:
        return exact_match
    place, _, function = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        scorer = getattr(module, function)
        if not callable(scorer):
            raise TypeError(f"{function} is no function")
        return scorer
    except Exception as error:  # a user's file may fail in any way
        raise UserError(
            f"evaluation.scorer: {name!r} cannot be loaded ({error}); expected FILE.py:FUNCTION or MODULE:FUNCTION"
        ) from None


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
