"""Generation: text until a medium starts, then that decoder's tokens until it is complete, then text again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from omnitrain.data.packing.budget import pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import Token
from omnitrain.models.foundation.runner import EncodedMedia, Head
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput
from omnitrain.ops.device import to_device
from omnitrain.ops.noise import normals
from omnitrain.recipe import Sampling
from omnitrain.transformers_private import cache_argument

_ENCODED_TOKENS = 2**14  # of prompts whose media are encoded together

Uniform = Callable[[], torch.Tensor]  # -> float64 [batch] in [0, 1), fresh in every call
Sampler = Callable[[Uniform, torch.Tensor], torch.Tensor]  # logits [batch, classes] -> tokens [batch]


@dataclass
class Answer:
    """The answer to one prompt.

    Attributes:
        parts: in order: ``str``, ``PIL.Image`` or ``Waveform``.
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
class _Sequence:
    """An unfinished answer: the head that draws its next token, and its tokens so far."""

    writers: dict[int, str]  # start token -> decoder
    mode: str = "text"
    answer: Answer = field(default_factory=Answer)
    item: list[Token] = field(default_factory=list)

    def take(self, token: Token, end_token: int, is_complete: Callable[[str, list[Token]], bool]) -> None:
        self.answer.tokens.append((self.mode, token))
        if self.mode != "text":
            self.item.append(token)
            if is_complete(self.mode, self.item):
                self.mode, self.item = "text", []
        elif token == end_token:
            self.answer.is_finished = True
        else:
            self.mode = self.writers.get(token, "text")  # type: ignore[arg-type]  # text has ids


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
    numbers: Sequence[int] | None = None,
) -> list[Answer]:
    """Generate answers to prompts of any lengths in one batch; or one at a time if the model's own forward reads media.

    Each prompt has its own random numbers, which depend on ``seed`` and the prompt's number alone. So its answer does
    not depend on other prompts, nor on how prompts are divided into batches or over ranks.

    All ranks of a parallelized model must call it. Those that share the samples of a step (``tp``, ``cp``, ``ulysses``,
    ``pp``) have the same prompts, and all get their answers; others may have any prompts, or none. Ranks of sections
    have none, and encode for the others.

    Args:
        model: its modules in any modes, which are restored.
        processor: the model's processor; it has the end token and the start token of each modality.
        prompts: results of :meth:`OmniProcessor.prompt`.
        max_new_tokens: maximum length of an answer, text and media tokens together; the same on all ranks.
        sampling: ``text`` or a decoder's name -> how its tokens are sampled; greedy without an entry. With guidance, a
            second sequence runs beside each: the same tokens after :attr:`Sample.unconditional`.
        seed: seed of sampling, at least 0.
        use_cache: keep keys and values; without it every step runs the whole sequence (for tests).
        numbers: numbers of the prompts, at least 0; None: 0, 1, 2, ...

    Returns:
        One :class:`Answer` per prompt, without media that ``max_new_tokens`` cut short.

    Raises:
        UserError: the model hides its last hidden states, or its own forward reads a prompt with an input per token
            that is unknown for sampled tokens; or a prompt cannot be guided.
    """
    sampling = sampling or {}
    if is_guided(sampling):
        _require_guidable(model, prompts)
    numbers = range(len(prompts)) if numbers is None else numbers
    inference, answers = model.inference, dict[int, Answer]()
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        encoded = _encoded_batches(model, prompts, is_guided(sampling))
        if not inference.has_foundation:
            return []
        rounds = inference.peers.most({"batches": len(encoded)})["batches"]
        with inference.gathered(model):
            for batch in encoded + [_Batch([], [], [[]], [])] * (rounds - len(encoded)):
                uniform = _UniformStreams(seed, [numbers[place] for place in batch.places], model.device)
                made = _decode(model, processor, batch, max_new_tokens, sampling, uniform, use_cache)
                answers |= zip(batch.places, made, strict=True)
            tokens = [answer.tokens for answer in answers.values()]
            parts = inference.from_first(lambda: [_parts(model, processor, drawn) for drawn in tokens])
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    for answer, made_of in zip(answers.values(), parts, strict=True):
        answer.parts = made_of
    of_all = {place: answer for of_rank in inference.sharing.gather(answers) for place, answer in of_rank.items()}
    return [of_all[place] for place in range(len(prompts))]


