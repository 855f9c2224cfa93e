"""Tensor parallelism of matrices that have LoRA adapters.

A style's forward wraps the layer with its adapter, so it sums or gathers both products in one collective. Inside, each
rank computes with its shard of the matrix ``W`` and of the factor of ``B A`` that has the sharded dim; the other factor
is replicated:

    colwise     W [out/tp, in]    A [r, in]       B [out/tp, r]    this rank's columns
    rowwise     W [out, in/tp]    A [r, in/tp]    B [out, r]       a partial sum
"""

from __future__ import annotations

from collections.abc import Mapping

from omnitrain.parallel.tensor.styles import STYLES

_OF_PARAMETERS = {"out": "colwise", "in": "rowwise"}


def styles_with_adapters(styles: Mapping[str, str], renamed: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the styles of a model with adapters.

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
