"""Run a model that is spread over ranks outside of training: its stages in turn, and encoders of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from omnitrain.data.packing.pack import MediaGroup
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.stage import StageInput

T = TypeVar("T")


class StageRelay(Protocol):
    """Runs the stages of a rank, and gets values from the ranks with the other stages.

    The ranks of all stages of a model have the same data. All of them must call every method, in the same order.

    Attributes:
        is_cut: whether the model is cut into stages.
    """

    is_cut: bool

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


class EncoderRelay(Protocol):
    """Gets the features of encoders that other ranks have."""

    @property
    def components(self) -> Collection[str]:
        """These encoders."""
        ...

    def require_forward(self) -> None:
        """Raise if this rank cannot run the model.

        Raises:
            UserError: it has only some encoders.
        """
        ...

    def require_open(self) -> None:
        """Raise if features cannot be asked for now.

        Raises:
            UserError: the other ranks do not listen, or this rank is one that encodes for others.
        """
        ...

    def encode(self, component: str, calls: Mapping[str, Sequence[MediaGroup]]) -> dict[str, list[MediaFeatures]]:
        """Return name -> the features of each call. All ranks that encode packs must call it together.

        Args:
            component: one of :attr:`components`.
            calls: name -> the items of each call of this rank; all names of the component, often without calls.
        """
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
