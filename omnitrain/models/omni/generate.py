"""Generation: text until a medium starts, then that decoder's tokens until it is complete, then text again."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from omnitrain.data.packing.budget import pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import MediaWriter
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.runner import Head
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.heads import Answer, Drawn, GeneratedSequence, Heads, UniformStreams, turn_of
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput
from omnitrain.models.omni.writers import WORDS, parts_of, places_in_grids, start_tokens, writers_of
from omnitrain.ops.attention.packed_context import seeing_blocks
from omnitrain.ops.host_values import to_device
from omnitrain.peers import all_or_raise
from omnitrain.recipe import Sampling
from omnitrain.transformers_private import cache_argument

_ENCODED_TOKENS = 2**14  # of prompts whose media are encoded together


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
        sampling: ``text`` or a decoder's name -> how its tokens are sampled; greedy without an entry. The size of
            ``text`` is that of images which the foundation writes as words of its vocabulary. With guidance, a
            second sequence runs beside each: the same tokens after :attr:`Sample.unconditional`.
        seed: seed of sampling, at least 0.
        use_cache: keep keys and values; without it every step runs the whole sequence (for tests).
        numbers: numbers of the prompts, at least 0; None: 0, 1, 2, ...

    Returns:
        One :class:`Answer` per prompt, without media that ``max_new_tokens`` cut short.

    Raises:
        UserError: the model hides its last hidden states, or its own forward reads a prompt with an input per token
            that is unknown for sampled tokens; or a prompt cannot be guided. For a prompt of any rank, on all ranks.
    """
    sampling = sampling or {}
    numbers = range(len(prompts)) if numbers is None else numbers
    inference, answers = model.inference, dict[int, Answer]()
    all_or_raise(inference.everyone, partial(_require_answerable, model, prompts, is_guided(sampling)))
    writers = writers_of(model, processor, sampling["text"].size if "text" in sampling else None)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        encoded = _encoded_batches(model, prompts, is_guided(sampling))
        if not inference.has_foundation:
            return []
        rounds = inference.peers.most({"batches": len(encoded)})["batches"]
        with inference.gathered(model):
            for batch in encoded + [_Batch([], [], [[]], [])] * (rounds - len(encoded)):
                uniform = UniformStreams(seed, [numbers[place] for place in batch.places], model.device)
                made = _decode(model, processor, writers, batch, max_new_tokens, sampling, uniform, use_cache)
                answers |= zip(batch.places, made, strict=True)
            tokens = [answer.tokens for answer in answers.values()]
            parts = inference.from_first(lambda: [parts_of(writers, processor, drawn) for drawn in tokens])
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


def _require_answerable(model: OmniModel, prompts: Sequence[Sample], guided: bool) -> None:
    model.inference.require_heads(model.decoder_names)
    if guided and not model.config.condition_dropout:
        warnings.warn(
            "guidance compares with prompts without their condition, but this model was trained without "
            "data.condition_dropout, so it never saw such prompts",
            stacklevel=4,
        )
    for prompt in prompts:
        if guided and prompt.unconditional is None:
            raise UserError(
                f"prompt {prompt.id!r} cannot be guided: make it with processor.prompt(row, is_guided=True)"
            )
        if guided and prompt.is_alone:
            raise UserError(
                f"prompt {prompt.id!r} cannot be guided: {type(model.foundation).__name__} reads its media in its own "
                "forward, one prompt at a time; set guidance to 1"
            )
        # Such as which media each token sees: unknown for drawn tokens.
        of_tokens = {
            name
            for name, value in prompt.forward_inputs.items()
            if value.ndim > 2 and value.dtype.kind != "f" and value.shape[:2] == (1, len(prompt))
        }
        if of_tokens:
            raise UserError(
                f"the foundation's own forward reads prompt {prompt.id!r}, with {min(of_tokens)!r} for each token of "
                "it; answers to such prompts cannot be generated here: save the model, and use generate of transformers"
            )


class _Batch(NamedTuple):
    """Prompts that run together.

    Attributes:
        places: their indices.
        samples: the rows, in the order of packs, in which towers encode many of them at once.
        copies: the row of each prompt, and with guidance a second row of each, without its condition.
        media: the packs of rows, encoded.
    """

    places: list[int]
    samples: list[Sample]
    copies: list[list[int]]
    media: list[EncodedPack]


