"""Ranks and meshes, layouts applied to a model from outside, and the proof that they do not change the math."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.parallel.layout import ComponentLayout, ModelLayout, layout_of
    from omnitrain.parallel.state import ParallelState
    from omnitrain.parallel.verify.verify import VerifyReport, VerifyRow

__all__ = ["ComponentLayout", "ModelLayout", "ParallelState", "VerifyReport", "VerifyRow", "layout_of"]

__getattr__ = on_first_use(__name__, __file__)
