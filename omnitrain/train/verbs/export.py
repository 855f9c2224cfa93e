"""Export a saved model for transformers: as one of its classes if there is one for it, else as an omni folder."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import LlavaProcessor, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from omnitrain.checkpoint.store import free_bytes, size_text
from omnitrain.data.chat.text_tokenizer import load_hf_processor, load_tokenizer
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import MODALITIES
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.adapters.lora import merge_lora
from omnitrain.models.encoders.vision import VisionAdapter
from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.hf.load import as_dict, config_at, counted, foundation_config, is_tied, listed
from omnitrain.models.hf.quantized import QUANTIZATION
from omnitrain.models.hf.source_checkpoint import MatchedWeights, SourceCheckpoint
from omnitrain.models.hf.stored_tensor import operations_recorded, weights_left_in_files
from omnitrain.models.hf.stored_values import FILES
from omnitrain.models.omni.build import cast_decoder
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.save import save_whole
from omnitrain.models.omni.transformers_class import as_transformers_class
from omnitrain.peers import SINGLE_PROCESS
from omnitrain.recipe import ChatFormat
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.metrics.progress import weights_shown

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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IMAGE = "<|image_pad|>"  # stands for one feature of an image, where the tokenizer has no token for it


def export(
    checkpoint: str | Path,
    folder: str | Path,
    dtype: str | None = None,
    *,
    foundation_only: bool = False,
    source: str | None = None,
    ema: bool = False,
) -> str:
    """Write the files that ``from_pretrained`` of transformers reads, and return a sentence about what was written.

    A whole HF model is written with the names, dtypes, files and configs of the checkpoint ``source`` from which it was
    loaded (None: where it was); tensors of that checkpoint that the model does not have are copied. Without such a
    checkpoint, it is written as its class. A model of a vision tower, a projector and a language model is written as
    LLaVA or VipLLaVA, if one of these gives the same logits. Other models are written as an omni folder, which
    omnitrain reads. LoRA adapters are merged into the weights. The config names the end token of the chat format, and
    the tokenizer has the chat template.

    ``dtype`` None: as in the source, else as saved; what the model's class keeps in fp32, and media tokenizers, stay
    fp32. ``foundation_only`` leaves out attached components, ``ema`` writes the averages of ``train.ema``. Raises
    UserError: the model or its averages do not exist, the folder has files, the dtype is unknown, or ``source`` is not
    the checkpoint of the foundation; TrainingError: an error of the disk.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} already has files; use a new folder")
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"dtype: found {dtype!r}; expected one of {', '.join(_DTYPES)}")
    wanted = None if dtype is None else _DTYPES[dtype]
    quiet_libraries()
    with weights_left_in_files():
        model, processor = load_checkpoint(checkpoint, averaged=ema)
        model.give_back_decoders()
    with operations_recorded():
        merge_lora(model, wanted)
        if wanted is not None:
            for component in (model.foundation, *model.encoders.values()):
                _cast(component, wanted)
            for decoder in model.decoders.values():
                cast_decoder(decoder, wanted)
    has_class = foundation_only or not (model.encoders or model.decoders)
    if source is not None and not has_class:
        raise UserError("--source: only an export of the foundation's class has its files; add --foundation-only")
    try:
        with weights_shown(console):
            if has_class:
                return _write_foundation(model, processor, folder, wanted, source)
            return _write_with_components(model, processor, folder) + _left_out(model)
    except OSError as error:
        free = size_text(free_bytes(folder))
        raise TrainingError(f"the export to {folder} is not complete: {error}; {free} are free there") from error
    finally:
        FILES.close()


def _write_foundation(
    model: OmniModel, processor: OmniProcessor, folder: Path, dtype: torch.dtype | None, source: str | None
) -> str:
    exported = f"exported to {folder} as {type(model.foundation).__name__}"
    _set_chat_template(processor)
    reason, path = "", source if source is not None else model.config.source_path
    if path is not None:
        try:
            matched = SourceCheckpoint.open(path).matched(model.foundation)
        except UserError as error:
            if source is not None:
                raise
            reason = f", without the files of its source: {error}; --source can name another copy of it"
        else:
            return exported + export_as_source(model.foundation, processor, matched, folder, dtype)
    _set_end_token(model, processor)
    save_whole(model.foundation, folder, SINGLE_PROCESS)
    processor.renderer.save_pretrained(folder)
    return exported + reason + _left_out(model)


def _write_with_components(model: OmniModel, processor: OmniProcessor, folder: Path) -> str:
    foundation = type(model.foundation).__name__
    _set_end_token(model, processor)
    try:
        whole = as_transformers_class(model)
    except UserError as reason:
        model.config.foundation = as_dict(model.foundation.config)
        save_whole(model, folder, SINGLE_PROCESS)
        _set_chat_template(processor)
        processor.save_pretrained(folder)
        return (
            f"exported to {folder} as an omni folder, which only omnitrain reads: {reason} "
            f"(--foundation-only writes the {foundation} alone)"
        )
    _save_whole(whole, model, processor, folder)
    return f"exported to {folder} as {type(whole).__name__}, which reads images, but not videos as this model does"


