"""The small table that the ranks exchange for each global batch: what every rank drew, in int64 words.

A rank's words are ``[num_words, has_ended, micro-batches, samples, shapes, items]``, then samples per micro-batch, loss
counts per micro-batch and loss, the length of every sample, the key of every shape, and four words per item:
``micro-batch * ports + port``, rows, cost, index of its shape. Samples and items go micro-batch by micro-batch, items
port by port within one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnitrain.plan.topology import Topology

_HEADER = 6  # words
_ITEM = 4  # words


@dataclass(frozen=True)
class ItemFacts:
    """An image, clip or video, as far as planning needs to know it.

    Attributes:
        rows: that the component makes of it.
        cost: of encoding it, in any unit that all items of the component share.
        shape: key of :func:`shape_key`; items of one key may be encoded in one call.
    """

    rows: int
    cost: int
    shape: int = 0


@dataclass(frozen=True)
class MicroBatchFacts:
    """What a rank drew for one micro-batch.

    Attributes:
        counts: loss name -> number of predicted tokens; absent: 0.
        lengths: tokens of each sample.
        items: port name -> its items, in the order in which the pack needs their rows.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    items: Mapping[str, tuple[ItemFacts, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankFacts:
    """What a rank drew for one global batch.

    Attributes:
        micro_batches: in order.
        has_ended: this rank's data end with this batch.
    """

    micro_batches: tuple[MicroBatchFacts, ...] = ()
    has_ended: bool = False


@dataclass(frozen=True)
class StepTables:
    """The tables of all ranks, side by side. ``M``: micro-batches of the rank that has most of them.

    Attributes:
        has_ended: ``[ranks]`` bool.
        num_micro_batches: ``[ranks]`` int64, that each rank drew.
        counts: ``[M, losses, ranks]`` int64.
        num_samples: ``[M, ranks]`` int64.
        tokens: ``[M, ranks]`` int64, sum of the lengths of the samples.
        owner: ``[items]`` int64, ascending: the rank that listed the item.
        slot: ``[items]`` int64, ``micro-batch * ports + port``, ascending for each owner.
        rows: ``[items]`` int64.
        cost: ``[items]`` int64.
        shape: ``[items]`` int64, equal numbers for equal keys, from 0.
    """

    has_ended: np.ndarray
    num_micro_batches: np.ndarray
    counts: np.ndarray
    num_samples: np.ndarray
    tokens: np.ndarray
    owner: np.ndarray
    slot: np.ndarray
    rows: np.ndarray
    cost: np.ndarray
    shape: np.ndarray


def shape_key(*parts: object) -> int:
    """A number for what must agree for two items to be stacked (names, dtypes, trailing shapes): equal on all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits a positive int64


def encode_table(topology: Topology, facts: RankFacts) -> np.ndarray:
    """A rank's table as ``[words]`` int64.

    Raises:
        ValueError: a loss or port that the topology does not have, or a negative number.
    """
    _check_names(topology, facts)
    batches, ports = facts.micro_batches, [port.name for port in topology.ports]
    lengths = [length for batch in batches for length in batch.lengths]
    shapes: dict[int, int] = {}
    items = [
        (index * len(ports) + number, item.rows, item.cost, shapes.setdefault(item.shape, len(shapes)))
        for index, batch in enumerate(batches)
        for number, port in enumerate(ports)
        for item in batch.items.get(port, ())
    ]
    words = [0, int(facts.has_ended), len(batches), len(lengths), len(shapes), len(items)]
    words += [len(batch.lengths) for batch in batches]
    words += [batch.counts.get(loss, 0) for batch in batches for loss in topology.losses]
    table = np.concatenate([np.array(part, dtype=np.int64).ravel() for part in (words, lengths, [*shapes], items)])
    table[0] = table.size
    if table.min() < 0:
        raise ValueError(f"a table of counts, lengths, rows and costs has a negative number: {table.min()}")
    return table


def padded(table: np.ndarray, capacity: int) -> np.ndarray:
    """The first ``capacity`` words, zeros behind a shorter table: what one all-gather of equal sizes can carry."""
    words = np.zeros(capacity, dtype=np.int64)
    words[: table.size] = table[:capacity]
    return words


def needed_capacity(gathered: Sequence[np.ndarray]) -> int:
    """Words of the longest table. Where this exceeds the capacity, all ranks know it, and gather again with more."""
    return max(int(words[0]) for words in gathered)


def decode_tables(topology: Topology, gathered: Sequence[np.ndarray]) -> StepTables:
    """Put the tables of all ranks side by side.

    Args:
        topology: the one they were encoded with.
        gathered: ``[words]`` int64 of each rank, in order of ranks, padded or not; or ``[ranks, words]``.

    Raises:
        ValueError: another number of tables than ranks, or a table that did not fit its capacity.
    """
    if len(gathered) != topology.world_size:
        raise ValueError(f"found tables of {len(gathered)} ranks; expected {topology.world_size}")
    for rank, words in enumerate(gathered):
        if words[0] > len(words):
            raise ValueError(f"rank {rank}: found {len(words)} of {words[0]} words; gather again with that capacity")
    headers = np.array([words[:_HEADER] for words in gathered])
    num_losses, most = len(topology.losses), int(headers[:, 2].max())
    counts = np.zeros((most, num_losses, topology.world_size), dtype=np.int64)
    num_samples = np.zeros((most, topology.world_size), dtype=np.int64)
    tokens = np.zeros((most, topology.world_size), dtype=np.int64)
    shapes, items = [], []
    for rank, (words, header) in enumerate(zip(gathered, headers.tolist(), strict=True)):
        _, _, batches, samples, keys, num_items = header
        per_batch, per_loss, lengths, own_shapes, media = np.split(
            words[_HEADER : words[0]], np.cumsum([batches, batches * num_losses, samples, keys])
        )
        num_samples[:batches, rank] = per_batch
        counts[:batches, :, rank] = per_loss.reshape(batches, num_losses)
        tokens[:batches, rank] = np.bincount(np.repeat(np.arange(batches), per_batch), lengths, batches)
        shapes.append(own_shapes)
        items.append(media.reshape(num_items, _ITEM).T)
    slot, rows, cost, shape = np.concatenate(items, axis=1)
    owner = np.repeat(np.arange(topology.world_size), headers[:, 5])
    number = np.unique(np.concatenate(shapes), return_inverse=True)[1]
    first_shape = np.cumsum(headers[:, 4]) - headers[:, 4]
    shape = number[first_shape[owner] + shape] if len(number) else shape
    return StepTables(headers[:, 1] > 0, headers[:, 2], counts, num_samples, tokens, owner, slot, rows, cost, shape)


def _check_names(topology: Topology, facts: RankFacts) -> None:
    ports = {port.name for port in topology.ports}
    for batch in facts.micro_batches:
        unknown = sorted((batch.counts.keys() - set(topology.losses)) | (batch.items.keys() - ports))
        if unknown:
            raise ValueError(
                f"found {unknown}; expected losses of {list(topology.losses)} and ports of {sorted(ports)}"
            )
