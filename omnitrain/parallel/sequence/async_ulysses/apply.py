"""Which attention modules of a foundation are driven (async Ulysses), and what is said of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.parallel.sequence.async_ulysses.attention import AttentionLayout, drive, why_not_driven
from omnitrain.parallel.sequence.async_ulysses.check import Manners, attention_layouts, kind_of


@dataclass(frozen=True)
class AsyncUlyssesModules:
    """What became of the attention modules.

    Attributes:
        driven: number of those whose projections overlap their all-to-alls.
        plain: reason -> number of those that run the plain form.
    """

    driven: int
    plain: dict[str, int]

    def __str__(self) -> str:
        total = self.driven + sum(self.plain.values())
        reasons = "; ".join(f"plain {number}: {reason}" for reason, number in sorted(self.plain.items()))
        return f"async {self.driven} of {total} layers" + (f" ({reasons})" if reasons else "")


def drive_foundation(model: OmniModel, sp: int) -> AsyncUlyssesModules:
    """Drive the attention modules of the foundation that can be, on all ranks alike. Every rank calls it.

    Args:
        model: before it is sharded; what else replaces a layer's forward has been done.
        sp: ranks that exchange rows for heads.
    """
    foundation: Any = model.foundation
    layouts = attention_layouts(foundation, model.runner.contract)
    classes = {name for name, _ in layouts}
    modules = [module for module in foundation.modules() if type(module).__name__ in classes]
    found = [_layout(module, layouts, sp) for module in modules]
    of_ranks = gathered_objects([reason if isinstance(reason, str) else None for reason in found])
    plain: Counter[str] = Counter()
    for module, layout, reasons in zip(modules, found, zip(*of_ranks, strict=True), strict=True):
        if reason := next(filter(None, reasons), None):  # of any rank: they must not differ
            plain[reason] += 1
        elif isinstance(layout, AttentionLayout):
            drive(module, layout)
    return AsyncUlyssesModules(len(modules) - plain.total(), dict(plain))


def _layout(module: nn.Module, layouts: Manners, sp: int) -> AttentionLayout | str:
    layout = layouts.get(kind_of(module), "its weights are of another shape than the twin's")
    return (why_not_driven(module, layout, sp) or layout) if isinstance(layout, AttentionLayout) else layout
