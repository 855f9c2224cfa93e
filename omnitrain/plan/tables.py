"""The small table of int64 words that the ranks exchange for each global batch: the samples and items of every rank.

A rank's words are ``[num_words, micro-batches, samples, shapes, items]``, then samples per micro-batch, loss counts per
micro-batch and loss, the length of every sample, the key of every shape, and five words per item:
``micro-batch * media + medium``, tokens, cost, elements, index of its shape. Samples and items are sorted by
micro-batch, and items by medium within a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnitrain.plan.placement import Topology
from omnitrain.plan.ragged import ranges

_HEADER = 5  # words
_ITEM = 5  # words


@dataclass(frozen=True)
class ItemFacts:
    """The facts about an image, sound or video that planning needs."""

    num_tokens: int  # its tokens in the sequence, one for each of its features
    cost: int  # cost of encoding it, in any unit that all items of the component share
    shape: int = 0  # key from :func:`shape_key`; items with the same key may be encoded in one call
    elements: int = 0  # number of its input elements, which a call may limit
    # items of this pack with the same key must be encoded by one rank, as their results depend on each other (batch
    # normalization)
    together: bool = False

    @property
    def call_key(self) -> int:
        """The key in a table: of ``shape`` and ``together``."""
        return 2 * self.shape + self.together


@dataclass(frozen=True)
class MicroBatchFacts:
    """The samples that a rank drew for one micro-batch."""

    counts: Mapping[str, int] = field(default_factory=dict)  # loss name -> number of predicted tokens; 0 if absent
    lengths: tuple[int, ...] = ()  # tokens of each sample
    # name of the media -> the items, in the order in which the pack needs their features
    items: Mapping[str, tuple[ItemFacts, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepTables:
    """The tables of all ranks. ``M`` is the largest number of micro-batches of any rank.

    Items are numbered across all ranks: by owner, then micro-batch, medium, and order in the pack.
    """

    num_drawn: np.ndarray  # ``[ranks]`` int64, micro-batches that each rank drew
    counts: np.ndarray  # ``[M, losses, ranks]`` int64, predicted tokens
    num_samples: np.ndarray  # ``[M, ranks]`` int64, samples drawn by each rank
    tokens: np.ndarray  # ``[M, ranks]`` int64, sum of the lengths of the samples
    squares: np.ndarray  # ``[M, ranks]`` int64, sum of the squares of these lengths
    owner: np.ndarray  # ``[items]`` int64, ascending: the rank that listed the item
    slot: np.ndarray  # ``[items]`` int64, ``micro-batch * media + medium``, ascending for each owner
    item_tokens: np.ndarray  # ``[items]`` int64, tokens of each item
    cost: np.ndarray  # ``[items]`` int64
    elements: np.ndarray  # ``[items]`` int64, input elements
    shape: np.ndarray  # ``[items]`` int64, index of the shape key among all distinct keys
    together: np.ndarray  # ``[items]`` bool, whether items of one owner, slot and shape must be encoded by one rank


def shape_key(*parts: object) -> int:
    """Hash ``parts`` (names, dtypes, trailing shapes), equal for items that can be stacked, on all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # a table has twice as much, which fits a positive int64


def encode_table(topology: Topology, batches: Sequence[MicroBatchFacts]) -> np.ndarray:
    """Encode the packs that a rank drew, ``[words]`` int64; ValueError: the topology lacks a loss or media."""
    media = topology.media
    for batch in batches:
        if unknown := sorted((batch.counts.keys() - {*topology.losses}) | (batch.items.keys() - {*media})):
            raise ValueError(
                f"found {unknown}; expected losses of {list(topology.losses)} and media of {sorted(media)}"
            )
    lengths = [length for batch in batches for length in batch.lengths]
    shapes: dict[int, int] = {}
    of_slots = [batch.items.get(medium, ()) for batch in batches for medium in media]
    items = [
        (slot, item.num_tokens, item.cost, item.elements, shapes.setdefault(item.call_key, len(shapes)))
        for slot, of_slot in enumerate(of_slots)
        for item in of_slot
    ]
    words = [0, len(batches), len(lengths), len(shapes), len(items)]
    words += [len(batch.lengths) for batch in batches]
    words += [batch.counts.get(loss, 0) for batch in batches for loss in topology.losses]
    columns = (words, lengths, [*shapes], items)
    table = np.concatenate([np.array(column, dtype=np.int64).ravel() for column in columns])
    table[0] = table.size
    if table.min() < 0:
        raise ValueError(f"counts, lengths, tokens and costs must not be a negative number, but one is {table.min()}")
    return table


