"""Tensor parallelism of matrices that have LoRA adapters.

A style's forward stands around the layer with its adapter: what it adds up or gathers is the sum of both products, in
one collective. Inside, each rank computes with its part of the matrix ``W`` and of that factor of ``B A`` which has the
dim that is cut; the other factor is whole:

    colwise     W [out/tp, in]    A [r, in]       B [out/tp, r]    of own columns
    rowwise     W [out, in/tp]    A [r, in/tp]    B [out, r]       parts of a sum
"""

from __future__ import annotations

from collections.abc import Mapping

from omnitrain.parallel.tensor.styles import STYLES

_OF_PARAMETERS = {"out": "colwise", "in": "rowwise"}


def styles_with_adapters(styles: Mapping[str, str], renamed: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The styles of a model with adapters.

    Args:
        styles: name of a module or parameter in the model without adapters -> style.
        renamed: parameter -> what it is called beside its adapters, and these (``A``, ``B``); see :class:`OmniModel`.
    """
    found = {name: style for name, style in styles.items() if name not in renamed}
    for name, style in styles.items():
        cut = STYLES[style].cut
        if cut is None:
            continue
        for path in (name, f"{name}.weight", f"{name}.bias"):
            for renamed_path in _cut(renamed.get(path, ()), cut):
                found[renamed_path] = _OF_PARAMETERS[cut]
    return found


def _cut(names: tuple[str, ...], cut: str) -> tuple[str, ...]:
    """Of a parameter and its factors ``A`` and ``B``, if it has some: those that have the dim."""
    return names[:1] + (names[2:] if cut == "out" else names[1:2])
