"""Write files of weights. Each is written by one rank, tensor by tensor, from the pieces that all ranks hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnitrain.checkpoint.pieces import Piece, TensorChunk
from omnitrain.checkpoint.safetensors_file import Entry, SafetensorsFile, as_bytes
from omnitrain.errors import TrainingError
from omnitrain.peers import Peers, lost_connections_as, raise_on_all, wait_for

_ENDED = "another rank ended while a checkpoint was written"


class PieceExchange:
    """Brings this rank's ``pieces`` to the rank in ``writers`` (tensor -> rank), when that rank asks for them."""

    def __init__(self, pieces: Iterable[Piece], writers: Mapping[str, int], peers: Peers) -> None:
        self._group: Any = peers.group
        rank = peers.rank
        offers: list[list[Piece]] = [[] for _ in range(peers.size)]
        for piece in pieces:
            if (writer := writers.get(piece.place.name)) is not None:
                offers[writer].append(piece)
        self._own = {piece.place: piece.tensor for piece in offers[rank]}
        self._parts: defaultdict[str, list[tuple[int, int, TensorChunk]]] = defaultdict(list)  # rank, tag, place
        with lost_connections_as(_ENDED):
            found = peers.swap([[piece.place for piece in offer] for offer in offers])
        for sender, places in enumerate(found):
            for tag, place in enumerate(places):
                self._parts[place.name].append((sender, tag, place))
        self._sends = [
            self._sending(piece, writer, tag)
            for writer, offer in enumerate(offers)
            if writer != rank
            for tag, piece in enumerate(offer)
        ]

    def receive(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a whole tensor that this rank writes, once. A TrainingError: another rank has ended."""
        parts = self._parts.pop(name, [])
        if len(parts) == 1 and parts[0][2].is_whole and parts[0][2] in self._own:
            return self._own[parts[0][2]]
        whole = torch.empty(*shape, dtype=dtype) if shape else torch.empty((), dtype=dtype)
        assert sum(place.num_bytes for *_, place in parts) == whole.nbytes, f"{name}: its ranks hold {parts}"
        receiving = []
        for sender, tag, place in parts:
            target = place.within(whole)
            if place in self._own:
                target.copy_(self._own[place])
            elif target.is_contiguous():
                receiving.append(self._receiving(target, sender, tag))
            else:  # one piece at a time, because it is in memory twice
                piece = torch.empty(place.sizes, dtype=dtype)
                _finish(self._receiving(piece, sender, tag))
                target.copy_(piece)
        for work in receiving:
            _finish(work)
        return whole

    def drop(self, name: str) -> None:
        """Receive what is left of a tensor that cannot be written, so that no rank waits for this one."""
        for sender, tag, place in self._parts.pop(name, []):
            if place not in self._own:
                _finish(self._receiving(torch.empty(place.sizes, dtype=place.dtype), sender, tag))

    def finish(self) -> None:
        """Wait until the other ranks have received what this one sends. A TrainingError: another rank has ended."""
        while self._sends:
            _finish(self._sends.pop())

    def _receiving(self, target: Tensor, sender: int, tag: int) -> Any:
        with lost_connections_as(_ENDED):
            return self._group.recv([as_bytes(target)], sender, tag)

    def _sending(self, piece: Piece, writer: int, tag: int) -> Any:
        with lost_connections_as(_ENDED):
            return self._group.send([as_bytes(piece.tensor)], writer, tag)


def _finish(work: Any) -> None:
    with lost_connections_as(_ENDED):
        wait_for(work)


@dataclass(frozen=True)
class Group:
    """Tensors of the model that become tensors of a file together, whole."""

    sources: tuple[Entry, ...]  # the tensors, as the model has them
    stored: tuple[Entry, ...]  # the tensors, as the file has them
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]] | None = None  # None: one of each, with equal values


@dataclass(frozen=True)
class WeightFile:
    """A file of weights: its path in the folder, and what is in it; ``is_frozen``: none of it trains."""

    name: str
    groups: tuple[Group, ...]
    is_frozen: bool = False

    @property
    def entries(self) -> list[Entry]:
        """The tensors of the file."""
        return [entry for group in self.groups for entry in group.stored]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(entry.num_bytes for entry in self.entries)


def write_files(files: Sequence[WeightFile], pieces: Sequence[Piece], folder: Path, peers: Peers) -> None:
    """Write files, the same on all ranks, in turns, of this rank's ``pieces``; what one raises, all raise."""
    writers = {
        source.name: index % peers.size
        for index, file in enumerate(files)
        for group in file.groups
        for source in group.sources
    }
    exchange = PieceExchange(pieces, writers, peers)
    failure: Exception | None = None
    for file in files[peers.rank :: peers.size]:
        try:
            _write(file, exchange, folder)
        except TrainingError:  # another rank has ended
            raise
        except Exception as error:  # raised below, after the other ranks have sent their pieces
            failure = error
            for entry in (entry for group in file.groups for entry in group.sources):
                exchange.drop(entry.name)
    exchange.finish()
    raise_on_all(peers, failure)


def _write(file: WeightFile, exchange: PieceExchange, folder: Path) -> None:
    path = folder / file.name
    path.parent.mkdir(exist_ok=True, parents=True)
    with SafetensorsFile(path, file.entries) as opened:
        for group in file.groups:
            tensors = [exchange.receive(entry.name, entry.dtype, entry.shape) for entry in group.sources]
            if group.convert is None:
                opened.write(group.stored[0].name, tensors.pop())
                continue
            converted = dict(group.convert(tensors))
            del tensors
            for entry in group.stored:
                opened.write(entry.name, converted.pop(entry.name))


def stored_as(group: Sequence[Entry], convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]) -> Group:
    """Return the group of ``group`` as ``convert`` stores it, from a conversion without memory."""
    shapes = convert([torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in group])
    stored = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in shapes.items())
    return Group(tuple(group), stored, convert)