def padded(table: np.ndarray, capacity: int) -> np.ndarray:
    """Cut or zero-pad ``table`` to ``capacity`` words, so that one all-gather of equal sizes carries it."""
    words = np.zeros(capacity, dtype=np.int64)
    words[: table.size] = table[:capacity]
    return words


def needed_capacity(gathered: Sequence[np.ndarray] | np.ndarray) -> int:
    """Return the words of the longest table. If they exceed the capacity, all ranks gather again with more."""
    return max(int(words[0]) for words in gathered)


def decode_tables(topology: Topology, gathered: Sequence[np.ndarray] | np.ndarray) -> StepTables:
    """Decode the tables of all ranks, padded or not, that were encoded with ``topology``: ``[words]`` int64 each.

    Raises ValueError: the number of tables is not the number of ranks, or a table did not fit its capacity.
    """
    if len(gathered) != topology.world_size:
        raise ValueError(f"found tables of {len(gathered)} ranks; expected {topology.world_size}")
    ranks, num_losses = topology.world_size, len(topology.losses)
    header, (per_batch, per_loss, lengths, shapes, items) = _columns(gathered, num_losses)
    _, batches, _, keys, num_items = header.T
    most = int(batches.max())
    rank_of_batch = np.repeat(np.arange(ranks), batches)
    cell = ranges(np.zeros_like(batches), batches) * ranks + rank_of_batch  # micro-batch * ranks + rank
    num_samples = np.zeros(most * ranks, dtype=np.int64)
    num_samples[cell] = per_batch
    counts = np.zeros((most * ranks, num_losses), dtype=np.int64)
    counts[cell] = per_loss.reshape(len(cell), num_losses)
    of_samples = np.repeat(cell, per_batch)
    tokens = np.bincount(of_samples, lengths, most * ranks).astype(np.int64)
    squares = np.bincount(of_samples, lengths.astype(np.float64) ** 2, most * ranks).astype(np.int64)
    slot, item_tokens, cost, elements, shape = np.ascontiguousarray(items.reshape(-1, _ITEM).T)
    owner = np.repeat(np.arange(ranks), num_items)
    keys_of_all, shape_index = np.unique(shapes, return_inverse=True)
    first_shape = np.cumsum(keys) - keys
    shape = shape_index[first_shape[owner] + shape] if len(shape_index) else shape
    return StepTables(
        num_drawn=batches,
        counts=np.ascontiguousarray(counts.reshape(most, ranks, num_losses).transpose(0, 2, 1)),
        num_samples=num_samples.reshape(most, ranks),
        tokens=tokens.reshape(most, ranks),
        squares=squares.reshape(most, ranks),
        owner=owner,
        slot=slot,
        item_tokens=item_tokens,
        cost=cost,
        elements=elements,
        shape=shape,
        together=keys_of_all[shape] % 2 == 1 if len(shape) else np.zeros(0, dtype=bool),
    )


def _columns(gathered: Sequence[np.ndarray] | np.ndarray, num_losses: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the headers, ``[ranks, _HEADER]``, and the columns after them: of each, the parts of all ranks."""
    found = np.fromiter(map(len, gathered), np.int64, len(gathered))
    words = gathered.ravel() if isinstance(gathered, np.ndarray) else np.concatenate(gathered)
    begins = np.cumsum(found) - found
    header = words[begins[:, None] + np.arange(_HEADER)]
    if (cut := np.flatnonzero(header[:, 0] > found)).size:
        rank = cut[0]
        raise ValueError(
            f"rank {rank}: found {found[rank]} of {header[rank, 0]} words; gather again with that capacity"
        )
    _, batches, samples, keys, num_items = header.T
    sizes = np.stack([batches, batches * num_losses, samples, keys, num_items * _ITEM])
    first = begins + _HEADER + np.cumsum(sizes, axis=0) - sizes
    return header, [words[ranges(*parts)] for parts in zip(first, sizes, strict=True)]
