"""The table of tensor parallel styles: transformers' names for them, and what each does here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from omnitrain.parallel.tensor import forwards
from omnitrain.parallel.tensor.forwards import Around


@dataclass(frozen=True)
class Style:
    """What becomes of a module, or of a parameter named by itself.

    Attributes:
        cut: which dim of its parameters is cut: ``out``, the one before the last (the only one of a vector): columns of
            the product; ``in``, the last one, and biases stay whole. None: nothing is.
        forward: how it computes then; None: as before.
        of: what it can be said of.
    """

    cut: Literal["out", "in"] | None = None
    forward: Around | None = None
    of: Literal["linear", "embedding", "any", "experts"] = "linear"

    def dim(self, name: str, parameter: Tensor) -> int | None:
        """The dim of a parameter that is cut; None: it stays whole."""
        if self.cut == "out":
            return max(parameter.ndim - 2, 0)
        return parameter.ndim - 1 if self.cut == "in" and name != "bias" else None


_COLUMNS_GATHERED = Style("out", forwards.columns_gathered)
_ROWS_OF_WHOLE = Style("in", forwards.rows_of_whole)
_WHOLE = Style(of="any")
# A mixture's experts are whole on every rank. Their weights are spread over ranks by expert parallelism.
_EXPERTS = Style(of="experts")

STYLES: Mapping[str, Style] = {
    "colwise": Style("out", forwards.own_part),
    "colwise_gather_output": _COLUMNS_GATHERED,
    "colwise_rep": _COLUMNS_GATHERED,  # the same under an older name
    "rowwise": Style("in", forwards.rows),
    "rowwise_split_input": _ROWS_OF_WHOLE,
    "rowwise_rep": _ROWS_OF_WHOLE,  # the same under an older name
    "embedding_rowwise": Style("out", forwards.vocabulary, "embedding"),
    "embedding_colwise": Style("in", forwards.columns_gathered, "embedding"),
    "all_reduce": Style(None, forwards.output_added_up, "any"),
    # What transformers must say of parameters and activations that all ranks hold alike: here their gradients add up.
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
    "packed_colwise": _EXPERTS,
    "packed_rowwise": _EXPERTS,
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
}
