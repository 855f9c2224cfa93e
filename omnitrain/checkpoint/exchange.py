"""Send pieces of tensors to the ranks that write them, on the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omnitrain.checkpoint.pieces import Piece, Place
from omnitrain.checkpoint.safetensors_file import as_bytes
from omnitrain.peers import Peers, lost_connections_as, wait_for

_ENDED = "another rank ended while a checkpoint was written"


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
        self._group: Any = peers.group
        rank = peers.rank
        offers: list[list[Piece]] = [[] for _ in range(peers.size)]
        for piece in pieces:
            if (writer := writers.get(piece.place.name)) is not None:
                offers[writer].append(piece)
        self._own = {piece.place: piece.tensor for piece in offers[rank]}
        self._parts: defaultdict[str, list[tuple[int, int, Place]]] = defaultdict(list)  # rank, tag, place
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
