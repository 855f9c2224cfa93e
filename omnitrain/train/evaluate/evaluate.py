"""Compute the held-out loss, generate answers and score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from omnitrain.data.chat.parts import content_parts
from omnitrain.data.packing.budget import PackBudget, pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, RowSource
from omnitrain.models.omni.generate import Answer, generate, is_guided
from omnitrain.models.omni.model import OmniModel
from omnitrain.peers import all_or_raise
from omnitrain.recipe import Recipe
from omnitrain.recipe.functions import load_function
from omnitrain.train.metrics.meter import LossMeter, total_loss
from omnitrain.train.process_groups import Ranks

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Answered:
    """A held-out row, with its reference answer and extra columns, and the model's answer."""

    row: Row
    answer: Answer


Scorer = Callable[[Sequence[Answered]], dict[str, float]]


@dataclass(frozen=True)
class EvaluationResult:
    """Held-out results. All are the same on all ranks, except the answers."""

    losses: dict[str, Any]  # result of :meth:`Evaluator.losses`
    answers: list[Answered]  # one per readable held-out row, sorted by source; on rank 0 only
    scores: dict[str, float]  # result of the scorer
    rejected: list[Rejected]  # rows that could not be read


class Evaluator:
    """A recipe's evaluation: the held-out loss during training, and everything at the end.

    Of ``n`` ranks that draw different samples in training, rank ``r`` reads the held-out rows ``r``, ``r + n``, ...;
    the ranks of sections read none. For the scorer, rank 0 reads all rows again, without decoding. Packs are made at
    the first use and kept, because decoding media is slow.
    """

    def __init__(
        self, model: OmniModel, processor: OmniProcessor, heldout: Sequence[RowSource], recipe: Recipe, ranks: Ranks
    ) -> None:
        """Take the settings; nothing is read yet. All ``ranks`` call every method."""
        assert recipe.evaluation is not None
        self._model, self._processor, self._heldout, self._recipe = model, processor, heldout, recipe
        self._settings, self._ranks, self._peers = recipe.evaluation, ranks, ranks.peers
        self._documents: set[int] = set()  # rows of this rank that have a loss, but ask nothing
        self._rejected: dict[int, Rejected] = {}  # those found unreadable so far

    def losses(self, notify: Progress = lambda _: None) -> dict[str, Any]:
        """Return the total and :meth:`LossMeter.read`, in training mode again; ``notify`` may end it anywhere."""
        self._model.eval()
        try:
            return self._losses(notify)
        finally:
            self._model.train()

    def evaluate(self, notify: Progress = lambda _: None, losses: dict[str, Any] | None = None) -> EvaluationResult:
        """Compute losses, if not known, answers and scores, in evaluation mode; all ranks raise an error of one."""
        peers, places = self._peers, self._places
        _ = self._packs  # making them finds the rows that can be used
        score = all_or_raise(peers, lambda: load_scorer(self._settings.scorer))
        self._model.eval()
        if losses is None:
            losses = self._losses(notify)
        of_rank = self._answers(notify)
        of_ranks = peers.gather_on_first(of_rank if self._ranks.is_first_with_its_samples else {})
        answers = {index: answer for answers in of_ranks for index, answer in answers.items()}
        order = _by_source(answers, places)
        answered = all_or_raise(peers, lambda: [Answered(places[index].row(), answers[index]) for index in order])
        scores = all_or_raise(peers, lambda: score(answered) if peers.rank == 0 else {})
        rejected = {index: row for rows in peers.gather(self._rejected) for index, row in rows.items()}
        return EvaluationResult(
            losses, answered, peers.of_first(scores), [rejected[index] for index in sorted(rejected)]
        )

    def _losses(self, notify: Progress) -> dict[str, Any]:
        found = self._peers.of_first(heldout_loss(self._model, self._packs, notify))
        return {"loss": total_loss(found["heads"], self._recipe.loss_weights)} | found

    @cached_property
    def _places(self) -> list[_HeldoutRow]:
        return heldout_places(self._heldout, self._settings.examples_per_source)

    @property
    def _indices(self) -> range:
        """Of the rows of this rank among all."""
        rank = self._ranks.data_rank
        return range(0) if rank is None else range(rank, len(self._places), self._ranks.data_size)

    @cached_property
    def _packs(self) -> list[Pack]:
        data, alone = self._recipe.data, not self._model.runner.contract.packs
        budget = PackBudget(data.pack_tokens, data.pack_elements, self._model.media_of_data)
        samples = self._samples(budget.tokens)
        return all_or_raise(self._peers, lambda: list(pack_all(samples, budget, alone=alone)))

    def _samples(self, max_tokens: int) -> Iterator[Sample]:
        for index in self._indices:
            row = self._places[index].row()
            if row.document is not None:
                self._documents.add(index)
            yield from self._readable(self._processor.sample(row, index, max_tokens, may_ask=True))

    def _prompts(self, indices: Iterable[int]) -> list[Sample]:
        guided = is_guided(self._settings.sampling)
        prepared = [self._processor.prompt(self._places[index].row(), index, is_guided=guided) for index in indices]
        return [sample for one in prepared for sample in self._readable(one)]

    def _readable(self, prepared: Sample | Rejected) -> list[Sample]:
        if isinstance(prepared, Sample):
            return [prepared, *prepared.more]
        self._rejected[prepared.index] = prepared
        return []

    def _answers(self, notify: Progress) -> dict[int, Answer]:
        """Return index -> answer for the readable rows of this rank, while the other ranks answer theirs."""
        settings = self._settings
        without = self._documents | self._rejected.keys()
        order = _by_source((index for index in self._indices if index not in without), self._places)
        batches = [order[start : start + settings.batch_size] for start in range(0, len(order), settings.batch_size)]
        rounds = self._peers.most({"batches": len(batches)})["batches"]
        answers: dict[int, Answer] = {}
        for count, batch in enumerate(batches + [[]] * (rounds - len(batches)), 1):
            notify(f"answers, batch {count} of {rounds}")
            prompts = all_or_raise(self._peers, partial(self._prompts, batch))
            numbers = [prompt.index for prompt in prompts]
            generated = generate(
                self._model,
                self._processor,
                prompts,
                max_new_tokens=settings.max_new_tokens,
                sampling=settings.sampling,
                seed=self._recipe.train.seed,
                numbers=numbers,
            )
            answers |= zip(numbers, generated, strict=True)
        return answers


