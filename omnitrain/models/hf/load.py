"""Build or load HuggingFace models; loading fails unless every tensor fits."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as hf_logging

from omnitrain.errors import UserError, WeightsError
from omnitrain.models.discovery.model_errors import refusing
from omnitrain.models.hf.conversions import experts_apart_are_read
from omnitrain.models.hf.quantized import QUANTIZATION, dequantizing, partial_blocks_are_dequantized
from omnitrain.models.hf.stored_tensor import StoredTensor, stored_tensors
from omnitrain.models.hf.stored_values import FILES
from omnitrain.recipe.suggest import nearest
from omnitrain.torch_private import unsaved_buffers_of
from omnitrain.transformers_private import (
    auto_mapping,
    names_not_in_model,
    set_attention_of_all,
    set_conversions_of_weights,
    tied_weights,
)

OWN_HEAD = (
    "the foundation's config ties its head to the embeddings, but its checkpoint has different weights for both: both "
    "are trained, and saved models have `tie_word_embeddings: false`"
)

_ROWS = 4096


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether a config ties the head to the embeddings; not all have the key."""
    return bool(getattr(config, "tie_word_embeddings", False))


def untie_as_in_files(config: PreTrainedConfig, kind: type[PreTrainedModel], path: str) -> bool:
    """Let ``config`` not tie the head if local safetensors files have another head; return whether they have."""
    pairs = tied_weights(kind)
    if not is_tied(config) or not isinstance(pairs, Mapping) or len(pairs) != 1:
        return False
    tensors = stored_tensors(_files(path))
    # In files of older classes, other modules are around the module that has the weight.
    ends = [".".join(name.rsplit(".", 2)[-2:]) for name in next(iter(pairs.items()))]
    found = [[name for name in tensors if f".{name}".endswith(f".{end}")] for end in ends]
    has_own = False
    if all(len(names) == 1 for names in found):
        one, other = (tensors[name] for (name,) in found)
        parts = zip(one.split(_ROWS), other.split(_ROWS), strict=False)
        has_own = one.shape != other.shape or any(not torch.equal(a, b.to(a.dtype)) for a, b in parts)
    FILES.close()
    if has_own:
        for part in (config, config.get_text_config(decoder=True)):  # some classes copy the text model's to the whole
            part.tie_word_embeddings = False
    return has_own


def require_tied(model: PreTrainedModel, path: str) -> None:
    """Raise WeightsError if a loaded model does not tie what its config says: the weights differ in the files."""
    lost = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if lost:
        raise WeightsError(
            f"the config at {path!r} ties {', '.join(sorted(lost))} to other weights, but the files have different "
            "values for both; set `tie_word_embeddings: false` in its config.json, also in its `text_config` if it "
            "has one"
        )


def _files(path: str) -> list[str]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, allow_patterns="*.safetensors", local_files_only=True))
        except (OSError, ValueError):  # not downloaded yet
            return []
    return sorted(map(str, folder.glob("*.safetensors")))


def counted(model: PreTrainedModel, names: set[str]) -> dict[str, int]:
    """Count the tensors ``names``, which a model does not have, by the missing module that they belong to.

    ``mtp.fc.weight`` counts as ``mtp.*``; names of buffers that the model computes do not count.
    """
    modules = {name for name, _ in model.named_modules()}
    buffers = {name for module in model.modules() for name in unsaved_buffers_of(module)}
    counts: Counter[str] = Counter()
    for name in sorted(name for name in names if name.rpartition(".")[2] not in buffers):
        parts = name.split(".")
        known = next(n for n in range(len(parts) + 1) if ".".join(parts[: n + 1]) not in modules)
        counts[name if known == len(parts) - 1 else ".".join([*parts[: known + 1], "*"])] += 1
    return dict(counts)


def unused_line(unused: Mapping[str, int] | None) -> str:
    """Return the line that reports unused tensors; empty: none are unused."""
    if not unused:
        return ""
    return (
        f"the foundation's checkpoint holds {sum(unused.values())} tensors that this model does not use: "
        f"{listed(unused)}; they are not trained or saved; an export of the foundation alone copies them"
    )


