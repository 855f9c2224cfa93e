"""HuggingFace models from a path, a config or a module: built fresh, or loaded all-or-error."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as hf_logging

from omnitrain.errors import UserError, WeightsError
from omnitrain.models.discovery.model_errors import refusing
from omnitrain.models.hf.unused_weights import counted, names_not_in_model
from omnitrain.recipe.suggest import nearest

_ALIGNMENT = 64  # bytes, of torch's own CPU allocations
_QUANTIZED, _DEQUANTIZE = "quantization_config", "dequantize"  # of a config; of that node

Source: TypeAlias = str | dict[str, Any] | PreTrainedConfig | PreTrainedModel


def as_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The HF config of a plain dict with ``model_type``.

    Raises:
        UserError: there is no ``model_type``, or nobody registered it.
    """
    rest = dict(values)
    model_type = rest.pop("model_type", None)
    if model_type is None:
        raise UserError(
            f"a config needs `model_type`, found the keys {sorted(rest)}; give the keys of one HF config, or the "
            "folder or Hub id of a model as a string"
        )
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model_type {model_type!r} is unknown to transformers; if it is a class of your own, import the module "
            "that registers it with AutoConfig and AutoModel first"
        )
    return AutoConfig.for_model(model_type, **rest)


def as_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as plain JSON values; :func:`as_config` is the inverse."""
    return json.loads(config.to_json_string(use_diff=False))


def resolve(
    source: Source,
    class_of: Callable[[PreTrainedConfig], type[PreTrainedModel]] | None = None,
    dtype: torch.dtype | None = None,
    part_of: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None,
) -> PreTrainedModel:
    """A model from any way of naming one.

    Args:
        source: Hub id or folder (pretrained weights), config or dict of one (random weights), or a model.
        class_of: which class builds a config; None: :func:`model_class`.
        dtype: of the weights; None: fp32 for fresh weights, the checkpoint's own for loaded ones.
        part_of: which part of a config is built; None: all of it.

    Raises:
        UserError: nothing there, an unknown architecture, or a config that its class does not take.
        WeightsError: tensors missing, renamed or of another shape.
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
    """The class that builds ``config``: AutoModel's, else the only model of that config (VQ tokenizers).

    Raises:
        UserError: there is none.
    """
    found = _mapped(config, "AutoModel") or _owners(config)
    if len(found) != 1:
        raise UserError(f"model_type {config.model_type!r} is no model that transformers can build from its config")
    return found[0]


def foundation_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class with a forward over tokens and a language-model head that builds ``config``, multimodal or not.

    It is the config's own ``architectures`` entry, else the class that an auto mapping names, else the only class of
    that config that generates.

    Raises:
        UserError: there is none; names the parts of the config that have one.
    """
    classes = _language_models(config)
    if classes and not config.is_encoder_decoder:
        return classes[0]
    parts = [
        f"{name} ({found[0].__name__})"
        for name, part in vars(config).items()
        if isinstance(part, PreTrainedConfig) and (found := _language_models(part))
    ]
    raise UserError(
        f"model_type {config.model_type!r} is no causal language model: from its config, transformers builds no "
        "decoder-only model with a forward over tokens and a language-model head"
        + (f"; one of its parts can be the foundation: {', '.join(parts)}" if parts else "")
    )


def foundation_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the foundation in that of a model: the whole, or the only part that reads media and writes text.

    The whole is no language model where a model speaks in stages, as Qwen-Omni does with thinker, talker and vocoder.
    """
    if _language_models(config):
        return config
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    readers = [part for part in parts if any(_reads_media(cls) for cls in _language_models(part)[:1])]
    return readers[0] if len(readers) == 1 else config


def _reads_media(cls: type[PreTrainedModel]) -> bool:
    return any(hasattr(cls, f"get_{modality}_features") for modality in ("image", "video", "audio"))


def require_sub_configs(source: str | dict[str, Any]) -> None:
    """The config of a foundation names all its parts; transformers would fill a missing one with a full-size default.

    Args:
        source: a config as a dict, or the Hub id or folder of one. Files of older models write the keys of their
            language model beside the parts; such a part is not missing.

    Raises:
        UserError: names the missing parts.
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
        raise UserError(f"{owner} lacks {', '.join(missing)}; write every part of the model")


_FOUNDATION_MAPPINGS = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")


def _language_models(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    named: list[type[PreTrainedModel]] = [
        cls for cls in known if isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    ]
    mapped = [cls for mapping in _FOUNDATION_MAPPINGS for cls in _mapped(config, mapping)]
    own = [cls for cls in [*named, *mapped] if cls.config_class is type(config)]
    # A config without a model of its own is built by another's; that of one of its parts would leave out the rest.
    parts = {type(part) for part in vars(config).values()}
    borrowed = [cls for cls in mapped if cls.config_class not in parts]
    classes = [cls for cls in [*own, *borrowed] if _is_language_model(cls)]
    beside = [cls for cls in _classes_beside(config) if cls.config_class is type(config) and _is_language_model(cls)]
    return classes or (beside if len(beside) == 1 else [])


def _is_language_model(cls: type[PreTrainedModel]) -> bool:
    return cls.can_generate() and "input_ids" in inspect.signature(cls.forward).parameters


def _mapped(config: PreTrainedConfig, auto_class: str) -> list[type[PreTrainedModel]]:
    """The class that an auto class of transformers names for the config, if any."""
    mapping = getattr(transformers, auto_class)._model_mapping
    if type(config) not in mapping:
        return []
    found = mapping[type(config)]
    return [found[0] if isinstance(found, tuple) else found]


def _owners(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Classes made for this very config class, in the modelling file beside it."""
    return [
        member
        for member in _classes_beside(config)
        if "config" in inspect.get_annotations(member) and member.config_class is type(config)
    ]


