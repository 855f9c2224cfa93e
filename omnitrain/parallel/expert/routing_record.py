"""Routers' decisions on disk: written in one run, taken in another one.

A folder has a file per step and rank, with one tensor per layer and ``topk`` over the tokens of that rank's samples,
end to end. Where ranks share a row, each has -1 for the tokens of the others, so that files of a step are put together
by taking the larger number. Any number of ranks reads what any number has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from omnitrain.data.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import Recording, Replayed, experts_in
from omnitrain.parallel.layout import layout_of

_SAMPLES = "samples"


class RoutingOfRun:
    """Records the decisions of a run's routers, or takes those of an earlier one, or does nothing.

    Args:
        model: laid out, or on one process.
        record: folder to write to.
        replay: folder to read from.
        rank: of this process.

    Raises:
        UserError: the model has no experts, or the folder no decisions.
    """

    def __init__(self, model: OmniModel, record: str | None, replay: str | None, rank: int) -> None:
        for key, folder in (("record", record), ("replay", replay)):
            if folder is not None and not any(True for _ in experts_in(model)):
                kind = type(model.foundation).__name__
                raise UserError(f"train.experts.{key}: {kind} has no experts whose routing could be kept; remove it")
        layout = layout_of(model)
        writes = record is not None and (layout is None or layout.state.tp_rank == 0)  # the others decide the same
        self._model, self._rank = model, rank
        self._taken = RoutingFiles(Path(replay)) if replay is not None else None
        self._folder = Path(record) if record is not None and writes else None
        self._recording = Recording()
        self._lengths: dict[str, int] = {}
        self._changed = Replayed()

    @contextmanager
    def forward_context(self, pack: Pack, work: MicroBatchWork) -> Iterator[None]:
        """The forward of a micro-batch."""
        info, rows = pack.info, work.part.rows if work.part is not None else None
        if self._taken is not None:
            taken = self._taken.of_samples(info.ids, info.lengths)
            with taken.replayed(self._model, info.ids, info.lengths, rows) as changed:
                yield
            self._changed.near_ties += changed.near_ties
            self._changed.others += changed.others
        elif self._folder is not None:
            with self._recording.recorded(self._model, info.ids, info.lengths, rows):
                yield
            found = zip(info.ids, info.lengths, info.indices, strict=True)
            self._lengths |= {name: length for name, length, index in found if index >= 0}
        else:
            yield

    def end(self, step: int) -> None:
        """Behind a step: what was recorded in it is written."""
        if self._folder is not None and self._lengths:
            write_routing(self._folder / f"step-{step:08d}.rank-{self._rank}", self._recording, self._lengths)
        self._recording, self._lengths = Recording(), {}

    def read(self) -> tuple[int, int]:
        """Tokens of a layer, on this rank since the last reading, that would have gone elsewhere.

        Returns:
            To experts of nearly the same score; to others.
        """
        changed, self._changed = self._changed, Replayed()
        return int(changed.near_ties), int(changed.others)


def write_routing(path: Path, recording: Recording, lengths: dict[str, int]) -> None:
    """Write the decisions about samples of these lengths to ``path``, with an ending; at once or not at all."""
    width = {(layer, number): own.size(1) for (layer, number, _), own in recording.decisions.items()}
    tensors = {}
    for (layer, number), slots in width.items():
        unknown = (torch.full((tokens, slots), -1) for tokens in lengths.values())
        own = [
            recording.decisions.get((layer, number, name), none) for name, none in zip(lengths, unknown, strict=True)
        ]
        tensors[f"{layer}/{number}"] = torch.cat(own).to(torch.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata={_SAMPLES: json.dumps(list(lengths.items()))})
    partial.replace(path.with_name(f"{path.name}.safetensors"))


@dataclass(frozen=True)
class _Place:
    """Where the tokens of a sample are in a file."""

    file: Path
    rows: slice


class RoutingFiles:
    """The decisions in a folder, read when a sample asks for them. Of a sample that came in several steps, the last.

    Raises:
        UserError: the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("step-*.safetensors"))
        if not files:
            raise UserError(f"train.experts.replay: no decisions in {folder}; expected files of an earlier `record`")
        self._places: dict[str, list[_Place]] = {}
        for file in files:
            start = 0
            for name, length in _samples_in(file):
                places = self._places.setdefault(name, [])
                if places and _step(places[0].file) != _step(file):
                    places.clear()
                places.append(_Place(file, slice(start, start + length)))
                start += length

    def of_samples(self, ids: Sequence[str], lengths: Sequence[int]) -> Recording:
        """Their decisions; samples that were not recorded have none.

        Raises:
            UserError: a sample has another number of tokens than when it was recorded.
        """
        found = Recording()
        for name, length in zip(ids, lengths, strict=True):
            for place in self._places.get(name, ()):
                recorded = place.rows.stop - place.rows.start
                if recorded != length:
                    raise UserError(
                        f"train.experts.replay: sample {name} has {length} tokens, but {recorded} in {place.file}; "
                        "record it again"
                    )
                for (layer, number), own in _decisions(place):
                    key = (layer, number, name)
                    others = found.decisions.get(key)
                    found.decisions[key] = own if others is None else torch.maximum(own, others)
        return found


def _samples_in(file: Path) -> list[tuple[str, int]]:
    try:
        with safe_open(file, "pt") as opened:
            return [(name, length) for name, length in json.loads(opened.metadata()[_SAMPLES])]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"train.experts.replay: {file} is no file of decisions: {error}") from None


def _decisions(place: _Place) -> Iterator[tuple[tuple[str, int], Tensor]]:
    with safe_open(place.file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            layer, _, number = name.rpartition("/")
            yield (layer, int(number)), opened.get_slice(name)[place.rows].long()


def _step(file: Path) -> str:
    return file.name.partition(".")[0]
