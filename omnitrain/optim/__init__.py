"""Optimizers, schedules and the one gradient norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.optim.gradients import gradient_norm

__all__ = ["gradient_norm"]

__getattr__ = on_first_use(__name__, __file__)
