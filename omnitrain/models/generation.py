"""Generation: text until a medium starts, then that decoder's tokens until it is whole, then text again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnitrain.data.pack import Pack
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.sample import Sample
from omnitrain.models.omni import OmniModel
from omnitrain.recipe import Sampling

Sampler = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Answer:
    """What was generated for one prompt.

    Attributes:
        parts: in order: ``str``, ``PIL.Image`` or ``Waveform``.
        tokens: every drawn token: ``(text or decoder name, token)``.
        is_finished: the end token came before ``max_new_tokens``.
    """

    parts: list[Any] = field(default_factory=list)
    tokens: list[tuple[str, int]] = field(default_factory=list)
    is_finished: bool = False

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str)).strip()


class _Sequence:
    """One answer in the making: which head draws its next token, and what it drew."""

    def __init__(self, writers: dict[int, str]) -> None:
        self.writers = writers  # start token -> decoder
        self.mode = "text"
        self.answer = Answer()
        self.item: list[int] = []

    def take(self, token: int, end_token: int, is_complete: Callable[[str, list[int]], bool]) -> None:
        self.answer.tokens.append((self.mode, token))
        if self.mode != "text":
            self.item.append(token)
            if is_complete(self.mode, self.item):
                self.mode, self.item = "text", []
        elif token == end_token:
            self.answer.is_finished = True
        else:
            self.mode = self.writers.get(token, "text")


@torch.no_grad()
def generate(
    model: OmniModel,
    processor: OmniProcessor,
    prompts: Sequence[Sample],
    *,
    max_new_tokens: int = 256,
    sampling: dict[str, Sampling] | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> list[Answer]:
    """Answers to prompts of any lengths, in one batch.

    Args:
        model: in any mode; put back afterwards.
        processor: knows the end token and the start token of each modality.
        prompts: from :meth:`OmniProcessor.prompt`.
        max_new_tokens: longest answer, text and media tokens together.
        sampling: ``text`` or a decoder's name -> how its tokens are drawn; greedy where absent.
        seed: of sampling.
        use_cache: keep keys and values; without it every step runs the whole sequence (for tests).

    Returns:
        One :class:`Answer` per prompt. Media that were cut short by ``max_new_tokens`` are left out.
    """
    was_training = model.training
    model.eval()
    try:
        sequences = _decode(model, processor, prompts, max_new_tokens, sampling or {}, seed, use_cache)
    finally:
        model.train(was_training)
    for sequence in sequences:
        sequence.answer.parts = _parts(model, processor, sequence.answer.tokens)
    return [sequence.answer for sequence in sequences]


def _decode(
    model: OmniModel,
    processor: OmniProcessor,
    prompts: Sequence[Sample],
    max_new_tokens: int,
    sampling: dict[str, Sampling],
    seed: int,
    use_cache: bool,
) -> list[_Sequence]:
    writers = {processor.start_tokens[modality]: name for modality, (name, _) in processor.writers.items()}
    sequences = [_Sequence(writers) for _ in prompts]
    decoders = model.decoders
    generator = torch.Generator(model.device).manual_seed(seed)
    samplers = {name: _sampler(sampling.get(name, Sampling()), generator) for name in ("text", *decoders)}
    embeds, mask = _left_padded(model, prompts)
    step = _Foundation(model, embeds, mask, use_cache)
    text_embedding = model.foundation.get_input_embeddings()
    for _ in range(max_new_tokens):
        hidden, text_logits = step.last()
        next_embeds = torch.zeros_like(hidden)
        for mode in sorted({s.mode for s in sequences if not s.answer.is_finished}):
            rows = [i for i, s in enumerate(sequences) if s.mode == mode and not s.answer.is_finished]
            index = torch.tensor(rows, device=hidden.device)
            if mode == "text":
                tokens = samplers["text"](text_logits[index].float())
                rows_embeds = text_embedding(tokens)
            else:
                rows_embeds, tokens = decoders[mode].lm_embed(hidden[index], samplers[mode])
            next_embeds[index] = rows_embeds.to(next_embeds.dtype)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                sequences[row].take(token, processor.end_token, lambda name, item: decoders[name].is_complete(item))
        if all(sequence.answer.is_finished for sequence in sequences):
            break
        step.append(next_embeds)
    return sequences


class _Foundation:
    """The foundation over a growing, left-padded batch; the state is a KV cache or the whole sequence."""

    def __init__(self, model: OmniModel, embeds: torch.Tensor, mask: torch.Tensor, use_cache: bool) -> None:
        self.model, self.embeds, self.mask = model, embeds, mask
        self.cache = DynamicCache(config=model.foundation.config) if use_cache else None

    def last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[batch, hidden]`` and text logits ``[batch, vocabulary]`` at the last position."""
        logits: list[torch.Tensor] = []

        def head(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
            logits.append(type(lm_head).forward(lm_head, hidden[:, -1]))
            return hidden

        positions = self.mask.cumsum(dim=1).sub(1).clamp(min=0)[:, -self.embeds.size(1) :]
        hidden = self.model.run_foundation(
            self.embeds,
            head=head,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=self.cache is not None,
        )
        return hidden[:, -1], logits[0]

    def append(self, next_embeds: torch.Tensor) -> None:
        """Add one position, ``[batch, hidden]``."""
        new = next_embeds[:, None]
        self.embeds = new if self.cache is not None else torch.cat([self.embeds, new], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)


def _left_padded(model: OmniModel, prompts: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings ``[batch, longest, hidden]``, zeros in front, and the mask ``[batch, longest]`` of real positions."""
    order = [Pack.from_samples([prompt]).to(model.device) for prompt in prompts]
    rows = [model.embed(pack)[0][0] for pack in order]
    longest = max(len(row) for row in rows)
    embeds = torch.stack([nn.functional.pad(row, (0, 0, longest - len(row), 0)) for row in rows])
    starts = torch.tensor([longest - len(row) for row in rows], device=embeds.device)
    return embeds, (torch.arange(longest, device=embeds.device) >= starts[:, None]).long()


def _sampler(sampling: Sampling, generator: torch.Generator) -> Sampler:
    if sampling.temperature == 0:
        return lambda logits: logits.argmax(dim=-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def draw(logits: torch.Tensor) -> torch.Tensor:
        probabilities = warpers(None, logits).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return draw


def _parts(model: OmniModel, processor: OmniProcessor, tokens: list[tuple[str, int]]) -> list[Any]:
    """Drawn tokens -> text and media, in order. Start and end tokens are not text."""
    hidden_ids = {processor.end_token, *processor.start_tokens.values()}
    parts: list[Any] = []
    text: list[int] = []
    item: list[int] = []
    for mode, token in tokens:
        if mode == "text":
            text += [] if token in hidden_ids else [token]
            continue
        item.append(token)
        if model.decoders[mode].is_complete(item):
            parts += [processor.tokenizer.decode(text)] if text else []
            parts.append(model.decoders[mode].lm_generate(item))
            text, item = [], []
    return parts + ([processor.tokenizer.decode(text)] if text else [])
