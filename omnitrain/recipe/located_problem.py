"""Problems at a key below the node that a validator checks."""

from __future__ import annotations

from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError

LOCATED = "located"  # pydantic type of these problems; their message needs no additions


def located(message: str, at: tuple[str | int, ...], given: Any) -> InitErrorDetails:
    """Return a problem for ``ValidationError.from_exception_data``, at the keys ``at`` below the validated node.

    ``message`` says what was found, what was expected and what to change.
    """
    # The message is passed in the context: in a template, its braces would be read as fields.
    error = PydanticCustomError(LOCATED, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=at, input=given)