def _classes_beside(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    try:
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return []
    return [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]


def config_at(path: str) -> PreTrainedConfig:
    """The HF config of a Hub id or folder; how its files are quantized is not in it, for what is built of it is not.

    Raises:
        UserError: there is none.
    """
    require_folder(path, "HF model")
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"no HF model at {path!r}: {str(error).splitlines()[0]}") from None
    vars(config).pop(_QUANTIZED, None)
    return config


def require_folder(path: str, what: str) -> None:
    """A name that can only be a local folder must be one; others may be Hub ids (``org/name``).

    Raises:
        UserError: names the folder that was looked for, and the nearest one there is.
    """
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not Path(path).expanduser().is_dir():
        raise UserError(f"no {what} at {path!r}: no folder {Path(path).absolute()}{_nearest_folder(path)}")


def folder_with(path: str | Path, pattern: str, **hub: Any) -> Path:
    """The folder ``path``, or the one into which the files of a Hub repository that match ``pattern`` are downloaded.

    Args:
        path: folder or Hub id.
        pattern: glob, relative to the repository.
        **hub: for ``snapshot_download``.

    Raises:
        UserError: neither is there.
    """
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
    """``cls.from_pretrained(path)`` in which every tensor of the model was in the files, and every file tensor used.

    Quantized weights (fp8, mxfp4) are put back into what can be trained, on any device.

    Args:
        cls: model class.
        path: folder or Hub id.
        dtype: of the weights; None: the checkpoint's own.
        allow_extra: tensors in the files that the model does not have are fine (a tower from a whole model); its
            attribute ``unused_tensors`` counts them.
        **kwargs: for ``from_pretrained``.

    Raises:
        UserError: no such folder, or no weights in it, or weights quantized in a way that cannot be undone.
        WeightsError: names every missing, unexpected or misshapen tensor, and probable renames.
    """
    require_folder(path, cls.__name__)
    quantized = _dequantized(path) if "config" in kwargs else None
    if quantized is not None:
        kwargs["config"] = copy.deepcopy(kwargs["config"])
        setattr(kwargs["config"], _QUANTIZED, quantized)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # the report below says it better than the load table
    try:
        with names_not_in_model() as unused:
            model, info = cls.from_pretrained(
                path, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot load {cls.__name__} from {path!r}: {str(error).splitlines()[0]}") from None
    finally:
        hf_logging.set_verbosity(verbosity)
    _raise_on_difference(cls, path, info, allow_extra)
    if quantized is not None:
        _forget_quantization(model, dtype)
    _freeze_as_built(model)
    _align(model)
    model.unused_tensors = counted(model, unused)
    return model


def _dequantized(path: str) -> dict[str, Any] | None:
    """How the files of a model are quantized, with the order to undo it; None: they are not.

    Raises:
        UserError: transformers cannot undo it.
    """
    found = PreTrainedConfig.get_config_dict(path)[0].get(_QUANTIZED)
    if found is None:
        return None
    method = found.get("quant_method")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or _DEQUANTIZE not in inspect.signature(kind).parameters:
        raise UserError(
            f"the weights at {path!r} are quantized ({method}), which cannot be undone in loading; name the model that "
            "was quantized"
        )
    return found | {_DEQUANTIZE: True}


def _forget_quantization(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """As loaded from files that never were quantized."""
    model._weight_conversions = None  # those of such files would be undone where it is saved
    if dtype is not None:  # transformers casts all but what was quantized; what is in fp32 may have to stay in it
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.to(dtype)


def _align(model: PreTrainedModel) -> None:
    """Files are mapped into memory as they are; kernels round otherwise on tensors that begin at odd addresses."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def _freeze_as_built(model: PreTrainedModel) -> None:
    """Loading makes every parameter trainable; a model that freezes parts of itself (Whisper's positions) means it."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = None
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


def _nearest_folder(path: str) -> str:
    parent = Path(path).parent
    if not parent.is_dir():
        return ""
    close = nearest(Path(path).name, (entry.name for entry in parent.iterdir()))
    return f"; did you mean {str(parent / close)!r}?" if close else ""