def listed(unused: Mapping[str, int]) -> str:
    """Return the modules and numbers of unused tensors in words."""
    return ", ".join(f"{module} ({count})" for module, count in unused.items())


_ALIGNMENT = 64  # bytes; torch allocates CPU tensors with it

Source: TypeAlias = str | dict[str, Any] | PreTrainedConfig | PreTrainedModel


def as_config(values: dict[str, Any]) -> PreTrainedConfig:
    """Build the HF config of a plain dict with ``model_type``; raise UserError if that is missing or unknown."""
    rest = dict(values)
    model_type = rest.pop("model_type", None)
    if model_type is None:
        raise UserError(
            f"a config needs `model_type`, found the keys {sorted(rest)}; give the keys of one HF config, or the "
            "folder or Hub id of a model as a string"
        )
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model_type {model_type!r} is unknown to transformers; if it is your class, first import the module that "
            "registers it with AutoConfig and AutoModel"
        )
    return AutoConfig.for_model(model_type, **rest)


def as_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """Convert a config to plain JSON values; :func:`as_config` is the inverse."""
    return json.loads(config.to_json_string(use_diff=False))


def take_own_configs(models: Iterable[nn.Module]) -> None:
    """Replace the configs of modules by copies (shared ones stay shared), since choices are written there."""
    copies: dict[int, Any] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


def resolve(
    source: Source,
    class_of: Callable[[PreTrainedConfig], type[PreTrainedModel]] | None = None,
    dtype: torch.dtype | None = None,
    part_of: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None,
) -> PreTrainedModel:
    """Load or build the model that ``source`` names: Hub id or folder, config or its dict (random weights), or a model.

    ``class_of``: config -> class; None: :func:`model_class`. ``dtype``: of the weights; None: fp32 for random ones,
    else the checkpoint's. ``part_of``: config -> sub-config to build. Raises UserError: no model at the path, an
    unknown architecture, or a config that its class does not take; WeightsError: tensors do not fit.
    """
    class_of, part_of = class_of or model_class, part_of or (lambda config: config)
    if isinstance(source, str):
        config = part_of(config_at(source))
        return load_strictly(class_of(config), source, dtype, allow_extra=True, config=config)
    if not isinstance(source, (dict, PreTrainedConfig)):
        return source if dtype is None else source.to(dtype)
    config = part_of(as_config(source) if isinstance(source, dict) else source)
    kind = class_of(config)
    with refusing(f"{kind.__name__} cannot be built from this config"):
        return kind(config).to(dtype or torch.float32)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return AutoModel's class for ``config``, else its only class (VQ tokenizers); UserError: there is not one."""
    classes = _mapped(config, "AutoModel")
    if not classes:  # classes in the config's modeling file that are annotated with this config class
        annotated = (cls for cls in _modeling_classes(config) if "config" in inspect.get_annotations(cls))
        classes = [cls for cls in annotated if cls.config_class is type(config)]
    if len(classes) != 1:
        raise UserError(f"transformers cannot build a model of model_type {config.model_type!r} from its config")
    return classes[0]


def foundation_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the causal language model of ``config``: in its ``architectures``, an auto mapping, or its only one.

    Raises UserError: names the sub-configs that have such a class.
    """
    classes = _language_models(config)
    if classes and not config.is_encoder_decoder:
        return classes[0]
    inner = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    classes_of = {name: _language_models(part) for name, part in inner.items()}
    parts = [f"{name} ({of_part[0].__name__})" for name, of_part in classes_of.items() if of_part]
    raise UserError(
        f"model_type {config.model_type!r} is no causal language model: transformers has no decoder-only class for "
        "its config with a forward over tokens and a language-model head"
        + (f"; use one of its parts as the foundation: {', '.join(parts)}" if parts else "")
    )


def foundation_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return ``config``, or its only sub-config that reads media and generates text (thinker of Qwen-Omni)."""
    if _language_models(config):
        return config
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    methods = [f"get_{modality}_features" for modality in ("image", "video", "audio")]
    kinds = [(part, cls) for part in parts for cls in _language_models(part)[:1]]
    readers = [part for part, cls in kinds if any(hasattr(cls, name) for name in methods)]
    return readers[0] if len(readers) == 1 else config


