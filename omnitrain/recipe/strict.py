"""The base class of all nodes of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from omnitrain.recipe.located_problem import located
from omnitrain.recipe.useless_keys import Idle, idle_values


class Strict(BaseModel):
    """A node of the tree. It refuses unknown keys, infinite numbers and keys without effect, in assignments, too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    def idle(self) -> Iterator[Idle]:
        """Yield the keys of this node that can have no effect with its other keys."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_idle_keys(self) -> Self:
        problems = [located(found.problem, found.path, found.value) for found in idle_values(self, self.idle())]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self
