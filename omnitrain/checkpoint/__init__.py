"""Save and load the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.checkpoint.optimizer import load_optimizer, save_optimizer

__all__ = ["load_optimizer", "save_optimizer"]

__getattr__ = on_first_use(__name__, __file__)
