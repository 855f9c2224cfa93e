"""Send bytes and pieces of tensors from rank to rank, on the CPU."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.checkpoint.pieces import Piece, Place
from omnitrain.checkpoint.safetensors_file import as_bytes
from omnitrain.errors import TrainingError
from omnitrain.peers import Peers


def swap(values: Sequence[Any], peers: Peers) -> list[Any]:
    """Send ``values[r]`` to rank r (pickled), and return what the ranks sent to this one. All ``peers`` call this.

    Raises:
        TrainingError: another rank has ended.
    """
    if peers.group is None:
        return list(values)
    parcels = [pickle.dumps(value) for value in values]
    sent = [len(parcel) for parcel in parcels]
    lengths = torch.empty(len(sent), dtype=torch.int64)
    _finish(peers.group.alltoall_base(lengths, torch.tensor(sent), [], [], dist.AllToAllOptions()))
    received = lengths.tolist()
    arrived = torch.empty(sum(received), dtype=torch.uint8)
    content = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
    _finish(peers.group.alltoall_base(arrived, content, received, sent, dist.AllToAllOptions()))
    return [pickle.loads(parcel.numpy()) for parcel in arrived.split(received)]


class PieceExchange:
    """Brings the pieces of each tensor to the one rank that writes it, when that rank asks for them.

    Every rank first learns what it will receive. Then its own pieces wait in their place until their receivers take
    them, so that no rank waits for the order of another one.

    Args:
        pieces: what this rank holds; on the CPU.
        writers: name of a tensor -> the rank that writes it; the same on all ranks. Others are not sent.
        peers: the ranks, which all call this.
    """

    def __init__(self, pieces: Iterable[Piece], writers: Mapping[str, int], peers: Peers) -> None:
        self._group, rank = peers.group, peers.rank
        offers: list[list[Piece]] = [[] for _ in range(peers.size)]
        for piece in pieces:
            if (writer := writers.get(piece.place.name)) is not None:
                offers[writer].append(piece)
        self._own = {piece.place: piece.tensor for piece in offers[rank]}
        self._parts: defaultdict[str, list[tuple[int, int, Place]]] = defaultdict(list)  # rank, tag, place
        for sender, places in enumerate(swap([[piece.place for piece in offer] for offer in offers], peers)):
            for tag, place in enumerate(places):
                self._parts[place.name].append((sender, tag, place))
        self._sends = [
            self._started(partial(_send, as_bytes(piece.tensor), writer, tag))
            for writer, offer in enumerate(offers)
            if writer != rank
            for tag, piece in enumerate(offer)
        ]

    def receive(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a whole tensor that this rank writes. Each can be received once.

        Raises:
            TrainingError: another rank has ended.
        """
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
        """Wait until the other ranks have received what this one sends.

        Raises:
            TrainingError: another rank has ended.
        """
        while self._sends:
            _finish(self._sends.pop())

    def _receiving(self, target: Tensor, sender: int, tag: int) -> Any:
        return self._started(lambda group: group.recv([as_bytes(target)], sender, tag))

    def _started(self, start: Callable[[Any], Any]) -> Any:
        try:
            return start(self._group)
        except RuntimeError as error:  # gloo raises it for a closed connection
            raise _left() from error


def _send(content: Tensor, receiver: int, tag: int, group: Any) -> Any:
    return group.send([content], receiver, tag)


def _finish(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # gloo raises it for a closed connection
        del work  # it keeps this rank's connections open, on which others may wait
        raise _left() from error


def _left() -> TrainingError:
    return TrainingError("the process that writes the checkpoint of another rank has ended")
