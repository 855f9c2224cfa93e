"""Evaluate and generate with a model whose encoders have ranks of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.summon import gathered
from omnitrain.parallel.sections.serve import AskSections

T = TypeVar("T")


def serving(model: OmniModel, work: Callable[[], T]) -> T | None:
    """Evaluate or generate on the ranks of ``main``, while those of sections encode for them. All ranks must call it.

    Args:
        model: sharded or not; without sections, this only calls ``work``.
        work: calls ``heldout_loss``, ``generate``, ... The ranks of sections do not call it. Only the ranks of ``main``
            may take part in its collectives.

    Returns:
        The result of ``work``; None on the ranks of sections.

    Raises:
        UserError: ``work`` raised it on the first rank; then all ranks of sections raise it, too.
        TrainingError: ``work`` raised another error on the first rank.
    """
    ask = model.ask
    if not isinstance(ask, AskSections) or ask.is_open:
        return work()
    if ask.is_served:
        with ask.open():
            return work()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), gathered(model):
            ask.serve()
    finally:
        model.train(was_training)
    return None
