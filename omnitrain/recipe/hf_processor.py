"""Check arguments of a HuggingFace image processor or feature extractor: transformers itself accepts any key."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from typing import Any

from omnitrain.recipe.strict import Problem, raise_located
from omnitrain.recipe.suggest import hint

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
        raise_located("HF processor", _problems(value))
    return value


def _problems(value: dict[Any, Any]) -> Iterator[Problem]:
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
