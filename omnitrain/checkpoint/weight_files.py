"""Write files of weights. Each is written by one rank, tensor by tensor, from the pieces that all ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omnitrain.checkpoint.exchange import PieceExchange
from omnitrain.checkpoint.pieces import Piece
from omnitrain.checkpoint.safetensors_file import Entry, SafetensorsFile
from omnitrain.errors import TrainingError
from omnitrain.peers import Peers, raise_on_all


@dataclass(frozen=True)
class Group:
    """Tensors of the model that become tensors of a file together, whole.

    Attributes:
        sources: the tensors, as the model has them.
        stored: the tensors, as the file has them.
        convert: makes these of those. None: there is one of each, with equal values.
    """

    sources: tuple[Entry, ...]
    stored: tuple[Entry, ...]
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]] | None = None


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
    """Write files, the same on all ranks; the ranks take turns. A rank holds one group of tensors at a time.

    ``pieces`` are what this rank holds of their tensors. What one rank raises, all raise.
    """
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
