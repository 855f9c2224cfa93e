"""Check arguments of a HuggingFace image processor or feature extractor: transformers itself accepts any key."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from omnitrain.recipe.located_problem import located
from omnitrain.recipe.suggest import hint

_TYPE_KEYS = {"image_processor_type", "feature_extractor_type"}
# Classes that `omnitrain.models.omni.build` uses without a named type; the tower determines which one.
_UNNAMED = (
    ("image_processor_type", "SiglipImageProcessor"),
    ("image_processor_type", "Qwen2VLImageProcessor"),
    ("feature_extractor_type", "WhisperFeatureExtractor"),
)


def check_hf_processor_keys(value: Any) -> Any:
    """Check the arguments of a HF image processor or feature extractor, including sizes, and return them unchanged.

    Raises:
        ValidationError: every unknown type, and every key that the class does not have (without a named type: that no
            default class has), located at the key, with the nearest valid key.
    """
    if isinstance(value, dict):
        problems = _problems(value)
        if problems:
            raise ValidationError.from_exception_data("HF processor", problems)
    return value


def _problems(value: dict[Any, Any]) -> list[InitErrorDetails]:
    from transformers.image_utils import SizeDict

    named = [(key, str(value[key])) for key in sorted(_TYPE_KEYS & value.keys())]
    for key, name in named:
        if _class_of(key, name) is None:
            return [located(f"found {name!r}; expected a class of the installed transformers; change it", (key,), name)]
    valid = _TYPE_KEYS.union(*(_argument_names(_class_of(key, name)) for key, name in named or _UNNAMED))
    problems = _unknown_keys(value, valid)
    counts = set().union(*(_counts(_class_of(key, name)) for key, name in named or _UNNAMED))
    problems += [problem for key, given in value.items() if key in counts for problem in _not_positive(given, (key,))]
    for key, given in value.items():
        if str(key).endswith("size") and isinstance(given, dict):
            problems += _unknown_keys(given, set(SizeDict.__annotations__), (str(key),))
            problems += [problem for side, length in given.items() for problem in _not_positive(length, (key, side))]
    return problems


def _unknown_keys(value: dict[Any, Any], valid: Set[str], at: tuple[str, ...] = ()) -> list[InitErrorDetails]:
    return [
        located(f"unknown key, found {given!r}; {hint(str(key), valid)}", (*at, str(key)), given)
        for key, given in value.items()
        if key not in valid
    ]


def _not_positive(given: Any, at: tuple[str, ...]) -> list[InitErrorDetails]:
    if not isinstance(given, (int, float)) or given > 0:
        return []
    return [located(f"found {given!r}; expected a number greater than 0; change it", at, given)]


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


def _counts(processor_class: Any) -> set[str]:
    """Return arguments whose default is a positive integer (rates, lengths, numbers of bins); none may be 0."""
    return {name for name, default in processor_class().to_dict().items() if type(default) is int and default > 0}
