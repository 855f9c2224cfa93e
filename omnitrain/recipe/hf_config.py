"""Check dicts of HuggingFace config keys: transformers itself accepts any key, also a misspelt one."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from omnitrain.recipe.strict import Problem, raise_located
from omnitrain.recipe.suggest import hint

Location = tuple[str | int, ...]

# Accepted by every config class, without being a field.
_COMMON_KEYS = {
    *("model_type", "num_labels", "output_attentions", "per_layer_config", "tie_word_embeddings", "torch_dtype"),
}
# Older keys that every class with `rope_parameters` converts.
_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
# Read by some models, but missing in HF's `RopeParameters`.
_MORE_ROPE_PARAMETERS = {
    *("alpha", "llama_4_scaling_beta", "long_mscale", "short_mscale"),
    *("max_position_embeddings", "mrope_interleaved", "type"),
}
# Integers that must be positive; HF accepts 0 and divides by it later.
_SIZES = {
    *("hidden_size", "num_attention_heads", "vocab_size"),
    *("image_size", "patch_size"),
    *("hop_length", "n_fft", "num_mel_bins", "sampling_rate"),
    *("codebook_size", "num_embeddings"),
}
_KEY_READ_FROM_KWARGS = re.compile(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)["']""")
# A key with a default that is derived from fields: `getattr(config, "head_dim", config.hidden_size // ...)`.
_KEY_READ_BY_MODEL = re.compile(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["'],(.*)""")
_FIELD_READ = re.compile(r"\bconfig\.(\w+)")
_FIELD_IN_MESSAGE = re.compile(r"Validation error for field '(\w+)':\s*(?:\w+Error: )?")


def check_hf_config_keys(value: Any) -> Any:
    """Check the dict of a HF config, including sub-configs, before a model is built from it, and return it unchanged.

    A ValidationError has every unknown ``model_type`` or key, and every value that the class refuses, at its key.
    """
    if isinstance(value, dict):
        raise_located("HF config", _problems(value, ()))
    return value


@functools.cache
def config_keys(config_class: type[Any]) -> frozenset[str]:
    """Return the keys of a HF config class: fields, aliases, saved attributes, older names, keys its model reads."""
    parameters = inspect.signature(config_class.__init__).parameters.values()
    fields = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"}
    keys = fields | _saved_keys(config_class) | _COMMON_KEYS
    hooks = [vars(base).get("__post_init__") for base in _classes_of_architecture(config_class)]
    keys |= {key for hook in hooks if hook for key in _KEY_READ_FROM_KWARGS.findall(inspect.getsource(hook))}
    keys |= _keys_read_by_model(config_class, fields)
    if "rope_parameters" in fields:
        keys |= _ROPE_KEYS
    return frozenset(key for key in keys if not key.startswith("_"))


def _problems(value: dict[Any, Any], at: Location, config_class: type | None = None) -> list[Problem]:
    config_class = config_class or _config_class(value.get("model_type"))
    if config_class is None:
        return [((*at, "model_type"), _model_type_problem(value.get("model_type")))]
    valid, name = config_keys(config_class), config_class.__name__
    problems: list[Problem] = [
        ((*at, str(key)), f"unknown key of {name}, found {given!r}; {hint(str(key), valid)}")
        for key, given in value.items()
        if key not in valid
    ]
    problems += [
        ((*at, key), f"found {given!r}; expected a number greater than 0; change it")
        for key, given in value.items()
        if key in _SIZES and isinstance(given, int) and given <= 0
    ]
    for key, sub_class in _sub_config_classes(config_class, value).items():
        problems += _problems(value[key], (*at, key), sub_class)
    for key in {"rope_parameters", "rope_scaling"} & value.keys():
        problems += _rope_problems(value[key], (*at, key), config_class)
    return problems or _refused_values(value, at, config_class)


def _config_class(model_type: Any) -> type | None:
    from transformers import CONFIG_MAPPING

    if isinstance(model_type, str) and model_type.startswith("omnitrain"):
        from omnitrain.recipe.component_configs import CONFIGS

        if model_type in CONFIGS:
            return CONFIGS[model_type]
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 (its `get` does not load the class)


def _model_type_problem(model_type: Any) -> str:
    from transformers import CONFIG_MAPPING

    if model_type is None:
        return "missing; expected the name of a HF architecture, such as qwen3 or siglip_vision_model; add it"
    match = hint(str(model_type), [name for name in CONFIG_MAPPING if isinstance(name, str)])
    advice = match if match.startswith("did you mean") else "see the model types of AutoConfig"
    return f"found {model_type!r}; expected a model type of the installed transformers; {advice}"


def _rope_problems(value: Any, at: Location, config_class: type) -> Iterator[Problem]:
    """Check rotary parameters: one dict, or one dict per layer type."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.modeling_rope_utils import RopeParameters

    from omnitrain.transformers_private import labels_of_rope_types

    if not isinstance(value, dict):
        return
    parameters = {*RopeParameters.__annotations__, *_MORE_ROPE_PARAMETERS}
    layer_types = {*ALLOWED_LAYER_TYPES, *labels_of_rope_types(config_class)}
    for key, given in value.items():
        valid = layer_types if isinstance(given, dict) else parameters
        if key not in valid and not (given is None and key in layer_types):
            yield (*at, str(key)), f"unknown key, found {given!r}; {hint(str(key), valid)}"
        yield from _rope_problems(given, (*at, str(key)), config_class)


def _saved_keys(config_class: Any) -> set[str]:
    """Return aliases, settable properties and derived attributes: released config.json files contain all of them."""
    members = [member for base in _classes_of_architecture(config_class) for member in vars(base).items()]
    properties = {name for name, member in members if isinstance(member, property) and member.fset is not None}
    derived: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a class without defaults cannot be made without values
        derived = vars(config_class())
    return {*config_class.attribute_map, *derived, *properties}


def _keys_read_by_model(config_class: type, fields: Set[str]) -> set[str]:
    """Return keys that the model derives from ``fields`` by default, such as `head_dim` of Qwen3-MoE."""
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    spec = importlib.util.find_spec(module) if ".modeling_" in module else None
    if spec is None or spec.origin is None:
        return set()
    reads = _KEY_READ_BY_MODEL.findall(Path(spec.origin).read_text(encoding="utf-8"))
    sources = [(key, set(_FIELD_READ.findall(default))) for key, default in reads]
    return {key for key, derived_from in sources if derived_from and derived_from <= fields}


def _classes_of_architecture(config_class: type) -> list[type]:
    """Return the class and its parents below HF's base class, which has no keys of a specific architecture."""
    from transformers import PreTrainedConfig

    return [base for base in config_class.__mro__ if base not in PreTrainedConfig.__mro__]


def _sub_config_classes(config_class: type[Any], value: dict[Any, Any]) -> dict[str, type | None]:
    """Return the sub-configs that are dicts -> their class; None if their ``model_type`` determines the class."""
    from transformers import PreTrainedConfig

    classes: dict[str, type | None] = {}
    for key, declared in config_class.sub_configs.items():
        if not isinstance(value.get(key), dict):
            continue
        if issubclass(declared, PreTrainedConfig):
            classes[key] = declared
        elif "model_type" in value[key]:
            classes[key] = None
        else:
            default = getattr(config_class(), key, None)
            classes[key] = type(default) if isinstance(default, PreTrainedConfig) else None
    return classes


def _refused_values(value: dict[Any, Any], at: Location, config_class: type) -> list[Problem]:
    """Create the config without the fields that were refused, until the class accepts it."""
    arguments = copy.deepcopy(value)
    arguments.pop("model_type", None)
    problems: list[Problem] = []
    while True:
        try:
            config_class(**arguments)
        except Exception as error:  # classes raise different types; the user sees all of them
            field = _FIELD_IN_MESSAGE.match(str(error))
            reason = " ".join(_FIELD_IN_MESSAGE.sub("", str(error)).split())
            if field is None or field[1] not in arguments:
                # Without the removed fields the config may be inconsistent, so report only the earlier problems.
                return problems or [(at, f"{config_class.__name__} refuses it: {' '.join(str(error).split())}")]
            given = arguments.pop(field[1])
            problems.append(((*at, field[1]), f"found {given!r}; {reason}; change the value"))
        else:
            return problems


_TYPE_KEYS = {"image_processor_type", "feature_extractor_type"}
# Classes that `omnitrain.models.omni.build` uses without a named type; the tower determines which one.
_UNNAMED = (
    ("image_processor_type", "SiglipImageProcessor"),
    ("image_processor_type", "Qwen2VLImageProcessor"),
    ("feature_extractor_type", "WhisperFeatureExtractor"),
    ("feature_extractor_type", "Wav2Vec2FeatureExtractor"),
)


def check_hf_processor_keys(value: Any) -> Any:
    """Check the arguments of a HF image processor or feature extractor, including sizes, and return them unchanged.

    A ValidationError has every unknown type, and every key that the class, or else any default class, does not have.
    """
    if isinstance(value, dict):
        raise_located("HF processor", _processor_problems(value))
    return value


def _processor_problems(value: dict[Any, Any]) -> Iterator[Problem]:
    from transformers.image_utils import SizeDict

    named = [(key, str(value[key])) for key in sorted(_TYPE_KEYS & value.keys())]
    for key, name in named:
        if _class_of(key, name) is None:
            yield (key,), f"found {name!r}; expected a class of the installed transformers; change it"
            return
    classes = [_class_of(key, name) for key, name in named or _UNNAMED]
    yield from _unknown_keys(value, _TYPE_KEYS.union(*map(_argument_names, classes)))
    # Arguments whose default is a positive integer (rates, lengths, numbers of bins): none may be 0.
    defaults = [entry for found in classes for entry in found().to_dict().items()]
    counts = {name for name, default in defaults if type(default) is int and default > 0}
    for key, given in value.items():
        yield from _not_positive(given, (key,)) if key in counts else ()
        if str(key).endswith("size") and isinstance(given, dict):
            yield from _unknown_keys(given, set(SizeDict.__annotations__), (str(key),))
            for side, length in given.items():
                yield from _not_positive(length, (key, side))


def _unknown_keys(value: dict[Any, Any], valid: Set[str], at: tuple[str, ...] = ()) -> Iterator[Problem]:
    for key, given in value.items():
        if key not in valid:
            yield (*at, str(key)), f"unknown key, found {given!r}; {hint(str(key), valid)}"


def _not_positive(given: Any, at: tuple[str, ...]) -> Iterator[Problem]:
    if isinstance(given, (int, float)) and given <= 0:
        yield at, f"found {given!r}; expected a number greater than 0; change it"


def _class_of(type_key: str, name: str) -> Any:
    if type_key == "feature_extractor_type":
        from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name

        return feature_extractor_class_from_name(name)
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    base = name.removesuffix("Fast").removesuffix("Pil")
    return get_image_processor_class_from_name(f"{base}Pil") or get_image_processor_class_from_name(base)


def _argument_names(processor_class: Any) -> set[str]:
    inits = [vars(base)["__init__"] for base in processor_class.__mro__[:-1] if "__init__" in vars(base)]
    parameters = {name for init in inits for name in inspect.signature(init).parameters} - {"self", "args", "kwargs"}
    declared = getattr(processor_class, "valid_kwargs", None)
    return parameters | set(processor_class().to_dict()) | set(declared.__annotations__ if declared else ())
