"""The base class of all nodes of a recipe, and what a node says of its keys.

A key is idle if it is set although it can have no effect. It counts as set if its value differs from its default: a
saved recipe contains every key and must load again.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, LiteralString, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from omnitrain.recipe.other_names import in_place_of

Problem = tuple[tuple[str | int, ...], str]  # keys from a node to a value, and what is wrong with it

LOCATED = "located"  # pydantic type of these problems; their message needs no additions
OLD = "old"  # that of keys of older versions


def raise_located(node: str, problems: Iterable[Problem], kind: LiteralString = LOCATED) -> None:
    """Raise a ValidationError of ``node`` with all problems, of this pydantic type, if there are any."""
    # The message is passed in the context: in a template, its braces would be read as fields.
    found = [
        InitErrorDetails(type=PydanticCustomError(kind, "{message}", {"message": message}), loc=path, input=None)
        for path, message in problems
    ]
    if found:
        raise ValidationError.from_exception_data(node, found)


def short_for(key: str, kind: Any, schema: Any) -> BeforeValidator:
    """Let a value of this kind be short for a node with it under ``key``; ``schema``: the type of either."""
    return BeforeValidator(
        lambda value: {key: value} if isinstance(value, kind) else value, json_schema_input_type=schema
    )


class Idle(NamedTuple):
    """A key that can have no effect: its dotted path from a node (numbers index lists), the reason, and what to do."""

    key: str
    why: str


def idle_values(node: BaseModel, idle: Iterable[Idle]) -> Iterator[Problem]:
    """Yield the path and the problem of the ``idle`` keys of ``node`` that are set; no key below None is set."""
    for key, why in idle:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        value, default = _value_and_default(node, path)
        if value != default:
            has_nodes = any(isinstance(one, BaseModel) for one in (value if isinstance(value, list) else [value]))
            yield path, f"{'set' if has_nodes else f'found {value!r}'}, {why}"


def idle_problems(node: BaseModel, idle: Iterable[Idle], place: str = "") -> list[str]:
    """Return one line per idle key that is set; ``place`` is the key of ``node`` in the recipe."""
    found = idle_values(node, idle)
    return [f"{'.'.join(map(str, (*filter(None, [place]), *path)))}: {problem}" for path, problem in found]


def _value_and_default(node: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    for part in path[:-1]:
        node = getattr(node, part) if isinstance(part, str) and isinstance(node, BaseModel) else node[part]
        if node is None:
            return None, None
    field = type(node).model_fields[str(path[-1])]
    return getattr(node, str(path[-1])), field.get_default(call_default_factory=True)


@functools.cache
def descriptions(node: type[BaseModel]) -> dict[str, str]:
    """Return field -> the text below it in the source of its class, read when it is first asked for."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(node))).body
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(getattr(found, "body", ()))
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _describe(schema: dict[str, Any], node: type[BaseModel]) -> None:
    for name, field in schema["properties"].items():
        field["description"] = descriptions(node)[name]


class Strict(BaseModel):
    """A node of the tree. It refuses unknown keys, infinite numbers and keys without effect, in assignments, too.

    A list may be given as its only value. The text below a field describes it.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, json_schema_extra=_describe
    )

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
        asks_for_list = {get_origin(kind) for kind in kinds if kind is not NoneType} == {list}
        return [value] if asks_for_list and not isinstance(value, (list, tuple, NoneType)) else value

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, tree: Any) -> Any:
        old = {key: in_place_of(cls, key, value) for key, value in tree.items()} if isinstance(tree, dict) else {}
        found = [((key,), f"an old key; use `{now}`") for key, now in old.items() if now is not None]
        raise_located(cls.__name__, found, OLD)
        return tree

    def idle(self) -> Iterator[Idle]:
        """Yield the keys of this node that can have no effect with its other keys."""
        yield from ()

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys of this node whose values exclude each other, and why; ``()`` is the node itself."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_located(type(self).__name__, [*self.contradictions(), *idle_values(self, self.idle())])
        return self
