"""Record the routers' decisions of one run on disk, and replay them in another run.

A folder has a file per step and rank, with one tensor per layer and ``topk`` over the concatenated tokens of the rank's
samples. If ranks share a sequence, each file has -1 for the tokens of other ranks, so an element-wise maximum merges
the files of a step. Any number of ranks can replay the files of any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from omnitrain.checkpoint.store import set_default_modes
from omnitrain.errors import UserError
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.routing_replay import Recording, Replayed
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.layout import layout_of

_SAMPLES = "samples"


class RoutingOfRun:
    """Record the decisions of a run's routers to a folder, or replay those of an earlier run, or do nothing."""

    def __init__(self, model: OmniModel, record: str | None, replay: str | None, rank: int) -> None:
        for key, folder in (("record", record), ("replay", replay)):
            if folder is not None and not any(True for _ in experts_in(model)):
                kind = type(model.foundation).__name__
                raise UserError(f"train.experts.{key}: {kind} has no experts; remove it")
        layout = layout_of(model)
        # Tensor parallel ranks make the same decisions, so one of them writes.
        writes = record is not None and (layout is None or layout.state.tp_rank == 0)
        self._model, self._rank = model, rank
        self._replayed = RoutingFiles(Path(replay)) if replay is not None else None
        self._folder = Path(record) if record is not None and writes else None
        self._recording = Recording()
        self._lengths: dict[str, int] = {}
        self._changed = Replayed()

    @contextmanager
    def forward_context(self, encoded: EncodedPack) -> Iterator[None]:
        """Wrap the forward of a micro-batch."""
        info, rows = encoded.pack.info, encoded.sequence_slice.positions if encoded.sequence_slice is not None else None
        if self._replayed is not None:
            recording = self._replayed.of_samples(info.ids, info.lengths)
            with recording.replayed(self._model, info.ids, info.lengths, rows) as changed:
                yield
            self._changed.near_ties += changed.near_ties
            self._changed.others += changed.others
        elif self._folder is not None:
            with self._recording.recorded(self._model, info.ids, info.lengths, rows):
                yield
            samples = zip(info.ids, info.lengths, info.indices, strict=True)
            self._lengths |= {name: length for name, length, index in samples if index >= 0}
        else:
            yield

    def end(self, step: int) -> None:
        """Write the decisions that were recorded in a step; call it after the step."""
        if self._folder is not None and self._lengths:
            write_routing(self._folder / f"step-{step:08d}.rank-{self._rank}", self._recording, self._lengths)
        self._recording, self._lengths = Recording(), {}

    def read(self) -> tuple[int, int]:
        """Return how many (token, layer) pairs the replay changed since the last reading: near ties, and others."""
        changed, self._changed = self._changed, Replayed()
        return int(changed.near_ties), int(changed.others)


def write_routing(path: Path, recording: Recording, lengths: dict[str, int]) -> None:
    """Write the decisions for the samples in ``lengths`` to ``path`` + ``.safetensors``, atomically."""
    top_k = {(layer, call): decisions.size(1) for (layer, call, _), decisions in recording.decisions.items()}
    tensors = {}
    for (layer, call), slots in top_k.items():
        unknown = (torch.full((tokens, slots), -1) for tokens in lengths.values())
        of_samples = [
            recording.decisions.get((layer, call, name), none) for name, none in zip(lengths, unknown, strict=True)
        ]
        tensors[f"{layer}/{call}"] = torch.cat(of_samples).to(torch.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata={_SAMPLES: json.dumps(list(lengths.items()))})
    set_default_modes([partial])
    partial.replace(path.with_name(f"{path.name}.safetensors"))


class RoutingFiles:
    """The decisions in a folder, read lazily. For a sample in several steps, the last step's decisions count."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("step-*.safetensors"))
        if not files:
            raise UserError(f"train.experts.replay: no decisions in {folder}; expected files of an earlier `record`")
        self._slices: dict[str, list[tuple[Path, slice]]] = {}  # sample -> its tokens in files
        for file in files:
            start = 0
            for name, length in _samples_in(file):
                slices = self._slices.setdefault(name, [])
                if slices and slices[0][0].name.partition(".")[0] != file.name.partition(".")[0]:
                    slices.clear()
                slices.append((file, slice(start, start + length)))
                start += length

    def of_samples(self, ids: Sequence[str], lengths: Sequence[int]) -> Recording:
        """Return the decisions for recorded samples; another number of tokens than then is a UserError."""
        recording = Recording()
        for name, length in zip(ids, lengths, strict=True):
            for file, rows in self._slices.get(name, ()):
                recorded = rows.stop - rows.start
                if recorded != length:
                    raise UserError(
                        f"train.experts.replay: sample {name} has {length} tokens, but {recorded} in {file}; "
                        "record it again"
                    )
                for (layer, call), decisions in _decisions(file, rows):
                    key = (layer, call, name)
                    others = recording.decisions.get(key)
                    recording.decisions[key] = decisions if others is None else torch.maximum(decisions, others)
        return recording


def _samples_in(file: Path) -> list[tuple[str, int]]:
    try:
        with safe_open(file, "pt") as opened:
            return [(name, length) for name, length in json.loads(opened.metadata()[_SAMPLES])]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"train.experts.replay: {file} is not a file of recorded decisions: {error}") from None


def _decisions(file: Path, rows: slice) -> Iterator[tuple[tuple[str, int], Tensor]]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            layer, _, call = name.rpartition("/")
            yield (layer, int(call)), opened.get_slice(name)[rows].long()
