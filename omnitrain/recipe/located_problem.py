"""Problems at keys below the node that a validator checks."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Problem = tuple[tuple[str | int, ...], str]  # keys from a node to a value, and what is wrong with it

LOCATED = "located"  # pydantic type of these problems; their message needs no additions


def raise_located(node: str, problems: Iterable[Problem]) -> None:
    """Raise a ValidationError of ``node`` with all problems, if there are any."""
    # The message is passed in the context: in a template, its braces would be read as fields.
    found = [
        InitErrorDetails(type=PydanticCustomError(LOCATED, "{message}", {"message": message}), loc=path, input=None)
        for path, message in problems
    ]
    if found:
        raise ValidationError.from_exception_data(node, found)
