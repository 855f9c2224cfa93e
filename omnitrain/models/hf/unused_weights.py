"""Tensors of a checkpoint that the model loaded from it does not have, such as those that predict several tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def names_not_in_model() -> Iterator[set[str]]:
    """Names in the files of a model that is loaded within, of tensors that it does not have.

    Transformers tells of them, but not of those that a class lists as known (``_keys_to_ignore_on_load_unexpected``).
    """
    found: set[str] = set()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def noting(self: PreTrainedModel, loading_info: Any) -> None:
        found.update(loading_info.unexpected_keys)
        adjust(self, loading_info)

    PreTrainedModel._adjust_missing_and_unexpected_keys = noting
    try:
        yield found
    finally:
        PreTrainedModel._adjust_missing_and_unexpected_keys = adjust


def counted(model: PreTrainedModel, names: set[str]) -> dict[str, int]:
    """Where in ``model`` the tensors would be -> how many they are; buffers that it makes by itself do not count.

    Args:
        model: which does not have them.
        names: of tensors, such as ``mtp.fc.weight`` and ``model.layers.61.eh_proj.weight``: of a model with 61 layers
            these count as ``mtp.*`` and ``model.layers.61.*``.
    """
    modules = {name for name, _ in model.named_modules()}
    made = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    places = (_place(name, modules) for name in sorted(names) if name.rpartition(".")[2] not in made)
    return dict(Counter(places))


def _place(name: str, modules: set[str]) -> str:
    """The first part of the name that is no module, with all below it."""
    parts = name.split(".")
    known = next(n for n in range(len(parts) + 1) if ".".join(parts[: n + 1]) not in modules)
    return name if known == len(parts) - 1 else ".".join([*parts[: known + 1], "*"])


def unused_line(unused: Mapping[str, int] | None) -> str:
    """What to tell about them; empty: there are none."""
    if not unused:
        return ""
    places = ", ".join(f"{place} ({number})" for place, number in unused.items())
    number = sum(unused.values())
    return (
        f"the foundation's checkpoint holds {number} tensors that this model does not use: {places}; they are neither "
        "trained nor saved nor exported"
    )
