"""Tensors of a checkpoint that the loaded model does not have, such as multi-token prediction heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from transformers import PreTrainedModel

from omnitrain.torch_private import unsaved_buffers_of


def counted(model: PreTrainedModel, names: set[str]) -> dict[str, int]:
    """Count the tensors ``names``, which a model does not have, by the missing module that they belong to.

    With 61 layers, ``mtp.fc.weight`` counts as ``mtp.*``, and ``model.layers.61.eh_proj.weight`` as
    ``model.layers.61.*``. Names of buffers that the model computes do not count: checkpoints of older versions have
    them.
    """
    modules = {name for name, _ in model.named_modules()}
    buffers = {name for module in model.modules() for name in unsaved_buffers_of(module)}
    counts: Counter[str] = Counter()
    for name in sorted(name for name in names if name.rpartition(".")[2] not in buffers):
        parts = name.split(".")
        known = next(n for n in range(len(parts) + 1) if ".".join(parts[: n + 1]) not in modules)
        counts[name if known == len(parts) - 1 else ".".join([*parts[: known + 1], "*"])] += 1
    return dict(counts)


def unused_line(unused: Mapping[str, int] | None) -> str:
    """Return the line that reports unused tensors; empty: none are unused."""
    if not unused:
        return ""
    return (
        f"the foundation's checkpoint holds {sum(unused.values())} tensors that this model does not use: "
        f"{listed(unused)}; they are not trained or saved; an export of the foundation alone copies them"
    )


def listed(unused: Mapping[str, int]) -> str:
    """Return the modules and numbers of unused tensors in words."""
    return ", ".join(f"{module} ({count})" for module, count in unused.items())
