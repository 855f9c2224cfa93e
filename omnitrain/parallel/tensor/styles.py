"""The table of tensor parallel styles, with transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from omnitrain.parallel.tensor import forwards
from omnitrain.parallel.tensor.forwards import Around


@dataclass(frozen=True)
class Style:
    """The sharding and forward of a module, or of a parameter listed by itself.

    ``cut``: the sharded dim of its parameters. ``out``: the dim before the last (the only one of a vector), the columns
    of the product. ``in``: the last dim; biases stay replicated. None: no dim.
    """

    cut: Literal["out", "in"] | None = None
    forward: Around | None = None  # the replacement of its forward; None: unchanged
    of: Literal["linear", "embedding", "any", "experts"] = "linear"  # the kind of module that supports the style

    def dim(self, name: str, parameter: Tensor) -> int | None:
        """Return the sharded dim of a parameter; None: it stays replicated."""
        if self.cut == "out":
            return max(parameter.ndim - 2, 0)
        return parameter.ndim - 1 if self.cut == "in" and name != "bias" else None


_COLUMNS_GATHERED = Style("out", forwards.columns_gathered)
_ROWS_OF_WHOLE = Style("in", forwards.rows_of_whole)
_WHOLE = Style(of="any")
# Tensor parallelism replicates experts; expert parallelism shards them.
_EXPERTS = Style(of="experts")

STYLES: Mapping[str, Style] = {
    "colwise": Style("out", forwards.own_part),
    "colwise_gather_output": _COLUMNS_GATHERED,
    "colwise_rep": _COLUMNS_GATHERED,  # older name
    "rowwise": Style("in", forwards.rows),
    "rowwise_split_input": _ROWS_OF_WHOLE,
    "rowwise_rep": _ROWS_OF_WHOLE,  # older name
    "embedding_rowwise": Style("out", forwards.vocabulary, "embedding"),
    "embedding_colwise": Style("in", forwards.columns_gathered, "embedding"),
    "all_reduce": Style(None, forwards.output_added_up, "any"),
    # transformers needs styles for replicated parameters and activations; here their gradients are always summed.
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
    "packed_colwise": _EXPERTS,
    "packed_rowwise": _EXPERTS,
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
}

_OF_PARAMETERS = {"out": "colwise", "in": "rowwise"}


def styles_with_adapters(styles: Mapping[str, str], renamed: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the styles of a model with adapters, whose layers' forwards the styles' forwards wrap.

    So both products are summed or gathered in one collective. Inside, each rank computes with its shard of the matrix
    ``W`` and of the factor of ``B A`` that has the sharded dim; the other factor is replicated::

        colwise     W [out/tp, in]    A [r, in]       B [out/tp, r]    this rank's columns
        rowwise     W [out, in/tp]    A [r, in/tp]    B [out, r]       a partial sum

    ``styles``: name of a module or parameter in the model without adapters -> style. ``renamed``: parameter -> its name
    in the model with adapters, and the names of ``A`` and ``B``; see :class:`OmniModel`.
    """
    with_adapters = {name: style for name, style in styles.items() if name not in renamed}
    for name, style in styles.items():
        cut = STYLES[style].cut
        if cut is None:
            continue
        for path in (name, f"{name}.weight", f"{name}.bias"):
            names = renamed.get(path, ())  # W, A, B
            for renamed_path in names[:1] + (names[2:] if cut == "out" else names[1:2]):
                with_adapters[renamed_path] = _OF_PARAMETERS[cut]
    return with_adapters