def require_sub_configs(source: str | dict[str, Any]) -> None:
    """Raise UserError for missing sub-configs of a foundation, which transformers fills with full-size defaults.

    ``source``: a config as a dict, or its Hub id or folder. Older models have their text's keys at the top level.
    """
    if isinstance(source, dict):
        values, config, has_flat_text = source, as_config(source), False
        owner = f"the {values['model_type']!r} config"
    else:
        config = config_at(source)
        values, _ = PreTrainedConfig.get_config_dict(source)
        has_flat_text = "hidden_size" in values
        owner = f"the config at {source!r}"
    whole, config = config, foundation_config(config)
    if config is not whole:
        name = next(name for name, part in vars(whole).items() if part is config)
        values, owner = values.get(name, {}), f"{name} in {owner}"
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    if has_flat_text:
        text = config.get_text_config(decoder=True)
        parts = {name: part for name, part in parts.items() if part is not text}
    missing = [name for name in parts if name not in values]
    if missing:
        raise UserError(f"{owner} lacks {', '.join(missing)}; write the config of every part of the model")


_FOUNDATION_MAPPINGS = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")


def _language_models(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    named = _models(getattr(transformers, name, None) for name in config.architectures or ())
    mapped = [cls for mapping in _FOUNDATION_MAPPINGS for cls in _mapped(config, mapping)]
    exact = [cls for cls in [*named, *mapped] if cls.config_class is type(config)]
    # Another config's class may build this config, but the class of a sub-config would ignore the other sub-configs.
    parts = {type(part) for part in vars(config).values()}
    other = [cls for cls in mapped if cls.config_class not in parts]
    in_file = [cls for cls in _modeling_classes(config) if cls.config_class is type(config)]
    classes, only = (list(filter(_is_language_model, each)) for each in ([*exact, *other], in_file))
    return classes or (only if len(only) == 1 else [])


def _is_language_model(cls: type[PreTrainedModel]) -> bool:
    return cls.can_generate() and "input_ids" in inspect.signature(cls.forward).parameters


def _models(values: Iterable[Any]) -> list[type[PreTrainedModel]]:
    return [cls for cls in values if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]


def _mapped(config: PreTrainedConfig, auto_class: str) -> list[type[PreTrainedModel]]:
    mapped: Any = auto_mapping(auto_class).get(type(config), ())
    return list(mapped[:1]) if isinstance(mapped, tuple) else [mapped]


def _modeling_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    try:
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return []
    return _models(vars(module).values())


def config_at(path: str) -> PreTrainedConfig:
    """Return the HF config of a Hub id or folder, or raise UserError; without quantization: we build plain weights."""
    require_folder(path, "HF model")
    if (folder := Path(path).expanduser()).is_dir() and not (folder / CONFIG_NAME).is_file():
        raise UserError(f"no HF model at {path!r}: the folder has no {CONFIG_NAME}, which every HF model has")
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no HF model at {path!r}: {str(error).splitlines()[0]} "
            "A folder, or {config: {model_type: ...}}, needs no network"
        ) from None
    vars(config).pop(QUANTIZATION, None)
    return config


def require_folder(path: str, what: str) -> None:
    """Raise UserError if ``path`` looks local but does not exist; other names may be Hub ids (``org/name``)."""
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not Path(path).expanduser().is_dir():
        folder, parent = Path(path).absolute(), Path(path).parent
        close = nearest(folder.name, (entry.name for entry in parent.iterdir())) if parent.is_dir() else None
        advice = f"; did you mean {str(parent / close)!r}?" if close else ""
        raise UserError(f"no {what} at {path!r}: the folder {folder} does not exist{advice}")