def _left_out(model: OmniModel) -> str:
    unused = model.config.unused_tensors
    if not unused:
        return ""
    return (
        f"; left out {sum(unused.values())} tensors of the foundation's checkpoint that this model does not use: "
        f"{listed(unused)}"
    )


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast weights and buffers, except those that the model keeps in fp32, as transformers does when it loads them."""
    stays = stays_fp32(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not stays(name):
            tensor.data = tensor.data.to(dtype)


def _set_end_token(model: OmniModel, processor: OmniProcessor) -> None:
    """Put the token that ends an answer first among those that end generation."""
    foundation: Any = model.foundation
    known = foundation.generation_config.eos_token_id
    ends = [known] if isinstance(known, int) else list(known or ())
    ends = [processor.end_token, *(end for end in ends if end != processor.end_token)]
    for config in (foundation.generation_config, foundation.config.get_text_config(decoder=True)):
        config.eos_token_id = ends if len(ends) > 1 else ends[0]


def _set_chat_template(processor: OmniProcessor) -> None:
    """Give the tokenizer the chat format of ``data.chat`` as a template, and its end token."""
    renderer = processor.renderer
    if isinstance(renderer, ChatRenderer):
        starts = {
            modality: getattr(renderer.chat, modality) for modality in MODALITIES if modality in processor.start_tokens
        }
        renderer.tokenizer.chat_template = template_of(renderer.chat, starts)
        renderer.tokenizer.eos_token = renderer.chat.end


def _save_whole(whole: Any, model: OmniModel, processor: OmniProcessor, folder: Path) -> None:
    """Save a model that reads images: weights, and a processor that writes the start token and the placeholders."""
    tokenizer, (reader,) = processor.tokenizer, processor.readers["image"].values()
    adapter = cast(VisionAdapter, reader)
    start = tokenizer.convert_ids_to_tokens(processor.start_tokens["image"])
    placeholder = getattr(tokenizer, "image_token", None) or _IMAGE
    if placeholder == start:
        placeholder = f"{start}_pad"
    tokenizer.add_tokens([placeholder], special_tokens=True)
    whole.config.image_token_id = tokenizer.convert_tokens_to_ids(placeholder)
    rows = whole.get_input_embeddings().weight.size(0)
    if len(tokenizer) > rows:
        whole.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for embedding in (whole.get_input_embeddings(), whole.get_output_embeddings()):
            torch.nn.init.zeros_(embedding.weight[rows:])
    whole.generation_config = model.foundation.generation_config
    whole.generation_config.suppress_tokens = [whole.config.image_token_id]  # nobody trained it
    save_whole(whole, folder, SINGLE_PROCESS)
    _set_chat_template(processor)
    renderer, shown = processor.renderer, {"image": start + placeholder}
    if isinstance(renderer, ChatRenderer):
        tokenizer.chat_template = template_of(renderer.chat, shown)
    else:
        tokenizer.chat_template = template_with_media(tokenizer.chat_template, shown)
    LlavaProcessor(
        adapter.processor,
        tokenizer,
        patch_size=adapter.tower.patch_size * adapter.merge,  # an image has (side / patch_size) ** 2 placeholders
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
        image_token=placeholder,
    ).save_pretrained(folder)


def template_of(chat: ChatFormat, media: Mapping[str, str]) -> str:
    """Return a Jinja template that writes as ``chat`` does; ``media``: modality -> text of an item; no others."""
    openings = {role: getattr(chat, role) for role in ("system", "user", "assistant")}
    return (
        f"{{%- set openings = {_literal(openings)} -%}}{{%- set media = {_literal(media)} -%}}"
        "{%- for m in messages -%}{{- openings[m['role']] -}}"
        "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}{%- for c in m['content'] or [] -%}"
        "{{- c['text'] if c['type'] == 'text' else media.get(c['type'], '') -}}{%- endfor -%}{%- endif -%}"
        f"{{{{- {_literal(chat.end + chat.separator)} -}}}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{- openings['assistant'] -}}{%- endif -%}"
    )


def template_with_media(template: str, media: Mapping[str, str]) -> str:
    """Return a template that shows ``media`` (modality -> text of an item) as text to ``template``."""
    return (
        f"{{%- set media = {_literal(media)} -%}}{{%- set shown = namespace(messages=[]) -%}}"
        "{%- for m in messages -%}{%- if m['content'] is string or not m['content'] -%}"
        "{%- set shown.messages = shown.messages + [m] -%}{%- else -%}{%- set parts = namespace(all=[]) -%}"
        "{%- for c in m['content'] -%}{%- set parts.all = parts.all + "
        "[{'type': 'text', 'text': media[c['type']]} if c['type'] in media else c] -%}{%- endfor -%}"
        "{%- set shown.messages = shown.messages + [dict(m, content=parts.all)] -%}{%- endif -%}{%- endfor -%}"
        "{%- set messages = shown.messages -%}" + template
    )


def _literal(value: str | Mapping[str, str]) -> str:
    """Write texts, and dicts of texts, as Jinja reads them."""
    return json.dumps(value if isinstance(value, str) else dict(value), ensure_ascii=False)
