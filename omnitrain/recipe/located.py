"""A problem that a validator finds below the node that it validates."""

from __future__ import annotations

from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError

LOCATED = "located"  # the type of such problems: their message is complete


def located(message: str, at: tuple[str | int, ...], given: Any) -> InitErrorDetails:
    """One problem for ``ValidationError.from_exception_data``, which a validator may raise.

    Args:
        message: what was found, what was expected, what to change.
        at: keys from the validated node to the place.
        given: the value found there.
    """
    # The message goes through the context: as a template its own braces would be taken for fields.
    error = PydanticCustomError(LOCATED, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=at, input=given)