def _encoded_batches(model: OmniModel, prompts: Sequence[Sample], guided: bool) -> list[_Batch]:
    """Return the batches of this rank, with their media, after the ranks that share these prompts have divided them."""
    sharing = model.inference.sharing
    packs: list[Pack] = []
    batches: list[_Batch] = []
    wanted: list[range] = []  # the packs of each batch
    for rank in range(sharing.size):
        for places in _places(model, prompts, range(rank, len(prompts), sharing.size)):
            first, (samples, copies) = len(packs), _with_copies([prompts[place] for place in places], guided)
            packs += pack_all(samples, max([_ENCODED_TOKENS, *map(len, samples)]))
            if rank == sharing.rank:
                batches.append(_Batch(places, samples, copies, []))
                wanted.append(range(first, len(packs)))
    media = model.inference.encode(model, packs, [index for indices in wanted for index in indices])
    for batch, indices in zip(batches, wanted, strict=True):
        batch.media.extend(media[index] for index in indices if index in media)
    return batches


def _places(model: OmniModel, prompts: Sequence[Sample], places: Iterable[int]) -> list[list[int]]:
    """Return which of these prompts run together, in the order of packs."""
    # While a row waits it has columns that are no tokens, which a window would count.
    layers = DynamicCache(config=model.foundation.config).layers if _blocks(model) else ()
    apart = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
    order = sorted(places, key=lambda place: (len(prompts[place]), prompts[place].index))
    alone = [place for place in order if apart or prompts[place].is_alone]
    together = [place for place in order if place not in alone]
    return [together] * bool(together) + [[place] for place in alone]


def _decode(
    model: OmniModel,
    processor: OmniProcessor,
    writers: Mapping[str, MediaWriter],
    batch: _Batch,
    max_new_tokens: int,
    sampling: dict[str, Sampling],
    uniform: UniformStreams,
    use_cache: bool,
) -> list[Answer]:
    """Return the answers to the prompts of a batch, without parts."""
    starts, end_token = start_tokens(processor, writers), processor.end_token
    sequences = [GeneratedSequence(starts, max_new_tokens) for _ in batch.places]
    heads, blocks = Heads(model, writers, sampling, uniform, batch.copies), _blocks(model)
    foundation = _Foundation(model, batch, end_token, use_cache)
    grid_positions = cache(processor.renderer.grid_positions)
    turn: list[tuple[str, list[int]]] | None = None  # it goes on after another forward
    columns: _Columns | None = None
    while model.inference.peers.any(any(not sequence.is_done for sequence in sequences)):
        if columns is not None:
            foundation.append(columns)
        states = foundation.last()
        by_mode = turn or turn_of(sequences, blocks)
        drawn = model.inference.from_first(partial(heads.draw, by_mode, sequences, *states))
        turn = by_mode if drawn.tokens is None else None
        places = places_in_grids(grid_positions, writers, by_mode, sequences, drawn.embeds.size(1))
        columns = _columns(by_mode, drawn, batch.copies, blocks, end_token, places)
        for row, tokens in (drawn.tokens or {}).items():
            sequences[row].take(tokens, end_token, lambda name, item: writers[name].is_complete(item))
    for sequence in sequences:
        sequence.answer.unfinished_item = None if sequence.mode == "text" else sequence.mode
    return [sequence.answer for sequence in sequences]


def _blocks(model: OmniModel) -> set[str]:
    """Return the decoders that draw an item as a whole."""
    return {name for name, decoder in model.decoders.items() if decoder.adapter().is_block}


@dataclass(frozen=True)
class _Columns:
    """Tokens that a batch gets: ids ``[batch]`` of the last one, of the other ones any, and all ``embeds``.

    Attributes:
        rows: ``[n]`` int64, those that get tokens, if others wait.
        keeps: whether the batch has these tokens from then on; else they are for one forward.
        places: of rows that write media in grids, see :func:`places_in_grids`.
    """

    ids: list[int]
    embeds: torch.Tensor
    rows: torch.Tensor | None
    keeps: bool
    places: dict[int, torch.Tensor]


