"""The base class of all nodes of a recipe."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from omnitrain.recipe.located_problem import Problem, raise_located
from omnitrain.recipe.useless_keys import Idle, idle_values


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
