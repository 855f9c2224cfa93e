"""The ``lora`` node: low-rank adapters of a component."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from omnitrain.recipe.strict import Strict

ALL_LINEAR: Final = "all-linear"  # as peft calls it


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685): the component is frozen; ``alpha / rank * B A`` trains, first ``B = 0``."""

    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = ALL_LINEAR
    """Globs for linear layers (`q_proj`, `layers.*.self_attn.*`) and for matrices of fused experts
    (`experts.gate_up_proj`). A glob that matches nothing is an error. `all-linear`: all linear layers that can have
    adapters, without fused experts."""
    rank: int = Field(16, ge=1)
    """Rank of the adapters: rows of `A`, columns of `B`. Fused experts: the rank for each expert."""
    alpha: float = Field(32.0, gt=0)
    """The output of an adapter is scaled by `alpha / rank`."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` (arXiv:2312.03732)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an input of `A` in training; not of fused experts."""
