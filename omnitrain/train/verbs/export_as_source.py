"""Export a foundation with the names, dtypes and files of the checkpoint from which it was loaded."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from omnitrain.data.chat.text_tokenizer import load_hf_processor, load_tokenizer
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.errors import UserError
from omnitrain.models.hf.load import config_at, counted, foundation_config, is_tied, listed
from omnitrain.models.hf.quantized import QUANTIZATION
from omnitrain.models.hf.source_checkpoint import MatchedWeights

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".gguf")
_OF_PROCESSOR = ("token", "processor", "preprocessor", "template", "vocab", "merges")


def export_as_source(
    model: PreTrainedModel, processor: OmniProcessor, matched: MatchedWeights, folder: Path, dtype: torch.dtype | None
) -> str:
    """Write the files of the source, with the weights, the vocabulary and the end token of the model.

    ``model``: the foundation, or its part with the weights ``matched``. Files of a processor come from that of the
    model if it writes others. ``dtype`` None: that of the source. Returns the rest of a sentence: about quantization,
    and tensors that were copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = matched.source.folder
    matched.write(folder, dtype)
    keeps_processor = _is_processor_of(processor, source)
    for file in _other_files(source):
        if keeps_processor or not any(word in file.name for word in _OF_PROCESSOR):
            shutil.copyfile(file, folder / file.name)
    if not keeps_processor:
        processor.renderer.save_pretrained(folder)
    _change_configs(folder, config_at(str(source)), model, processor.end_token, dtype)
    dequantized = ", which is not quantized" if matched.source.dequantizer is not None else ""
    if not matched.others:
        return dequantized
    counts = counted(model, {name.removeprefix(matched.prefix) for name in matched.others})
    said = f": {listed(counts)}" if counts else ""
    return f"{dequantized}; copied {len(matched.others)} tensors that this model does not use from {source}{said}"


def _other_files(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith((".", "README")):
            yield file


def _is_processor_of(processor: OmniProcessor, source: Path) -> bool:
    """Whether the model's processor writes the files that the processor of the source writes."""
    if not isinstance(processor.renderer, TemplateRenderer):
        return False
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        processor.renderer.save_pretrained(Path(one))
        try:
            load_hf_processor(source).save_pretrained(other)
        except UserError:
            load_tokenizer(str(source), "model.tokenizer").save_pretrained(other)
        names = sorted(path.name for path in Path(one).iterdir())
        return names == sorted(path.name for path in Path(other).iterdir()) and (
            filecmp.cmpfiles(one, other, names, shallow=False)[0] == names
        )


def _change_configs(
    folder: Path, whole: PreTrainedConfig, model: PreTrainedModel, end: int, dtype: torch.dtype | None
) -> None:
    """Write vocabulary, end token, ``dtype`` and own head into the configs, where they differ."""
    raw = json.loads((folder / CONFIG_NAME).read_text())
    part = foundation_config(whole)
    text = _node(raw, _path_of(whole, part.get_text_config(decoder=True)) or [])
    generation_file = folder / GENERATION_CONFIG_NAME
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    before = json.dumps([raw, generation])
    raw.pop(QUANTIZATION, None)
    if is_tied(part) and not is_tied(model.config):
        text["tie_word_embeddings"] = _node(raw, _path_of(whole, part) or [])["tie_word_embeddings"] = False
    rows = model.get_input_embeddings().weight.size(0)
    if text.get("vocab_size", rows) != rows:
        text["vocab_size"] = rows
    known = generation.get("eos_token_id", text.get("eos_token_id"))
    ends = [known] if isinstance(known, int) else list(known or ())
    if end not in ends:
        for config in (text, generation):
            config["eos_token_id"] = [end, *ends] if ends else end
    if dtype is not None:
        _set_dtype(raw, str(dtype).removeprefix("torch."))
    if json.dumps([raw, generation]) != before:
        (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n")
        generation_file.write_text(json.dumps(generation, indent=2) + "\n")


def _path_of(config: PreTrainedConfig, part: PreTrainedConfig) -> list[str] | None:
    """The names of the sub-configs that lead to ``part``; None: ``config`` does not have it."""
    if config is part:
        return []
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig) and (path := _path_of(inner, part)) is not None:
            return [name, *path]
    return None


def _node(raw: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The node of a config file at ``path``; some files write the values of a text config one level higher."""
    for name in path:
        raw = raw.get(name, raw)
    return raw


def _set_dtype(raw: dict[str, Any], dtype: str) -> None:
    for key, value in raw.items():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            raw[key] = dtype
