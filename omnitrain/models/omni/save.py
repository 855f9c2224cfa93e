"""Save an omni model as transformers does. All ranks write files; no rank holds more than one of its tensors whole."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging

from omnitrain.checkpoint.model_files import ModelFiles, write_model
from omnitrain.checkpoint.pieces import Piece, PieceOwners
from omnitrain.checkpoint.safetensors_file import Entry
from omnitrain.checkpoint.weight_files import Group, WeightFile, stored_as
from omnitrain.models.adapters.files import (
    Conversion,
    adapter_tensors,
    save_adapter_configs,
    split_weights,
)
from omnitrain.models.hf.conversions import conversions_of
from omnitrain.peers import Peers, all_or_raise
from omnitrain.transformers_private import ConversionsAlone, conversions_of_weights, set_conversions_of_weights

FILE_BYTES = 5 * 2**30
_BLOCK = re.compile(r"(.*?\.\d+)\.")


def save_whole(model: PreTrainedModel, folder: Path, peers: Peers, file_bytes: int = FILE_BYTES) -> None:
    """Write the config, the weights and LoRA adapters (in PEFT's files) exactly as a single process would.

    All ``peers`` call this; if writing failed on one rank, all raise its exception. A rank holds one tensor whole at a
    time, or those that transformers converts together. Weights in ``folder`` are removed before; ``file_bytes``: the
    largest size of a file's weights, which a single block may exceed.
    """
    files = files_of(model, peers, file_bytes)
    pieces = model_pieces(model, PieceOwners(model.state_dict(keep_vars=True), peers))
    write_model(files, [piece.on_host() for piece in pieces], folder, peers)


def files_of(model: PreTrainedModel, peers: Peers, file_bytes: int = FILE_BYTES) -> ModelFiles:
    """Return the files of ``model``. Nothing in them changes while it trains. All ``peers`` call this."""
    small = all_or_raise(peers, lambda: small_files(lambda into: _save_configs(model, into)) if peers.rank == 0 else {})
    values = model.state_dict(keep_vars=True)
    adapters = [
        WeightFile(
            file,
            tuple(
                stored_as([_entry(name, values[name])], partial(_stored_alone, key, store))
                for key, (name, store) in tensors.items()
            ),
        )
        for file, tensors in adapter_tensors(model).items()
    ]
    _, added = split_weights(model, values)
    base = {name: value for name, value in values.items() if name not in added}
    names_by_file = _names_by_file(base, file_bytes)
    weights = [
        WeightFile(
            _file_name(index, len(names_by_file)),
            tuple(_groups(model, {name: values[name] for name in names})),
            all(isinstance(values[name], nn.Parameter) and not values[name].requires_grad for name in names),
        )
        for index, names in enumerate(names_by_file)
    ]
    return ModelFiles(small, adapters, weights)


def model_pieces(model: PreTrainedModel, owners: PieceOwners) -> list[Piece]:
    """Return the pieces of the weights that this rank writes; tied weights once."""
    values = model.state_dict(keep_vars=True)
    pieces = [owners.piece(name, values[name], number) for number, name in enumerate(_names_once(values).values())]
    return [piece for piece in pieces if piece is not None]


def small_files(save: Callable[[Path], None]) -> dict[str, bytes]:
    """Return path -> content of the files that ``save`` writes to the folder that it gets."""
    with tempfile.TemporaryDirectory(prefix="omnitrain-") as into:
        save(Path(into))
        files = [path for path in Path(into).rglob("*") if path.is_file()]
        return {str(path.relative_to(into)): path.read_bytes() for path in files}


def _save_configs(model: PreTrainedModel, folder: Path) -> None:
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # it would count zero tensors
    try:
        PreTrainedModel.save_pretrained(model, folder, state_dict={})  # writes the config and other small files
    finally:
        if shows_progress:
            hf_logging.enable_progress_bar()
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    save_adapter_configs(model, folder)


def _names_once(values: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the first name of each tensor; tied names are one tensor."""
    first: dict[int, str] = {}
    for name, value in values.items():
        first.setdefault(id(value), name)
    return first


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


def _stored_alone(key: str, store: Conversion, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {key: store(tensors[0])}


def _as_in_checkpoint(
    conversions: ConversionsAlone, names: Sequence[str], tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Store tensors under the names and in the shapes of the original checkpoint."""
    return revert_weight_conversion(cast(PreTrainedModel, conversions), dict(zip(names, tensors, strict=True)))


def _entry(name: str, value: Tensor) -> Entry:
    return Entry(name, value.dtype, tuple(value.shape))


def _groups(model: PreTrainedModel, values: Mapping[str, Tensor]) -> list[Group]:
    """Return the groups of a file, tensor by tensor as far as transformers converts them alone."""
    first = _names_once(values)
    marks = {key: torch.empty(1) for key in first}  # tied names share one
    base, _ = split_weights(model, {name: marks[id(value)] for name, value in values.items()})
    names = dict(zip(base, values, strict=True))  # original name -> name in the model
    kept = {base_name: names[base_name] for base_name in remove_tied_weights_from_state_dict(base, model)}
    conversions = _conversions_of(model)
    forth = [one for one in reversed(conversions_of_weights(conversions) or []) if isinstance(one, WeightConverter)]
    converters = [one.reverse_transform() for one in forth]
    together: defaultdict[str, list[str]] = defaultdict(list)
    alone: list[str] = []
    for base_name in kept:
        target, pattern = apply_converters(base_name, converters)
        (alone if pattern is None else together[target]).append(base_name)

    def source(base_name: str) -> Entry:
        value = values[kept[base_name]]
        return _entry(first[id(value)], value)

    entries = {base_name: source(base_name) for base_name in alone}
    blank = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    stored = _as_in_checkpoint(conversions, tuple(blank), list(blank.values()))
    renamed = {id(tensor): name for name, tensor in stored.items()}
    groups = [Group((entries[name],), (_entry(renamed[id(tensor)], tensor),)) for name, tensor in blank.items()]
    groups += [
        stored_as([source(name) for name in base_names], partial(_as_in_checkpoint, conversions, tuple(base_names)))
        for base_names in together.values()
    ]
    return groups


def keep_conversions(model: PreTrainedModel) -> None:
    """Remember the conversions that saving reverts: transformers finds them by class names, which FSDP changes."""
    set_conversions_of_weights(model, conversions_of(model))


def _conversions_of(model: PreTrainedModel) -> ConversionsAlone:
    """Return the conversions that :func:`revert_weight_conversion` reverts."""
    keep_conversions(model)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    base, _ = split_weights(model, cast(Any, shapes))
    return ConversionsAlone(conversions_of(model), model.config, cast(Any, base))


def _file_name(index: int, num_files: int) -> str:
    stem, _, suffix = SAFE_WEIGHTS_NAME.partition(".")
    return SAFE_WEIGHTS_NAME if num_files == 1 else f"{stem}-{index + 1:05d}-of-{num_files:05d}.{suffix}"