@dataclass(frozen=True)
class _HeldoutRow:
    """The position of a held-out row, which is read by :meth:`row`."""

    table: RowSource
    position: int
    source: str

    def row(self) -> Row:
        return self.table[self.position]


def heldout_places(heldout: Sequence[RowSource], limit: int | None) -> list[_HeldoutRow]:
    """Return the positions of the held-out rows, at most ``limit`` of each source."""
    return [
        _HeldoutRow(table, position, source)
        for table in heldout
        for source, positions in table.by_source().items()
        for position in positions[:limit]
    ]


def _by_source(indices: Iterable[int], places: Sequence[_HeldoutRow]) -> list[int]:
    return sorted(indices, key=lambda index: (places[index].source, index))


def heldout_loss(model: OmniModel, packs: Sequence[Pack], notify: Progress = lambda _: None) -> dict[str, Any]:
    """Return the mean loss and tokens over the packs of all ranks, per head and per source (:meth:`LossMeter.read`).

    All ranks of a parallelized model, in evaluation mode, must call it, and get the result; those of sections, which
    have no packs, get an empty one. ``packs`` are as :class:`StepPlanner` takes them: the same on ranks that share
    samples. ``notify`` is called with the progress, equally often on all ranks.
    """
    meter, inference = LossMeter(), model.inference
    with torch.no_grad():
        inference.evaluate(model, packs, meter.add, lambda number: notify(f"held-out loss, pack {number + 1}"))
    return inference.from_last(lambda: meter.read(inference.peers)) if inference.has_foundation else {}


def exact_match(answers: Sequence[Answered]) -> dict[str, float]:
    """Return source -> share of answers whose text equals the reference, for sources with text references."""
    hits: dict[str, list[bool]] = {}
    for answered in answers:
        reference = reference_text(answered.row)
        if reference:
            hits.setdefault(answered.row.source, []).append(answered.answer.text == reference)
    return {source: sum(values) / len(values) for source, values in hits.items()}


def reference_text(row: Row) -> str:
    """Return the text of the row's last message if it is an assistant message, else an empty text."""
    last = row.messages[-1]
    if last["role"] != "assistant":
        return ""
    return "".join(part["text"] for part in content_parts(last) if part["type"] == "text").strip()


def load_scorer(name: str | None) -> Scorer:
    """Load ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``, else raise a UserError. None: :func:`exact_match`."""
    if name is None:
        return exact_match
    return load_function(name, "evaluation.scorer")