def is_guided(sampling: Mapping[str, Sampling]) -> bool:
    """Return whether generation needs prompts without their condition (``processor.prompt(row, is_guided=True)``)."""
    return any(one.guidance != 1 for one in sampling.values())


def _require_guidable(model: OmniModel, prompts: Sequence[Sample]) -> None:
    if not model.config.condition_dropout:
        warnings.warn(
            "guidance compares with prompts without their condition, but this model was trained without "
            "data.condition_dropout, so it never saw such prompts",
            stacklevel=3,
        )
    for prompt in prompts:
        if prompt.unconditional is None:
            raise UserError(
                f"prompt {prompt.id!r} cannot be guided: make it with processor.prompt(row, is_guided=True)"
            )
        if prompt.is_alone:
            raise UserError(
                f"prompt {prompt.id!r} cannot be guided: {type(model.foundation).__name__} reads its media in its own "
                "forward, one prompt at a time; set guidance to 1"
            )


class _Batch(NamedTuple):
    """Prompts that run together.

    Attributes:
        places: their indices.
        samples: the rows, in the order of packs, in which towers encode many of them at once.
        copies: the row of each prompt, and with guidance a second row of each, without its condition.
        media: for each pack of rows, their lengths, and their media.
    """

    places: list[int]
    samples: list[Sample]
    copies: list[list[int]]
    media: list[tuple[Sequence[int], EncodedMedia]]


def _encoded_batches(model: OmniModel, prompts: Sequence[Sample], guided: bool) -> list[_Batch]:
    """Return the batches of this rank, with their media, after the ranks that share these prompts have divided them."""
    sharing = model.inference.sharing
    packs: list[Pack] = []
    batches: list[_Batch] = []
    wanted: list[range] = []  # the packs of each batch
    for rank in range(sharing.size):
        for places in _places(prompts, range(rank, len(prompts), sharing.size)):
            first, (samples, copies) = len(packs), _with_copies([prompts[place] for place in places], guided)
            packs += pack_all(samples, max([_ENCODED_TOKENS, *map(len, samples)]))
            if rank == sharing.rank:
                batches.append(_Batch(places, samples, copies, []))
                wanted.append(range(first, len(packs)))
    media = model.inference.encode(model, packs, [index for indices in wanted for index in indices])
    for batch, indices in zip(batches, wanted, strict=True):
        batch.media.extend((packs[index].info.lengths, media[index]) for index in indices if index in media)
    return batches


def _places(prompts: Sequence[Sample], places: Iterable[int]) -> list[list[int]]:
    """Return which of these prompts run together, in the order of packs."""
    order = sorted(places, key=lambda place: (len(prompts[place]), prompts[place].index))
    together = [place for place in order if not prompts[place].is_alone]
    return [together] * bool(together) + [[place] for place in order if prompts[place].is_alone]


def _decode(
    model: OmniModel,
    processor: OmniProcessor,
    batch: _Batch,
    max_new_tokens: int,
    sampling: dict[str, Sampling],
    uniform: _UniformStreams,
    use_cache: bool,
) -> list[Answer]:
    """Return the answers to the prompts of a batch, without parts."""
    writers = {processor.start_of(m, name): name for m, decoders in processor.writers.items() for name in decoders}
    sequences = [_Sequence(writers) for _ in batch.places]
    decoders = model.decoders
    heads = _Heads(model, sampling, uniform, batch.copies)
    step = _Foundation(model, batch, processor.end_token, use_cache)
    for _ in range(max_new_tokens):
        by_mode = _rows_by_mode(sequences)
        tokens, embeds = model.inference.from_first(partial(heads.draw, by_mode, sequences, *step.last()))
        next_tokens: list[Any] = [processor.end_token] * len(embeds)
        for mode, rows in by_mode:
            for row in rows:
                for copy in batch.copies:
                    next_tokens[copy[row]] = tokens[row] if mode == "text" else processor.end_token
                sequences[row].take(
                    tokens[row], processor.end_token, lambda name, item: decoders[name].is_complete(item)
                )
        if not model.inference.peers.any(any(not sequence.answer.is_finished for sequence in sequences)):
            break
        step.append(next_tokens, embeds)
    for sequence in sequences:
        sequence.answer.unfinished_item = None if sequence.mode == "text" else sequence.mode
    return [sequence.answer for sequence in sequences]


