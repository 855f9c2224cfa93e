"""Errors whose message is for the user: what was found, what was expected, what to change; and exit codes."""

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class UserError(ValueError):
    """A mistake in a recipe, in data or in weights. The CLI prints the message and exits with code 2."""


class RecipeError(UserError):
    """One or more mistakes in a recipe, all listed in the message."""


class WeightsError(UserError):
    """Weights that lack, rename or reshape tensors."""


class TrainingError(RuntimeError):
    """A run that cannot go on, through no mistake in its recipe. The CLI prints the message and exits with code 1."""


class DataError(UserError):
    """Data that is missing, has the wrong columns, or holds a modality that the model cannot read or write."""


class ModelError(UserError):
    """A model's own code failed. Whoever knows which key of a recipe names the model says so."""