def folder_with(path: str | Path, pattern: str, **hub: Any) -> Path:
    """Return the folder ``path``, or download the files ``pattern`` of a Hub repository; UserError: there is none."""
    require_folder(str(path), "checkpoint")
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    try:
        return Path(snapshot_download(str(path), allow_patterns=pattern, **hub))
    except (OSError, ValueError) as error:
        raise UserError(f"no checkpoint at {str(path)!r}: {str(error).splitlines()[0]}") from None


def load_strictly(
    cls: type[PreTrainedModel], path: str, dtype: torch.dtype | None = None, *, allow_extra: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Call ``cls.from_pretrained(path)`` and check that the files have exactly the model's tensors.

    Quantized weights (fp8, mxfp4) are dequantized for training. ``dtype``: of the weights; None: the checkpoint's.
    ``allow_extra``: accept tensors that the model does not have; ``unused_tensors`` counts them, and ``source_path``
    says where they are. Raises UserError: no such folder or weights, or transformers cannot dequantize them;
    WeightsError: names every tensor that is missing, unexpected, of another shape or not tied, and probable renames.
    """
    require_folder(path, cls.__name__)
    quantized = dequantizing(path) if "config" in kwargs else None
    if quantized is not None:
        kwargs["config"] = copy.deepcopy(kwargs["config"])
        setattr(kwargs["config"], QUANTIZATION, quantized)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # we report differences ourselves, shorter than the load table
    try:
        with names_not_in_model() as unused, experts_apart_are_read(), partial_blocks_are_dequantized():
            model, info = cls.from_pretrained(
                path, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot load {cls.__name__} from {path!r}: {str(error).splitlines()[0]}") from None
    finally:
        hf_logging.set_verbosity(verbosity)
    _raise_on_difference(cls, path, info, allow_extra)
    require_tied(model, path)
    if quantized is not None:
        _forget_quantization(model, dtype)
    _freeze_as_built(model)
    _copy_unaligned(model)
    folder = Path(path).expanduser()  # absolute, so that it stays valid in other working directories
    model.source_path = str(folder.absolute()) if folder.is_dir() else path
    model.unused_tensors = counted(model, unused)
    return model


def _forget_quantization(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Bring the model into the state after loading files without quantization."""
    set_conversions_of_weights(model, None)  # saving would revert the conversions of quantized files
    if dtype is not None:  # transformers did not cast dequantized tensors; fp32 tensors may have to stay fp32
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.to(dtype)


def _copy_unaligned(model: PreTrainedModel) -> None:
    """Copy unaligned tensors of memory-mapped files: kernels round differently on them."""
    for parameter in (each for each in model.parameters() if not isinstance(each, StoredTensor)):
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def _freeze_as_built(model: PreTrainedModel) -> None:
    """Restore the constructor's ``requires_grad`` (Whisper freezes its positions); loading sets all to True."""
    config = copy.deepcopy(model.config)
    set_attention_of_all(config, None)
    with torch.device("meta"):
        built = type(model)(config)
    trainable = {name: parameter.requires_grad for name, parameter in built.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])


def _raise_on_difference(cls: type[PreTrainedModel], path: str, info: dict[str, Any], allow_extra: bool) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    lines = []
    for name in missing:
        close = nearest(name, unexpected)
        lines.append(f"  missing: {name}" + (f" (renamed? the files hold {close})" if close else ""))
    lines += [f"  wrong shape: {name}: file {found}, model {wanted}" for name, found, wanted in info["mismatched_keys"]]
    if not allow_extra:
        lines += [f"  not in the model: {name}" for name in unexpected]
    if lines:
        raise WeightsError(
            f"the weights at {path!r} do not fit {cls.__name__}; load them with the config they were saved with, or "
            "repair the file:\n" + "\n".join(lines)
        )