def _with_copies(prompts: Sequence[Sample], guided: bool) -> tuple[list[Sample], list[list[int]]]:
    """Return the batch, in the order of packs, and the row in it of each prompt, and of each without its condition."""
    samples = [*prompts, *(prompt.unconditional for prompt in prompts if guided and prompt.unconditional is not None)]
    order = sorted(range(len(samples)), key=lambda place: (len(samples[place]), samples[place].index))
    rows = [row for _, row in sorted(zip(order, range(len(order)), strict=True))]
    return [samples[place] for place in order], [rows[: len(prompts)], rows[len(prompts) :]][: 1 + guided]


class _Heads:
    """Draws the next tokens of sequences, and embeds them.

    ``copies``: of the sequences, the row of each in the batch; the second of two begins without the condition.
    """

    def __init__(
        self,
        model: OmniModel,
        sampling: dict[str, Sampling],
        uniform: _UniformStreams,
        copies: Sequence[Sequence[int]],
    ) -> None:
        self._decoders, self._text_embedding = model.decoders, model.foundation.get_input_embeddings()
        self._samplers = {name: _sampler(sampling.get(name, Sampling())) for name in ("text", *self._decoders)}
        self._settings, self._uniform, self._copies = sampling, uniform, copies

    def draw(
        self,
        by_mode: Sequence[tuple[str, list[int]]],
        sequences: Sequence[_Sequence],
        hidden: torch.Tensor,
        text_logits: torch.Tensor,
    ) -> tuple[dict[int, Token], torch.Tensor]:
        """Return sequence -> its next token, and embeddings ``[batch, hidden]``; zeros for finished sequences."""
        drawn: dict[int, Token] = {}
        size = (len(hidden), self._text_embedding.weight.size(1))
        embeds = hidden.new_zeros(size, dtype=self._text_embedding.weight.dtype)
        for mode, rows in by_mode:
            copies = torch.tensor([[copy[row] for row in rows] for copy in self._copies], device=hidden.device)
            read = copies.flatten() if self._sampling(mode).guidance != 1 else copies[0]
            allowed = [self._allowed(mode, sequences[row].item) for row in rows]
            draw = _Draw(self._sampling(mode).guidance, self._samplers[mode], self._uniform, rows, allowed)
            if mode == "text":
                tokens = draw(text_logits[read].float())
                rows_embeds = self._text_embedding(tokens)
            else:
                rows_embeds, tokens = self._decoders[mode].lm_embed(hidden[read], draw)
            embeds[copies] = rows_embeds[: len(rows)].to(embeds.dtype)
            drawn |= zip(rows, tokens[: len(rows)].tolist(), strict=True)
        return drawn, embeds

    def _allowed(self, mode: str, item: list[Token]) -> range | None:
        return None if mode == "text" else self._decoders[mode].next_classes(item, self._sampling(mode).size)

    def _sampling(self, mode: str) -> Sampling:
        return self._settings.get(mode, Sampling())


class _Draw:
    """See :class:`~omnitrain.models.components.protocols.Draw`."""

    def __init__(
        self,
        guidance: float,
        sampler: Sampler,
        uniform: _UniformStreams,
        rows: Sequence[int],
        allowed: Sequence[range | None],
    ) -> None:
        """``rows``: the sequences; ``allowed``: the classes that each of them may get; None: any."""
        self._guidance, self._sampler, self._uniform = guidance, sampler, uniform
        self._rows, self._allowed = rows, allowed

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        copies, logits = len(logits) // len(self._rows), self.guided(logits)
        for of_row, classes in zip(logits, self._allowed, strict=True):
            if classes is not None:
                of_row[: classes.start], of_row[classes.stop :] = -torch.inf, -torch.inf
        return self._sampler(partial(self._uniform.next, self._rows), logits).repeat(copies)

    def guided(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) == len(self._rows):
            return values
        conditional, unconditional = values.chunk(2)
        return unconditional + self._guidance * (conditional - unconditional)

    def noise(self, width: int) -> torch.Tensor:
        return to_device(normals(self._uniform.seeds(self._rows), width), self._uniform.device)


