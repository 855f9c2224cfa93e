"""Write the files of a model, of pieces in the memory of the CPU.

This imports no transformers, which takes the process that writes seconds and memory: a conversion by transformers comes
as a function that imports it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from omnitrain.checkpoint.pieces import Piece
from omnitrain.checkpoint.weight_files import WeightFile, write_files
from omnitrain.peers import Peers, all_or_raise

ADAPTERS = "adapters"  # folder of LoRA adapters
INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, without the values of its tensors: LoRA adapters, and all other weights."""

    small: Mapping[str, bytes]  # path in the folder -> content, of configs and the like; empty but on the first rank
    adapters: Sequence[WeightFile]
    weights: Sequence[WeightFile]


def write_model(
    files: ModelFiles, pieces: Sequence[Piece], folder: Path, peers: Peers, previous: Path | None = None
) -> None:
    """Write a model, of pieces in the memory of the CPU. All ``peers`` call this."""
    # Without the base's weights, which come last, nobody takes the folder for a complete model.
    all_or_raise(peers, lambda: _begin(files, folder) if peers.rank == 0 else None)
    if files.adapters:
        write_files(files.adapters, pieces, folder, peers)
    _write_weights(files.weights, pieces, folder, peers, previous)


def _write_weights(
    files: Sequence[WeightFile], pieces: Sequence[Piece], folder: Path, peers: Peers, previous: Path | None
) -> None:
    linked: set[str] = set()
    if previous is not None:
        linked = peers.of_first(_linked(files, previous, folder) if peers.rank == 0 else linked)
    write_files([file for file in files if file.name not in linked], pieces, folder, peers)
    all_or_raise(peers, lambda: _write_index(folder, files) if peers.rank == 0 else None)


def write_small(small: Mapping[str, bytes], folder: Path) -> None:
    """Write path -> content to ``folder``."""
    for name, content in small.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def remove_adapters(folder: Path) -> None:
    """Remove adapters that were saved in ``folder`` before, if any."""
    shutil.rmtree(folder / ADAPTERS, ignore_errors=True)


def _begin(files: ModelFiles, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if _WEIGHTS.fullmatch(old.name):
            old.unlink()
    remove_adapters(folder)
    write_small(files.small, folder)


def _linked(files: Sequence[WeightFile], previous: Path, folder: Path) -> set[str]:
    """Link the frozen files of ``previous`` into ``folder``, as far as that works; return their names."""
    linked = set()
    for file in (file for file in files if file.is_frozen):
        with contextlib.suppress(OSError, SafetensorError):  # no links on this disk, or the file is gone
            with safe_open(previous / file.name, framework="pt") as stored:
                if set(stored.keys()) != {entry.name for entry in file.entries}:
                    continue
            (folder / file.name).hardlink_to(previous / file.name)
            linked.add(file.name)
    return linked


def _write_index(folder: Path, files: Sequence[WeightFile]) -> None:
    if len(files) > 1:
        total = sum((folder / file.name).stat().st_size for file in files)
        file_of = {entry.name: file.name for file in files for entry in file.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