def _columns(
    turn: Sequence[tuple[str, list[int]]],
    drawn: Drawn,
    copies: Sequence[Sequence[int]],
    blocks: Collection[str],
    end_token: int,
    places: Mapping[int, torch.Tensor],
) -> _Columns:
    ids: list[Any] = [end_token] * len(drawn.embeds)
    rows: list[int] = []
    for mode, of_mode in turn:
        for row, of_copies in product(of_mode, copies):
            if mode in blocks:
                rows.append(of_copies[row])
            elif mode in ("text", WORDS) and drawn.tokens is not None:
                (ids[of_copies[row]],) = drawn.tokens[row]
    by_row = {of_copies[row]: place for row, place in places.items() for of_copies in copies}
    of_some = to_device(torch.tensor(rows), drawn.embeds.device) if rows else None
    return _Columns(ids, drawn.embeds, of_some, drawn.tokens is not None, by_row)


def _with_copies(prompts: Sequence[Sample], guided: bool) -> tuple[list[Sample], list[list[int]]]:
    """Return the batch, in the order of packs, and the row in it of each prompt, and of each without its condition."""
    samples = [*prompts, *(prompt.unconditional for prompt in prompts if guided and prompt.unconditional is not None)]
    order = sorted(range(len(samples)), key=lambda place: (len(samples[place]), samples[place].index))
    rows = [row for _, row in sorted(zip(order, range(len(order)), strict=True))]
    return [samples[place] for place in order], [rows[: len(prompts)], rows[len(prompts) :]][: 1 + guided]


@dataclass(frozen=True)
class _Cells:
    """Features that replace token embeddings in a batch."""

    prompts: torch.Tensor  # ``[n]`` int64, which row of the batch; on the host, as ``columns``
    columns: torch.Tensor  # ``[n]`` int64
    embeds: torch.Tensor  # ``[n, hidden]``