def _rows_by_mode(sequences: Sequence[_Sequence]) -> list[tuple[str, list[int]]]:
    """Return the unfinished rows by the head that draws their next token."""
    rows: dict[str, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if not sequence.answer.is_finished:
            rows.setdefault(sequence.mode, []).append(row)
    return sorted(rows.items())


@dataclass(frozen=True)
class _Cells:
    """Features that replace token embeddings in a batch."""

    prompts: torch.Tensor  # ``[n]`` int64, which row of the batch; on the host, as ``columns``
    columns: torch.Tensor  # ``[n]`` int64
    embeds: torch.Tensor  # ``[n, hidden]``


class _Foundation:
    """The foundation over a growing, left-padded batch; the state is a KV cache or the whole sequence.

    A rank without prompts has a batch of one idle row.
    """

    def __init__(self, model: OmniModel, batch: _Batch, text_token: int, use_cache: bool) -> None:
        """Take the rows and media of a batch; ``text_token`` stands where no token counts."""
        self.model, self.runner = model, model.runner
        packs = [Pack.from_samples([prompt]).to(model.device) for prompt in batch.samples or [idle_prompt(model)]]
        longest = max(pack.num_tokens for pack in packs)
        pads = [longest - pack.num_tokens for pack in packs]

        def left_padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
            padded = [nn.functional.pad(row, (pad, 0), value=value) for row, pad in zip(rows, pads, strict=True)]
            return torch.cat(padded, dim=-2)

        self.input_ids = left_padded([pack.input_ids for pack in packs], text_token)
        self.mask = left_padded([torch.ones_like(pack.input_ids) for pack in packs], 0)
        self.position_ids = left_padded([pack.position_ids for pack in packs], 0)
        names = packs[0].token_inputs
        self.token_inputs = {name: left_padded([pack.token_inputs[name] for pack in packs], 0) for name in names}
        self.placeholders = set(self.runner.native.token_ids.values())
        self.text_token = text_token
        self.given = packs[0].forward_inputs  # of a prompt alone
        _require_no_rows(self.given, longest)
        self.inserted: list[_Cells] = []  # cells of the columns that the next forward runs over
        self._insert(batch.media, torch.tensor(pads))
        self.native = self.runner.one_batch([of_pack.native for _, of_pack in batch.media])
        self.uses_cache = use_cache and (not model.inference.is_cut or _can_fill_up(model))
        self.caches: dict[int, DynamicCache] = {}  # first block of a stage -> its cache
        self.seen = 0  # columns that the caches hold

    def _insert(self, media: Sequence[tuple[Sequence[int], EncodedMedia]], pads: torch.Tensor) -> None:
        """Insert the features of encoders and decoders."""
        first = 0  # prompt of the pack
        for of_prompts, of_pack in media:
            lengths = torch.tensor(of_prompts)
            ends = lengths.cumsum(0)
            for positions, embeds in of_pack.inserted:
                sample = torch.bucketize(positions, ends, right=True)
                columns = positions - (ends - lengths)[sample] + pads[first + sample]
                self.inserted.append(_Cells(first + sample, columns, embeds))
            for positions, ids in of_pack.words:
                sample = torch.bucketize(positions, ends, right=True)
                columns = positions - (ends - lengths)[sample] + pads[first + sample]
                self.input_ids[first + sample, columns] = ids.to(self.input_ids.device)
            first += len(lengths)

    def last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states ``[batch, hidden]`` and text logits ``[batch, vocabulary]`` of the last position.

        Raises:
            UserError: the model hides its last hidden states.
        """
        states: list[torch.Tensor] = []

        def head(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
            states.append(hidden[:, -1].clone())  # of one position alone, where other ranks get it
            return lm_head.forward(hidden[:, -1:])

        def result() -> tuple[torch.Tensor, torch.Tensor]:
            if not states:
                raise UserError(
                    f"{type(self.model.foundation).__name__} hides its last hidden states; it cannot generate here"
                )
            return states[0], output.logits[:, -1]

        output = self.model.inference.run(partial(self._run, head))
        if self.uses_cache:
            self.seen = self.input_ids.size(1)
            self.inserted.clear()
        return self.model.inference.from_last(result)

    def _run(self, head: Head, stage: StageInput | None) -> Any:
        """Run a stage, or the whole model, over the columns that its cache does not hold."""
        columns = slice(self.seen, None)
        width = self.input_ids.size(1) - self.seen
        inserted = [(cells.prompts * width + cells.columns - self.seen, cells.embeds) for cells in self.inserted]
        cache = self._cache_of(stage)
        output = self.runner.run(
            self.input_ids[:, columns],
            head=head,
            media=EncodedMedia(self.native if self.seen == 0 else {}, inserted),
            arguments={
                **self._places(columns),
                "attention_mask": self.mask,
                cache_argument(self.model.foundation): cache,
                "use_cache": cache is not None,
                **{name: values[:, columns] for name, values in self.token_inputs.items()},
            },
            stage=None if stage is None else self.model.stage_of(stage),
        )
        if stage is None:
            return output
        if cache is not None:
            _fill_up(cache, self.input_ids)
        return output if stage.span.is_last else (output,)

    def _cache_of(self, stage: StageInput | None) -> DynamicCache | None:
        if not self.uses_cache:
            return None
        first = 0 if stage is None else stage.span.start
        if first not in self.caches:
            self.caches[first] = DynamicCache(config=self.model.foundation.config)
        return self.caches[first]

    def _places(self, columns: slice) -> dict[str, torch.Tensor]:
        """Return position ids; if the model's own forward reads the prompt, its inputs instead."""
        if not self.given:
            return {"position_ids": self.position_ids[..., columns]}
        return self.given if self.seen == 0 else {}

    def append(self, tokens: list[int], embeds: torch.Tensor) -> None:
        """Add one position: ``tokens`` ``[batch]`` whose rows are ``embeds`` ``[batch, hidden]``."""
        # A drawn placeholder is text; it must not take a feature of the next prompt's media.
        tokens = [self.text_token if token in self.placeholders else token for token in tokens]
        everyone = torch.arange(len(embeds))
        self.inserted.append(_Cells(everyone, torch.full_like(everyone, self.input_ids.size(1)), embeds))
        self.input_ids = torch.cat([self.input_ids, self.input_ids.new_tensor(tokens)[:, None]], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        largest = self.position_ids.amax(dim=-1, keepdim=True)
        if self.position_ids.ndim == 3:  # every axis continues after its largest position
            largest = largest.amax(dim=0, keepdim=True).expand_as(largest)
        self.position_ids = torch.cat([self.position_ids, largest + 1], dim=-1)
        kind = int(self.runner.native.extras.marks_answer)
        self.token_inputs = {
            name: torch.cat([values, values.new_full((len(values), 1), kind)], dim=1)
            for name, values in self.token_inputs.items()
        }


def _can_fill_up(model: OmniModel) -> bool:
    """Whether :func:`_fill_up` works: layers with a state other than keys and values have no length."""
    layers = DynamicCache(config=model.foundation.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _fill_up(cache: DynamicCache, input_ids: torch.Tensor) -> None:
    """Give the layers of other stages the length of ``input_ids`` ``[batch, T]``: masks are made by it.

    Nothing reads their keys and values, which have one number per token.
    """
    for layer in cache.layers:
        if missing := input_ids.size(1) - layer.get_seq_length():
            empty = input_ids.new_zeros(1, 1, missing, 1)
            layer.update(empty, empty)


def _require_no_rows(given: Mapping[str, torch.Tensor], length: int) -> None:
    """Raise if an input has a value per token (such as the media that it sees), unknown for drawn tokens."""
    for name, value in given.items():
        if value.ndim > 2 and not value.is_floating_point() and value.shape[:2] == (1, length):
            raise UserError(
                f"the foundation's own forward reads this prompt, with {name!r} for each token of it; answers to such "
                "prompts cannot be generated here: save the model, and use generate of transformers"
            )


class _UniformStreams:
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
        passed = uniform().to(summed.device) * summed[:, -1]
        return torch.searchsorted(summed, passed[:, None], right=True)[:, 0].clamp(max=logits.size(-1) - 1)

    return draw


def _parts(model: OmniModel, processor: OmniProcessor, tokens: list[tuple[str, Token]]) -> list[Any]:
    """Turn drawn tokens into text and media, in order, without start and end tokens."""
    hidden_ids = {processor.end_token, *processor.start_tokens.values()}
    parts: list[Any] = []
    text: list[Token] = []
    item: list[Token] = []
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
