"""Run an omni model on a batch of transformers, as HF ``Trainer`` and scripts pass it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import ModelOutput, TransformersKwargs

from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint

_USE_PACKS = (
    "make samples of the rows (OmniProcessor), packs of the samples (OmniDataCollatorWithPacking), and pass those"
)


def takes_any_argument(foundation: PreTrainedModel) -> bool:
    """Whether the foundation's forward has ``**kwargs``, and so takes ``num_items_in_batch`` for its loss."""
    parameters = inspect.signature(type(foundation).forward).parameters
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def forward_of_batch(model: Any, batch: Mapping[str, Any]) -> ModelOutput:
    """Return the output of the foundation's own forward: padding, positions, logits and loss are those of transformers.

    ``batch``: arguments as HF returns them, without None. Raises UserError: the batch has no input, the model is
    parallelized, or the foundation does not take an argument.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    if not given.keys() & {"input_ids", "inputs_embeds"}:
        found = f"found only {', '.join(sorted(given))}" if given else "found nothing"
        raise UserError(f"forward: {found}; expected a Pack, or a batch of transformers with input_ids")
    if not model.takes_batches:
        raise UserError(
            "forward: found a batch of transformers for a parallelized model, whose losses and calls are planned for "
            f"all ranks together; {_USE_PACKS} through step_planner and accumulate_gradients"
        )
    _require_known(model, given)
    if "labels" in given and "use_cache" in inspect.signature(type(model.foundation).forward).parameters:
        given.setdefault("use_cache", False)
    output: ModelOutput = model.foundation(**given)
    return output


def _require_known(model: Any, given: Mapping[str, Any]) -> None:
    """Check names, because a forward with ``**kwargs`` ignores those that it does not know."""
    foundation = model.foundation
    known = set(inspect.signature(type(foundation).forward).parameters) - {"self", "kwargs"}
    known |= {name for interface in model.runner.native.interfaces.values() for name in interface.arguments}
    if takes_any_argument(foundation):
        known |= {*TransformersKwargs.__annotations__, "return_dict"}
    if unknown := sorted(given.keys() - known):
        names = ", ".join(unknown)
        attached = [*model.encoder_names, *model.decoder_names]
        advice = f"for {', '.join(attached)}, {_USE_PACKS}" if attached else hint(unknown[0], known)
        raise UserError(f"forward: {type(foundation).__name__} does not take {names}; {advice}")
