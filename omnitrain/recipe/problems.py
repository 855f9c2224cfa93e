"""Convert pydantic's errors to one line each: the path, what was found and expected, and what to change."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from omnitrain.recipe.located_problem import LOCATED
from omnitrain.recipe.other_names import key_of, name_here
from omnitrain.recipe.suggest import hint, nearest

Path = tuple[str | int, ...]

_UNKNOWN = "extra_forbidden"  # pydantic's type for a key that a node does not have
_LONGEST_VALUE = 60  # characters of a value to show
_SUBJECT = re.compile(r"^\w+ should (?:be|have) ")
_NODE_CLASS = re.compile(r"a valid dictionary or instance of \w+")


@dataclass(frozen=True)
class _Spot:
    """The key in the typed tree that an error points to."""

    path: Path
    field: FieldInfo | None
    sibling_keys: tuple[str, ...]


def problem_lines(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line per problem, in pydantic's order.

    Omits a missing key if its misspelling is already a problem, and merges the branches of a union into one line.

    Args:
        error: raised by the validation of ``root``.
        root: class of the root of the tree.
    """
    details = error.errors(include_url=False)
    spots = [_locate(detail["loc"], root) for detail in details]
    meant = {
        (*spot.path[:-1], nearest(str(spot.path[-1]), spot.sibling_keys) or "")
        for spot, detail in zip(spots, details, strict=True)
        if detail["type"] == _UNKNOWN
    }
    groups: dict[Path, tuple[_Spot, list[ErrorDetails]]] = {}
    for spot, detail in zip(spots, details, strict=True):
        if detail["type"] != "missing" or spot.path not in meant:
            groups.setdefault(spot.path, (spot, []))[1].append(detail)
    return [_line(spot, group, root) for spot, group in groups.values()]


def _locate(location: Path, root: type[BaseModel]) -> _Spot:
    """Follow pydantic's location through the tree, without the names of union branches in it."""
    annotation: Any = root
    field: FieldInfo | None = None
    keys: tuple[str, ...] = ()
    path: list[str | int] = []
    for part in location:
        branches = _branches(annotation)
        if len(branches) > 1 and _names_a_branch(part, branches):
            annotation = Any
        elif part != "[key]":
            node = branches[0]
            field, keys, annotation = _step_into(node, part)
            path.append(part)
    return _Spot(tuple(path), field, keys)


def nearest_key(dotted: str, root: type[BaseModel]) -> str | None:
    """Return ``dotted`` with each unknown key in it replaced by the nearest one; None: no key is near.

    Args:
        dotted: a path such as ``train.stepss``.
        root: class of the root of the tree.
    """
    annotation: Any = root
    path = []
    for part in dotted.split("."):
        node = _branches(annotation)[0]
        _, keys, annotation = _step_into(node, part)
        if keys and part not in keys:
            if (near := nearest(part, keys)) is None:
                return None
            part, annotation = near, _step_into(node, near)[2]
        path.append(part)
    return ".".join(path)


def _step_into(node: Any, part: str | int) -> tuple[FieldInfo | None, tuple[str, ...], Any]:
    if isinstance(node, type) and issubclass(node, BaseModel):
        field = node.model_fields.get(str(part))
        return field, tuple(node.model_fields), field.annotation if field is not None else Any
    arguments = get_args(node)
    return None, (), arguments[-1] if arguments else Any


def _branches(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [branch for one in get_args(annotation) if one is not type(None) for branch in _branches(one)]
    return [annotation]


def _names_a_branch(part: str | int, branches: list[Any]) -> bool:
    """Return whether ``part`` is no key but a union branch that pydantic tried: `str`, `constrained-int`, ..."""
    names = {getattr(get_origin(branch) or branch, "__name__", "").lower() for branch in branches}
    return str(part).partition("[")[0].removeprefix("constrained-").lower() in names


def _line(spot: _Spot, details: list[ErrorDetails], root: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in spot.path) or "recipe"
    first = details[0]
    kind, found = first["type"], first["input"]
    if kind == _UNKNOWN:
        name = str(spot.path[-1])
        return f"{path}: unknown key, found {_shown(found)}; {_meant(name, spot.sibling_keys, root)}"
    if kind == "missing":
        return f"{path}: required, but missing; add `{spot.path[-1]}`: {_description(spot.field)}"
    if kind == LOCATED:
        return f"{path}: {first['msg']}"
    if kind == "value_error":
        return f"{path}: {first['msg'].removeprefix('Value error, ')}"
    expected = ", or ".join(_expectation(detail) for detail in details)
    return f"{path}: found {_shown(found)}; expected {expected}; {_advice(spot, details)}"


def _meant(name: str, siblings: Sequence[str], root: type[BaseModel]) -> str:
    """Return what to write for an unknown key: what HuggingFace calls so, a near key, a key of another node, or any."""
    elsewhere = None if nearest(name, siblings) else key_of(name, root)
    return name_here(name, root, siblings) or (f"use `{elsewhere}`" if elsewhere else hint(name, siblings))


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "list_type" and isinstance(detail["input"], str):
        return f"a list, such as [{detail['input']}]"
    expected = _NODE_CLASS.sub("a mapping of keys to values", _SUBJECT.sub("", detail["msg"]))
    return expected.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _advice(spot: _Spot, details: list[ErrorDetails]) -> str:
    for detail in (detail for detail in details if detail["type"] == "literal_error"):
        match = nearest(str(detail["input"]), re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
        if match is not None:
            return f"did you mean `{match}`?"
    if spot.field is None or spot.field.is_required() or spot.field.default_factory is not None:
        return "change it"
    if spot.field.default is None:
        return "change it, or remove it"
    return f"change it, or remove it for the default {_shown(spot.field.default)}"


def _description(field: FieldInfo | None) -> str:
    description = field.description if field is not None else None
    return (description or "a value").split(". ")[0].removesuffix(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
