"""Run the stages of a pipeline in turn, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from omnitrain.models.omni.stage import StageInput

T = TypeVar("T")


class StageRelay(Protocol):
    """Runs the stages of a rank, and gets values from the ranks with the other stages.

    The ranks of all stages of a model have the same data. All of them must call every method, in the same order.
    """

    is_cut: bool  # whether the model is cut into stages

    def run(self, forward: Callable[[StageInput | None], Any]) -> Any:
        """Run the stages of this rank, each when the output of the stage before has arrived.

        Args:
            forward: runs one stage, and returns a tuple of tensors for the next one. None: it runs the whole model.

        Returns:
            What ``forward`` returns for the last stage, or for the whole model; None on ranks without the last stage.
        """
        ...

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what ``make`` returns on the rank with the first stage.

        Args:
            make: only that rank calls it.

        Raises:
            UserError: ``make`` raised it on another rank.
            TrainingError: ``make`` raised another exception on another rank.
        """
        ...

    def from_last(self, make: Callable[[], T]) -> T:
        """The same for the rank with the last stage."""
        ...


class OneStage:
    """:class:`StageRelay` of a model that is not cut."""

    is_cut = False

    def run(self, forward: Callable[[StageInput | None], Any]) -> Any:
        """Return ``forward(None)``."""
        return forward(None)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return ``make()``."""
        return make()

    def from_last(self, make: Callable[[], T]) -> T:
        """Return ``make()``."""
        return make()


ONE_STAGE = OneStage()
