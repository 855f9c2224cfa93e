"""Save an omni model as transformers does. All ranks write files; no rank ever holds the whole model."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging

from omnitrain.checkpoint.disk import set_default_modes
from omnitrain.checkpoint.whole import holders_of, whole_tensors
from omnitrain.models.adapters.files import remove_adapters, save_adapters, split_weights
from omnitrain.models.components.model import ComponentModel
from omnitrain.peers import Peers, all_or_raise

FILE_BYTES = 5 * 2**30
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_BLOCK = re.compile(r"(.*?\.\d+)\.")


def save_whole(
    model: ComponentModel, folder: Path, peers: Peers, file_bytes: int = FILE_BYTES, previous: Path | None = None
) -> None:
    """Write the config, the weights and LoRA adapters (in PEFT's files) exactly as a single process would.

    Files are distributed over the ranks; each rank holds the weights of one file at a time.

    Args:
        model: sharded or not.
        folder: the same on all ranks; weights saved there before are removed.
        peers: all ranks of the model; all must call this function.
        file_bytes: largest size of a file's weights; a single block may exceed it.
        previous: a folder to which this process has saved the same model. Its files of weights that do not train are
            linked, if the file system can do that, and not written again.

    Raises:
        Exception: writing failed on one rank; all ranks raise its exception.
    """
    values = model.state_dict(keep_vars=True)
    whole = partial(whole_tensors, holders=holders_of(values, peers), peers=peers)
    adapter_names = model.adapter_names
    adapters = whole({name: v for name, v in values.items() if name in adapter_names}, keep=peers.rank == 0)
    # Without the base's weights, which come last, nobody takes the folder for a complete model.
    all_or_raise(peers, lambda: _begin(model, folder, adapters) if peers.rank == 0 else None)
    files = _names_by_file({name: value for name, value in values.items() if name not in adapter_names}, file_bytes)
    frozen = [
        _file_name(index, len(files))
        for index, names in enumerate(files)
        if all(isinstance(values[name], nn.Parameter) and not values[name].requires_grad for name in names)
    ]
    file_of = peers.gather(_linked(frozen, previous, folder) if peers.rank == 0 and previous is not None else {})[0]
    left = [index for index in range(len(files)) if _file_name(index, len(files)) not in file_of.values()]
    for begin in range(0, len(left), peers.size):
        weights: dict[str, Tensor] = {}
        for rank, index in enumerate(left[begin : begin + peers.size]):
            weights |= whole({name: values[name] for name in files[index]}, keep=rank == peers.rank)
        own = left[begin + peers.rank :][:1]  # some ranks have no file in the last round
        file_name = _file_name(own[0], len(files)) if own else ""
        written = all_or_raise(peers, partial(_write, model, weights, folder / file_name))
        for names, file in peers.gather((written, file_name)):
            file_of |= dict.fromkeys(names, file)
    all_or_raise(peers, lambda: _write_index(folder, file_of) if peers.rank == 0 else None)


def _begin(model: ComponentModel, folder: Path, adapters: Mapping[str, Tensor]) -> None:
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # it would count zero tensors
    try:
        PreTrainedModel.save_pretrained(model, folder, state_dict={})  # writes the config and other small files
    finally:
        if shows_progress:
            hf_logging.enable_progress_bar()
    for old in folder.iterdir():
        if _WEIGHTS.fullmatch(old.name):
            old.unlink()
    remove_adapters(folder)
    save_adapters(model, folder, adapters)


def _names_by_file(values: Mapping[str, Tensor], file_bytes: int) -> list[list[str]]:
    """Return the names of each file; tied names, and tensors that transformers converts together, share a file."""
    groups: dict[str, list[str]] = {}
    group_of: dict[int, str] = {}  # by parameter
    for name, value in values.items():
        block = _BLOCK.match(name)
        groups.setdefault(group_of.setdefault(id(value), block[1] if block else ""), []).append(name)
    files: list[list[str]] = []
    left = 0
    for names in groups.values():
        size = sum(value.numel() * value.element_size() for value in {values[name] for name in names})
        if size > left:
            files.append([])
            left = file_bytes
        files[-1] += names
        left -= size
    return files


def _linked(names: list[str], previous: Path, folder: Path) -> dict[str, str]:
    """Link files of ``previous`` into ``folder``, as far as that works; return the file of each of their tensors."""
    file_of: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(OSError, SafetensorError):  # no links on this disk, or the file is gone
            with safe_open(previous / name, framework="pt") as stored:
                tensors = list(stored.keys())
            (folder / name).hardlink_to(previous / name)
            file_of |= dict.fromkeys(tensors, name)
    return file_of


def _file_name(index: int, num_files: int) -> str:
    stem, _, suffix = SAFE_WEIGHTS_NAME.partition(".")
    return SAFE_WEIGHTS_NAME if num_files == 1 else f"{stem}-{index + 1:05d}-of-{num_files:05d}.{suffix}"


def _write(model: ComponentModel, weights: dict[str, Tensor], file: Path) -> list[str]:
    """Write one file and return its tensor names, in the naming of the original checkpoint; no weights, no file."""
    if not weights:
        return []
    base, _ = split_weights(model, weights)
    converted = revert_weight_conversion(model, remove_tied_weights_from_state_dict(base, model))
    save_file({name: tensor.contiguous() for name, tensor in converted.items()}, file, metadata={"format": "pt"})
    set_default_modes([file])
    return list(converted)


def _write_index(folder: Path, file_of: Mapping[str, str]) -> None:
    if len(set(file_of.values())) > 1:
        total = sum((folder / file).stat().st_size for file in set(file_of.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