def _block_ids(pack: Pack) -> torch.Tensor:
    return torch.zeros_like(pack.input_ids) if pack.block_ids is None else pack.block_ids


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
        self.inserted: list[_Cells] = []  # cells of the columns that the next forward runs over
        self._insert(batch.media, torch.tensor(pads))
        self.native = self.runner.one_batch([of_pack.native for of_pack in batch.media])
        # Of stages, layers with another state have no length to fill up.
        self.uses_cache = use_cache and (not model.inference.is_cut or self.runner.has_keys_alone)
        self.caches: dict[int, DynamicCache] = {}  # first block of a stage -> its cache
        self.seen = 0  # columns that the caches hold
        self.block_ids = left_padded([_block_ids(pack) for pack in packs], 0)
        self.has_blocks = bool(self.block_ids.any())
        # Of the next column, ``[batch, 1]`` or ``[axes, batch, 1]``. After a film, earlier ones may be larger.
        self.next = self.position_ids[..., -1:] + 1
        if self.next.ndim == 3:  # all axes continue after the largest
            self.next = self.next.amax(dim=0, keepdim=True).expand_as(self.next)
        self.added: _Columns | None = None  # the columns that the next forward is for
        self.states: tuple[torch.Tensor, torch.Tensor] | None = None

    def _insert(self, media: Sequence[EncodedPack], pads: torch.Tensor) -> None:
        """Insert the features of encoders and decoders."""
        first = 0  # prompt of the pack
        for of_pack in media:
            lengths = torch.tensor(of_pack.pack.info.lengths)
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
        """Return hidden states ``[batch, n, hidden]`` and text logits ``[batch, vocabulary]``, of the last position.

        After columns that are not kept, of these. Rows that waited have the states that they had before.

        Raises:
            UserError: the model hides its last hidden states.
        """
        added = self.added
        if added is not None and not added.keeps:
            # Updates of a cache make new tensors.
            caches = {first: [copy(layer) for layer in cache.layers] for first, cache in self.caches.items()}
            found = self._forward(added.embeds.size(1))
            self._drop(added.embeds.size(1), caches)
            return found
        found = self._forward(1)
        if added is not None and added.rows is not None and self.states is not None:
            found = _replaced(self.states[0], found[0], added.rows), _replaced(self.states[1], found[1], added.rows)
        self.states = found
        return found

    def _forward(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run over the columns that no cache holds; return the states of the last ``width``, and the last logits."""
        states: list[torch.Tensor] = []

        def head(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
            states.append(hidden[:, -width:].clone())  # of few positions alone, where other ranks get it
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

    def _drop(self, width: int, caches: Mapping[int, list[Any]]) -> None:
        """Drop the last columns; ``caches``: the layers without them."""
        for first, layers in caches.items():
            self.caches[first].layers = layers
        kept = slice(0, self.input_ids.size(1) - width)
        self.seen = min(self.seen, kept.stop)
        self.inserted = self.inserted[:-1]
        self.input_ids, self.mask, self.block_ids = self.input_ids[:, kept], self.mask[:, kept], self.block_ids[:, kept]
        self.position_ids = self.position_ids[..., kept]
        self.token_inputs = {name: values[:, kept] for name, values in self.token_inputs.items()}

    def _run(self, head: Head, stage: StageInput | None) -> Any:
        """Run a stage, or the whole model, over the columns that its cache does not hold."""
        columns = slice(self.seen, None)
        width = self.input_ids.size(1) - self.seen
        inserted = [(cells.prompts * width + cells.columns - self.seen, cells.embeds) for cells in self.inserted]
        cache = self._cache_of(stage)
        with seeing_blocks(self.block_ids if self.has_blocks else None):
            output = self.runner.run(
                self.input_ids[:, columns],
                head=head,
                native=self.native if self.seen == 0 else {},
                inserted=inserted,
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

    def append(self, columns: _Columns) -> None:
        """Add columns. They are no tokens of rows that wait: nothing sees them, and they have no positions."""
        self.added, start = columns, self.input_ids.size(1)
        size, width = columns.embeds.shape[:2]
        # A drawn placeholder is text; it must not take a feature of the next prompt's media.
        ids = [self.text_token if token in self.placeholders else token for token in columns.ids]
        everyone = torch.arange(size).repeat_interleave(width)
        self.inserted.append(_Cells(everyone, start + torch.arange(width).repeat(size), columns.embeds.flatten(0, 1)))
        real = self.mask.new_ones(size, width)
        if columns.rows is not None:
            self.has_blocks = True
            real = torch.zeros_like(real)
            real[columns.rows] = 1
        drawn = to_device(torch.tensor(ids), self.input_ids.device)
        self.input_ids = torch.cat([self.input_ids, drawn[:, None].expand(-1, width)], dim=1)
        self.mask = torch.cat([self.mask, real], dim=1)
        self.block_ids = torch.cat([self.block_ids, real * (0 if columns.rows is None else start + 1)], dim=1)
        self.position_ids = torch.cat([self.position_ids, self._positions_of(columns, real)], dim=-1)
        kind = int(self.runner.native.extras.marks_answer)
        self.token_inputs = {
            name: torch.cat([values, values.new_full((size, width), kind)], dim=1)
            for name, values in self.token_inputs.items()
        }

    def _positions_of(self, columns: _Columns, real: torch.Tensor) -> torch.Tensor:
        """Position ids of new columns: of a text, or of places in a grid; ``real``: ``[batch, width]``, 1 or 0."""
        positions = self.next - 1 + nn.functional.pad(real, (0, 1), value=1).cumsum(dim=-1)
        for row, place in columns.places.items():
            positions[:, row] = self.next[:, row] + to_device(place, positions.device)
        if columns.keeps:
            self.next = positions[..., -1:]
        return positions[..., :-1]


def _replaced(old: torch.Tensor, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``old`` with ``rows`` of ``new``."""
    result = old.clone()
    result[rows] = new[rows]
    return result


def _fill_up(cache: DynamicCache, input_ids: torch.Tensor) -> None:
    """Give the layers of other stages the length of ``input_ids`` ``[batch, T]``: masks are made by it.

    Nothing reads their keys and values, which have one number per token.
    """
    for layer in cache.layers:
        if missing := input_ids.size(1) - layer.get_seq_length():
            empty = input_ids.new_zeros(1, 1, missing, 1)
            layer.update(empty, empty)
