"""Errors whose message tells the user what was found, what was expected and what to change; and exit codes."""

from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
# 128 + SIGTERM: what schedulers see of a process that SIGTERM ended, and may start again.
EXIT_REQUEUE = 143


class UserError(ValueError):
    """A mistake in a recipe, in data or in weights; each argument is a problem. The CLI exits with code 2."""

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems, one text each."""
        return tuple(map(str, self.args))


class RecipeError(UserError):
    """One or more mistakes in a recipe, all listed in the message."""


class WeightsError(UserError):
    """Weights with missing, renamed or misshapen tensors."""


class DamagedCheckpointError(UserError):
    """A checkpoint whose files are not those that were saved; ``files``: those that differ or are missing."""

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        """``files`` is not an argument of the error, because each argument is a problem."""
        super().__init__(message)
        self.files = tuple(files)


class TrainingError(RuntimeError):
    """A run that cannot continue, without a mistake in its recipe. The CLI prints the message and exits with code 1."""


class LostRankError(TrainingError):
    """A rank whose message does not come, because its process has ended or does nothing."""

    def __init__(self, message: str, rank: int = -1) -> None:
        """``rank`` is not an argument of the error, so that it can be pickled."""
        super().__init__(message)
        self.rank = rank


class DataError(UserError):
    """Data that is missing, has the wrong columns, or contains a modality that the model cannot read or write."""


class ModelError(UserError):
    """A model's own code failed. A caller that knows the recipe key of the model adds it to the message."""


class ScheduleError(UserError):
    """A pipeline schedule that cannot run: an action that is missing, doubled, out of order, or waits forever."""


def problem_list(where: str, problems: Sequence[str]) -> str:
    """Return ``2 problems in WHERE:`` with the problems below it, indented."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{count} in {where}:", *problems]).replace("\n", "\n  ")
