"""An omni model in the files of transformers, written by all its ranks: none ever has it whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging

from omnitrain.checkpoint.whole import whole_tensors
from omnitrain.models.adapters.files import remove_adapters, save_adapters, split_weights
from omnitrain.models.components.model import ComponentModel
from omnitrain.peers import Peers, all_or_raise

FILE_BYTES = 5 * 2**30
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_BLOCK = re.compile(r"(.*?\.\d+)\.")


def save_whole(model: ComponentModel, folder: Path, peers: Peers, file_bytes: int = FILE_BYTES) -> None:
    """Write config, whole weights, and LoRA adapters in files of peft beside them, as one process has them.

    Files are dealt out to the ranks, each of which has one at a time in its memory.

    Args:
        model: spread over ranks or not.
        folder: the same on all ranks; weights that were saved there before are removed.
        peers: all ranks of the model, which all call this.
        file_bytes: a file takes no more weights than that, but for those of one block.

    Raises:
        Exception: on all ranks, what one of them met in writing.
    """
    values = model.state_dict(keep_vars=True)
    added = model.adapter_names
    _save_rest(model, folder, {name: value for name, value in values.items() if name in added}, peers)
    files = _divided({name: value for name, value in values.items() if name not in added}, file_bytes)
    file_of: dict[str, str] = {}
    for begin in range(0, len(files), peers.size):
        own: dict[str, Tensor] = {}
        for rank, names in enumerate(files[begin : begin + peers.size]):
            own |= whole_tensors({name: values[name] for name in names}, keep=rank == peers.rank)
        mine = _file_name(begin + peers.rank, len(files))
        written = all_or_raise(peers, partial(_write, model, own, folder / mine))
        for names, file in peers.gather((written, mine)):
            file_of |= dict.fromkeys(names, file)
    all_or_raise(peers, lambda: _end(folder, file_of) if peers.rank == 0 else None)


def _save_rest(model: ComponentModel, folder: Path, adapters: Mapping[str, Tensor], peers: Peers) -> None:
    """All but the base's weights, without which nobody takes the folder for a model that is complete."""
    whole = whole_tensors(adapters, keep=peers.rank == 0)
    all_or_raise(peers, lambda: _begin(model, folder, whole) if peers.rank == 0 else None)


def _begin(model: ComponentModel, folder: Path, adapters: Mapping[str, Tensor]) -> None:
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # of no tensors
    try:
        PreTrainedModel.save_pretrained(model, folder, state_dict={})  # the config and what else is no tensor
    finally:
        if shows_progress:
            hf_logging.enable_progress_bar()
    for old in folder.iterdir():
        if _WEIGHTS.fullmatch(old.name):
            old.unlink()
    remove_adapters(folder)
    save_adapters(model, folder, adapters)


def _divided(values: Mapping[str, Tensor], file_bytes: int) -> list[list[str]]:
    """Names of each file. What transformers converts together, and names of one parameter, are in the same one."""
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


def _file_name(index: int, number: int) -> str:
    stem, _, kind = SAFE_WEIGHTS_NAME.partition(".")
    return SAFE_WEIGHTS_NAME if number == 1 else f"{stem}-{index + 1:05d}-of-{number:05d}.{kind}"


def _write(model: ComponentModel, weights: dict[str, Tensor], file: Path) -> list[str]:
    """What the file has, by the names of the checkpoint that the model was loaded from; no file for no weights."""
    if not weights:
        return []
    base, _ = split_weights(model, weights)
    converted = revert_weight_conversion(model, remove_tied_weights_from_state_dict(base, model))
    save_file({name: tensor.contiguous() for name, tensor in converted.items()}, file, metadata={"format": "pt"})
    return list(converted)


def _end(folder: Path, file_of: Mapping[str, str]) -> None:
    if len(set(file_of.values())) > 1:
        total = sum((folder / file).stat().st_size for file in set(file_of.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
