"""The base of all nodes of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from omnitrain.recipe.effect import Idle, set_for_nothing
from omnitrain.recipe.located import located


class Strict(BaseModel):
    """A node of the tree: unknown keys, infinite numbers and keys without effect are refused; so in assignments."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    def idle(self) -> Iterator[Idle]:
        """Keys of this node that can have no effect as its other keys are."""
        yield from ()

    @model_validator(mode="after")
    def _nothing_is_set_for_nothing(self) -> Self:
        problems = [located(found.problem, found.path, found.value) for found in set_for_nothing(self, self.idle())]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self
