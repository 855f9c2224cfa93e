"""Apply async Ulysses to the attention modules of a foundation that support it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.parallel.sequence.async_ulysses.attention import AttentionLayout, use_async_ulysses, why_not_async
from omnitrain.parallel.sequence.async_ulysses.check import AttentionLayouts, attention_layouts, kind_of


@dataclass(frozen=True)
class AsyncUlyssesModules:
    """The number of attention modules whose projections overlap their all-to-alls; reason -> number of others."""

    num_async: int  # number of modules whose projections overlap their all-to-alls
    plain: dict[str, int]  # reason -> number of modules that use plain Ulysses

    def __str__(self) -> str:
        total = self.num_async + sum(self.plain.values())
        reasons = "; ".join(f"plain {number}: {reason}" for reason, number in sorted(self.plain.items()))
        return f"async {self.num_async} of {total} layers" + (f" ({reasons})" if reasons else "")


def apply_async_ulysses(model: OmniModel, sp: int) -> AsyncUlyssesModules:
    """Apply async Ulysses for ``sp`` ranks to the attention modules that support it on all ranks; all must call it.

    The model is not sharded yet, with all other replacements of layers' forwards done.
    """
    foundation: Any = model.foundation
    layouts = attention_layouts(foundation, model.runner.contract)
    classes = {name for name, _ in layouts}
    modules = [module for module in foundation.modules() if type(module).__name__ in classes]
    found = [_layout(module, layouts, sp) for module in modules]
    of_ranks = gathered_objects([reason if isinstance(reason, str) else None for reason in found])
    plain: Counter[str] = Counter()
    for module, layout, reasons in zip(modules, found, zip(*of_ranks, strict=True), strict=True):
        if reason := next(filter(None, reasons), None):  # of any rank, because all ranks must do the same
            plain[reason] += 1
        elif isinstance(layout, AttentionLayout):
            use_async_ulysses(module, layout)
    return AsyncUlyssesModules(len(modules) - plain.total(), dict(plain))


def _layout(module: nn.Module, layouts: AttentionLayouts, sp: int) -> AttentionLayout | str:
    layout = layouts.get(kind_of(module), "its weights have another shape than in the tiny model")
    return (why_not_async(module, layout, sp) or layout) if isinstance(layout, AttentionLayout) else layout
