"""Convert pydantic's errors to one line each: the path, what was found and expected, and what to change."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from omnitrain.recipe.other_names import key_of, name_here
from omnitrain.recipe.strict import LOCATED, OLD, descriptions
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
    node: Any  # the class, list or dict that has the key

    @property
    def field(self) -> FieldInfo | None:
        return _fields(self.node).get(str(self.path[-1])) if self.path else None


def problem_lines(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return a line per problem of a tree of class ``root``; branches of a union, and a misspelt key, count once."""
    details = error.errors(include_url=False)
    spots = [_locate(detail["loc"], root) for detail in details]
    meant = {
        (*spot.path[:-1], nearest(str(spot.path[-1]), _fields(spot.node)) or "")
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
    node: Any = None
    annotation: Any = root
    path: list[str | int] = []
    for part in location:
        branches = _branches(annotation)
        if len(branches) > 1 and (named := _branches_named(part, branches)):
            annotation = named[0]
        elif part != "[key]":
            node, annotation = branches[0], _inside(branches[0], part)
            path.append(part)
    return _Spot(tuple(path), node)


def nearest_key(dotted: str, root: type[BaseModel]) -> str | None:
    """Return ``dotted``, such as ``train.stepss``, with the nearest key for each unknown one; None: no key is near."""
    annotation: Any = root
    path = []
    for part in dotted.split("."):
        node = _branches(annotation)[0]
        known = nearest(part, keys) if (keys := _fields(node)) and part not in keys else part
        if known is None:
            return None
        annotation = _inside(node, known)
        path.append(known)
    return ".".join(path)


def _fields(node: Any) -> dict[str, FieldInfo]:
    return node.model_fields if isinstance(node, type) and issubclass(node, BaseModel) else {}


def _inside(node: Any, part: str | int) -> Any:
    """Return the type of a key of a node, or of the entries of a list or a dict."""
    if fields := _fields(node):
        return fields[str(part)].annotation if part in fields else Any
    return (get_args(node) or (Any,))[-1]


def _branches(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [branch for one in get_args(annotation) if one is not type(None) for branch in _branches(one)]
    return [annotation]


def _branches_named(part: str | int, branches: list[Any]) -> list[Any]:
    """The union branches that pydantic calls ``part``, which then is no key: `str`, `constrained-int`, ..."""
    name = str(part).partition("[")[0].removeprefix("constrained-").lower()
    return [one for one in branches if getattr(get_origin(one) or one, "__name__", "").lower() == name]


def _line(spot: _Spot, details: list[ErrorDetails], root: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in spot.path) or "recipe"
    first = details[0]
    kind, found = first["type"], first["input"]
    if kind == _UNKNOWN:
        advice = _meant(str(spot.path[-1]), _fields(spot.node), root)
        if spot.path[:2] == ("parallel", "components"):
            advice = advice.replace("`parallel.default.", f"`parallel.components.{spot.path[2]}.")
        return f"{path}: unknown key, found {_shown(found)}; {advice}"
    if kind == "missing":
        name = str(spot.path[-1])
        texts = descriptions(spot.node) if _fields(spot.node) else {}  # an entry of a tuple has none
        description = texts.get(name, "a value")
        return f"{path}: required, but missing; add `{name}`: {description.split('. ')[0].removesuffix('.')}"
    if kind == OLD:
        inside = "".join(f"{part}." for part in spot.path[:-1])
        return f"{path}: {first['msg'].replace('use `', f'use `{inside}')}"
    if kind == LOCATED:
        return f"{path}: {first['msg']}"
    if kind == "value_error":
        return f"{path}: {first['msg'].removeprefix('Value error, ')}"
    expected = ", or ".join(_expectation(detail) for detail in details)
    return f"{path}: found {_shown(found)}; expected {expected}; {_advice(spot, details)}"


def _meant(name: str, siblings: Iterable[str], root: type[BaseModel]) -> str:
    """Return what to write for an unknown key: what HuggingFace calls so, a near key, a key of another node, or any."""
    elsewhere = None if nearest(name, siblings) else key_of(name, root)
    return name_here(name, root) or (f"use `{elsewhere}`" if elsewhere else hint(name, siblings))


def _expectation(detail: ErrorDetails) -> str:
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
