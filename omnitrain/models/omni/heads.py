"""The heads of generation: they draw the next tokens of sequences, text and media, and embed them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from omnitrain.models.components.protocols import MediaWriter, Token
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import normals
from omnitrain.ops.host_values import to_device
from omnitrain.recipe import Sampling

Uniform = Callable[[], torch.Tensor]  # -> float64 [batch] in [0, 1), fresh in every call
Sampler = Callable[[Uniform, torch.Tensor], torch.Tensor]  # logits [batch, classes] -> tokens [batch]


@dataclass
class Answer:
    """The answer to one prompt.

    Attributes:
        parts: in order: ``str``, ``PIL.Image``, ``Waveform``, or ``Clip`` (a film).
        tokens: all sampled tokens, each as ``(text or decoder name, token)``.
        is_finished: whether the end token was sampled within ``max_new_tokens``.
        unfinished_item: name of the decoder whose last item ``max_new_tokens`` cut short; ``parts`` lacks that item.
            None: no item was cut short.
    """

    parts: list[Any] = field(default_factory=list)
    tokens: list[tuple[str, Token]] = field(default_factory=list)
    is_finished: bool = False
    unfinished_item: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str)).strip()


@dataclass
class GeneratedSequence:
    """An unfinished answer: the head that draws its next token, and its tokens so far."""

    writers: dict[int, str]  # start token -> decoder
    limit: int  # most tokens
    mode: str = "text"
    answer: Answer = field(default_factory=Answer)
    item: list[Token] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it gets no more tokens."""
        return self.answer.is_finished or len(self.answer.tokens) >= self.limit

    def take(self, tokens: Iterable[Any], end_token: int, is_complete: Callable[[str, list[Token]], bool]) -> None:
        """Take the next tokens, as many as it gets."""
        for token in tokens:
            if not self.is_done:
                self._take(token, end_token, is_complete)

    def _take(self, token: Any, end_token: int, is_complete: Callable[[str, list[Token]], bool]) -> None:
        self.answer.tokens.append((self.mode, token))
        if self.mode != "text":
            self.item.append(token)
            if is_complete(self.mode, self.item):
                self.mode, self.item = "text", []
        elif token == end_token:
            self.answer.is_finished = True
        else:
            self.mode = self.writers.get(token, "text")


