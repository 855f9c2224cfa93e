"""One attention over a packed row, and what a backend of it declares.

Shapes: ``H`` heads, ``K`` key heads (``H`` is a multiple), ``T`` tokens of the row, ``D`` head dimension, ``E`` width
of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omnitrain.ops.attention.mask_spec import MaskSpec
from omnitrain.ops.cpu.unread_rows import ReadRows

# What a call can need of a backend: the kind of its mask, and these.
FULL, CAUSAL, WINDOW, GENERAL = "full", "causal", "window", "general"
GQA = "grouped heads"
VALUE_WIDTH = "values of another width"
DROPOUT = "dropout"
SINKS = "sinks"
SOFTCAP = "softcap"
POSITION_BIAS = "position_bias"
EVERYTHING = frozenset({FULL, CAUSAL, WINDOW, GENERAL, GQA, VALUE_WIDTH, DROPOUT, SINKS, SOFTCAP, POSITION_BIAS})


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one attention.

    Attributes:
        query: ``[1, H, T, D]``.
        key: ``[1, K, T, D]``.
        value: ``[1, K, T, E]``.
        mask: who sees whom.
        scale: factor on the scores; None: ``D ** -0.5``.
        dropout: probability of dropping an attention weight.
        softcap: scaled scores become ``softcap * tanh(score / softcap)``.
        position_bias: ``[1, 1 or H, T, T]``, added to scaled and capped scores.
        sinks: ``[H]``, the logit of one more key per head, whose value is zero.
        read: the only tokens whose output is used; a backend need not compute that of the others. None: all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskSpec
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    read: ReadRows | None = None

    @property
    def scaling(self) -> float:
        """The factor on the scores."""
        return self.query.size(-1) ** -0.5 if self.scale is None else self.scale

    @property
    def has_gradients(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))

    @property
    def needs(self) -> frozenset[str]:
        """What a backend must honour."""
        extra = {
            GQA: self.query.size(1) != self.key.size(1),
            VALUE_WIDTH: self.query.size(-1) != self.value.size(-1),
            DROPOUT: self.dropout > 0,
            SINKS: self.sinks is not None,
            SOFTCAP: self.softcap is not None,
            POSITION_BIAS: self.position_bias is not None,
        }
        return frozenset({self.mask.kind, *(name for name, needed in extra.items() if needed)})


@dataclass(frozen=True)
class Backend:
    """One way to compute a :class:`Call`; outputs and gradients are exact for all that it honours.

    Attributes:
        name: by which users choose it.
        honours: of what a call can need.
        obstacle: why it cannot run a call here (device, dtype, package); None: it can.
        attend: the call -> ``[1, T, H, E]``, in the dtype of the values.
        automatic_on: device types where ``auto`` may choose it; None: all.
    """

    name: str
    honours: frozenset[str]
    obstacle: Callable[[Call], str | None]
    attend: Callable[[Call], torch.Tensor]
    automatic_on: frozenset[str] | None = None


def repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each key head once per query head that reads it, along dim 1."""
    return states if states.size(1) == num_heads else states.repeat_interleave(num_heads // states.size(1), dim=1)
