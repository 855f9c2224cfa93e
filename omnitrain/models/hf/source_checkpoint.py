"""The checkpoint from which a model was loaded, and the model's weights in its names, dtypes and files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from omnitrain.checkpoint.safetensors_file import Entry, SafetensorsFile
from omnitrain.errors import UserError
from omnitrain.models.hf.conversions import conversions_of, with_experts_apart
from omnitrain.models.hf.load import config_at, folder_with
from omnitrain.models.hf.quantized import Dequantizer, dequantizing
from omnitrain.models.hf.stored_tensor import operations_recorded, stored_tensors
from omnitrain.models.hf.stored_values import FILES
from omnitrain.transformers_private import conversions_of_weights, set_conversions_of_weights

_NOT_NEEDED = ("*/*", "*.bin", "*.pth", "*.h5", "*.msgpack", "*.gguf")  # of the files on the Hub


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint in safetensors files."""

    folder: Path  # its folder
    file_of: Mapping[str, str]  # name of a tensor -> its file
    parts: Mapping[str, Mapping[str, Tensor]]  # name of a tensor -> itself in the files, or its parts if quantized
    dequantizer: Dequantizer | None  # dequantizes tensors; None: none is quantized

    @classmethod
    def open(cls, path: str) -> SourceCheckpoint:
        """Open a folder or Hub id; UserError: it is missing, or not in safetensors files that can be dequantized."""
        folder = folder_with(path, "*", ignore_patterns=list(_NOT_NEEDED))
        index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
        if not index.is_file() and not single.is_file():
            raise UserError(f"{path!r} has no weights in safetensors files")
        files = json.loads(index.read_text())["weight_map"].values() if index.is_file() else [single.name]
        by_file = {file: stored_tensors([str(folder / file)]) for file in dict.fromkeys(files)}
        file_of = {name: file for file, of_file in by_file.items() for name in of_file}
        stored = {name: tensor for of_file in by_file.values() for name, tensor in of_file.items()}
        quantization = dequantizing(str(folder))
        if quantization is None:
            return cls(folder, file_of, {name: {name: tensor} for name, tensor in stored.items()}, None)
        dequantizer = Dequantizer(quantization, config_at(str(folder)).dtype or torch.bfloat16)
        names = dequantizer.parts(stored)
        parts = {name: {part: stored[of] for part, of in of_name.items()} for name, of_name in names.items()}
        return cls(folder, {name: file_of[next(iter(of.values()))] for name, of in names.items()}, parts, dequantizer)

    def plain(self, name: str) -> Tensor | None:
        """Return a tensor that is not quantized; None: it is."""
        parts = self.parts[name]
        is_plain = self.dequantizer is None or set(parts) == {name.rpartition(".")[2]}
        return next(iter(parts.values())) if is_plain else None

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, dequantized. Raises UserError: transformers cannot dequantize it alone."""
        plain = self.plain(name)
        if plain is not None:
            return plain
        assert self.dequantizer is not None
        return self.dequantizer.dequantized(name, self.parts[name])

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, after it was dequantized."""
        plain = self.plain(name)
        if plain is not None:
            return plain.dtype
        assert self.dequantizer is not None
        return self.dequantizer.dtype

    def matched(self, model: PreTrainedModel) -> MatchedWeights:
        """Find a whole model's weights among the tensors; names of a part of the model in the files have a prefix.

        Raises UserError: the files lack weights, or have other shapes; or transformers cannot dequantize a tensor.
        """
        values = self._values(model)
        first = max(values, key=len)
        prefixes = [name.removesuffix(first) for name in self.file_of if name == first or name.endswith(f".{first}")]
        missing_of = {prefix: self._missing(values, prefix) for prefix in sorted(prefixes, key=len) or [""]}
        prefix = min(missing_of, key=lambda prefix: len(missing_of[prefix]))
        of = f"of {len(values)} tensors of {type(model).__name__}"
        if missing := missing_of[prefix]:
            raise UserError(f"{str(self.folder)!r} lacks {len(missing)} {of}, such as {prefix}{missing[0]}")
        shapes = {name: tuple(tensor.shape) for name in self.file_of if (tensor := self.plain(name)) is not None}
        values = {name: _turned_as(shapes.get(prefix + name), value) for name, value in values.items()}
        # The number of rows grows with the vocabulary.
        other = [n for n, value in values.items() if shapes.get(prefix + n, value.shape)[1:] != value.shape[1:]]
        if other:
            raise UserError(f"{str(self.folder)!r} has {len(other)} {of} in another shape, such as {prefix}{other[0]}")
        its_names = {prefix + name for name in values}
        others = {name: self.tensor(name) for name in self.file_of if name not in its_names}
        return MatchedWeights(self, values, prefix, others)

    def _values(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's weights by the names of its checkpoint, with the experts apart if the files have them so."""
        before = conversions_of_weights(model)
        set_conversions_of_weights(model, with_experts_apart(conversions_of(model), self.file_of, model))
        try:
            with torch.no_grad(), operations_recorded():
                return revert_weight_conversion(model, dict(model.state_dict(keep_vars=True)))
        finally:
            set_conversions_of_weights(model, before)

    def _missing(self, values: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Names that the files do not have; of tied weights they need one."""
        found = {id(value) for name, value in values.items() if prefix + name in self.file_of}
        absent = {name: value for name, value in values.items() if prefix + name not in self.file_of}
        return [name for name, value in absent.items() if id(value) not in found]


@dataclass(frozen=True)
class MatchedWeights:
    """A model's weights in the names of its source."""

    source: SourceCheckpoint  # the checkpoint
    values: Mapping[str, Tensor]  # name without the prefix -> weight
    prefix: str  # of the model's names in the files, such as ``thinker.``
    others: Mapping[str, Tensor]  # tensors of the source that the model does not have; they stay in the files

    def write(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the files of the source to ``folder``, with the model's weights; dtype None: in the source's dtypes."""
        names_of: defaultdict[str, list[str]] = defaultdict(list)
        for name, file in self.source.file_of.items():
            names_of[file].append(name)
        num_bytes = 0
        for file, names in names_of.items():
            with safe_open(self.source.folder / file, framework="pt") as opened:
                metadata = opened.metadata() or {}
            tensors = {name: self._tensor(name, dtype) for name in names}
            entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
            with SafetensorsFile(folder / file, entries, metadata) as written:
                for name, tensor in tensors.items():
                    written.write(name, tensor)
            num_bytes += sum(entry.num_bytes for entry in entries)
        FILES.close()
        index_file = self.source.folder / SAFE_WEIGHTS_INDEX_NAME
        if index_file.is_file():
            index = json.loads(index_file.read_text())
            index.setdefault("metadata", {})["total_size"] = num_bytes
            if self.source.dequantizer is not None:
                index["weight_map"] = dict(self.source.file_of)
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        if name in self.others:
            return self.others[name]
        value = self.values[name.removeprefix(self.prefix)]
        keeps = dtype is not None or not value.is_floating_point()
        return value.detach().to("cpu", value.dtype if keeps else self.source.dtype_of(name))


def _turned_as(shape: tuple[int, ...] | None, value: Tensor) -> Tensor:
    """Transpose matrices of experts if only so they have this shape: transformers does it only when it loads them."""
    if value.ndim != 3 or shape in (None, tuple(value.shape)) or shape != tuple(value.mT.shape):
        return value
    with torch.no_grad():
        return value.mT