def turn_of(sequences: Sequence[GeneratedSequence], blocks: Collection[str]) -> list[tuple[str, list[int]]]:
    """Return the sequences that get tokens next, by the head that draws them.

    ``blocks``: decoders that draw an item as a whole, over several forwards; the others wait for one of them.
    """
    rows: dict[str, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if not sequence.is_done:
            rows.setdefault(sequence.mode, []).append(row)
    turns = sorted(rows.items())
    return [turn for turn in turns if turn[0] in blocks][:1] or turns


class Drawn(NamedTuple):
    """The tokens that heads drew in a turn.

    Attributes:
        tokens: sequence -> its next tokens; None: the foundation must run over ``embeds`` before the heads draw again.
        embeds: ``[batch, tokens, hidden]``; zeros for sequences that wait, and for finished ones.
    """

    tokens: dict[int, list[Token]] | None
    embeds: torch.Tensor


class Heads:
    """Draws the next tokens of sequences, and embeds them."""

    def __init__(
        self,
        model: OmniModel,
        writers: Mapping[str, MediaWriter],
        sampling: dict[str, Sampling],
        uniform: UniformStreams,
        copies: Sequence[Sequence[int]],
    ) -> None:
        """Take settings.

        ``writers``: the decoders by name, and what writes words of the vocabulary; ``copies``: of the sequences, the
        row of each in the batch; with guidance, each again without condition.
        """
        self._writers, self._decoders = writers, model.decoders
        self._text_embedding = model.foundation.get_input_embeddings()
        self._words = {"text", *writers} - model.decoders.keys()
        self._settings = {name: sampling.get("text" if name in self._words else name) or Sampling() for name in writers}
        self._settings["text"] = sampling.get("text") or Sampling()
        self._samplers = {name: _sampler(one) for name, one in self._settings.items()}
        self._uniform, self._copies = uniform, copies
        self._draws: dict[str, _Draw] = {}  # of the decoders that are not ready

    def draw(
        self,
        turn: Sequence[tuple[str, list[int]]],
        sequences: Sequence[GeneratedSequence],
        hidden: torch.Tensor,
        text_logits: torch.Tensor,
    ) -> Drawn:
        """Draw for the sequences of a turn.

        Args:
            turn: see :func:`turn_of`.
            sequences: all of them.
            hidden: ``[batch, n, hidden]``, of the tokens of the last ``embeds`` that were drawn, or of the last token.
            text_logits: ``[batch, vocabulary]``, of the last token.
        """
        drawn: dict[int, list[Token]] = {}
        weight = self._text_embedding.weight
        embeds = hidden.new_zeros(len(hidden), 1, weight.size(1), dtype=weight.dtype)
        for mode, rows in turn:
            copies = to_device(torch.tensor([[copy[row] for row in rows] for copy in self._copies]), hidden.device)
            read = copies.flatten() if self._sampling(mode).guidance != 1 else copies[0]
            draw = self._draws.pop(mode, None) or self._new_draw(mode, rows, sequences)
            tokens: torch.Tensor | None
            if mode in self._words:
                tokens = draw(text_logits[read].float())[:, None]
                of_rows = self._text_embedding(tokens)
            else:
                of_rows, tokens = self._decoders[mode].lm_embed(hidden[read], draw)
            if of_rows.size(1) > 1:  # alone in its turn
                embeds = embeds.expand(-1, of_rows.size(1), -1).clone()
            embeds[copies] = of_rows[: len(rows)].to(embeds.dtype)
            if tokens is None:
                self._draws[mode] = draw
                return Drawn(None, embeds)
            drawn |= zip(rows, tokens[: len(rows)].tolist(), strict=True)
        return Drawn(drawn, embeds)

    def _new_draw(self, mode: str, rows: Sequence[int], sequences: Sequence[GeneratedSequence]) -> _Draw:
        sampling = self._sampling(mode)
        allowed: list[range | torch.Tensor | None] = [None] * len(rows)
        if mode != "text":
            allowed = [self._writers[mode].next_classes(sequences[row].item, sampling.size) for row in rows]
        return _Draw(sampling.guidance, self._samplers[mode], self._uniform, rows, allowed)

    def _sampling(self, mode: str) -> Sampling:
        return self._settings[mode]


class _Draw:
    """See :class:`~omnitrain.models.components.protocols.Draw`."""

    def __init__(
        self,
        guidance: float,
        sampler: Sampler,
        uniform: UniformStreams,
        rows: Sequence[int],
        allowed: Sequence[range | torch.Tensor | None],
    ) -> None:
        """``rows``: the sequences; ``allowed``: classes of each, a range or ``[n]`` on the device; None: all."""
        self._guidance, self._sampler, self._uniform = guidance, sampler, uniform
        self._rows, self._allowed = rows, allowed
        self.state: Any = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        copies, logits = len(logits) // len(self._rows), self.guided(logits)
        for of_row, classes in zip(logits, self._allowed, strict=True):
            if classes is not None:
                where = slice(classes.start, classes.stop) if isinstance(classes, range) else classes
                kept = of_row[where].clone()
                of_row.fill_(-torch.inf)
                of_row[where] = kept
        return self._sampler(partial(self._uniform.next, self._rows), logits).repeat(copies)

    def guided(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) == len(self._rows):
            return values
        conditional, unconditional = values.chunk(2)
        return unconditional + self._guidance * (conditional - unconditional)

    def noise(self, width: int) -> torch.Tensor:
        return to_device(normals(self._uniform.seeds(self._rows), width), self._uniform.device)


class UniformStreams:
    """Uniform random numbers in [0, 1), one stream per row, seeded by the seed and the row's number."""

    def __init__(self, seed: int, numbers: Sequence[int], device: torch.device) -> None:
        self.device = device
        self._streams = [np.random.default_rng((seed, number)) for number in numbers]

    def next(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the next number of each of ``rows``, float64 on the CPU."""
        return torch.tensor([self._streams[row].random() for row in rows], dtype=torch.float64, device="cpu")

    def seeds(self, rows: Sequence[int]) -> torch.Tensor:
        """Return a seed for each of ``rows``, int64 on the CPU."""
        return torch.tensor([int(self._streams[row].integers(2**63)) for row in rows], device="cpu")


def _sampler(sampling: Sampling) -> Sampler:
    if sampling.temperature == 0:
        return lambda uniform, logits: logits.argmax(dim=-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def draw(uniform: Uniform, logits: torch.Tensor) -> torch.Tensor:
        """Return the first token at which the cumulative probability exceeds a uniform random number."""
        summed = warpers(None, logits).softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        passed = to_device(uniform(), summed.device) * summed[:, -1]
        return torch.searchsorted(summed, passed[:, None], right=True)[:, 0].clamp(max=logits.size(-1) - 1)

    return draw
