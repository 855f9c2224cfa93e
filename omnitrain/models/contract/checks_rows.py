"""Modules behind the last mixing of rows: a row of their output reaches that row of the last hidden states only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.data.pack import Pack
from omnitrain.models.contract.harness import Trial
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.ops.cpu.unread_rows import name_from_end
from omnitrain.ops.fused.rms_norm import rms_norm_form
from omnitrain.ops.fused.swiglu import is_swiglu


def row_local_modules(trial: Trial) -> tuple[str, ...]:
    """Their names, with items of a module list by their place from its end; none in a model with experts.

    Measured on a text: the gradient of a row of the last hidden states must reach the same row of a module's output,
    and be exactly zero at all others.
    """
    if trial.has_experts:
        return ()
    model = trial.ours
    names = list(_candidates(model))
    calls: dict[str, list[Tensor]] = {name: [] for name in names}
    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(_noting(calls[name])))
        hidden = _last_hidden_states(trial)
    outputs = {
        name: seen[0] for name, seen in calls.items() if len(seen) == 1 and seen[0].shape[:2] == hidden.shape[:2]
    }
    if not outputs:
        return ()
    local = set(outputs)
    for row in (0, hidden.size(1) // 2, hidden.size(1) - 1):
        target = hidden[0, row] @ torch.randn(hidden.size(-1), generator=torch.Generator().manual_seed(row))
        gradients = torch.autograd.grad(target, list(outputs.values()), retain_graph=True, allow_unused=True)
        local &= {name for name, gradient in zip(outputs, gradients, strict=True) if _reaches_only(gradient, row)}
    return tuple(name_from_end(model, name) for name in names if name in local)


def _candidates(model: Any) -> Iterator[str]:
    """Outermost modules that work row by row, by what they are or compute, of last blocks and outside of blocks."""
    head, last = model.get_output_embeddings(), None
    for name, module in model.named_modules():
        if module is head or not name or (last is not None and name.startswith(f"{last}.")) or _is_earlier(model, name):
            continue
        if type(module) is nn.Linear or is_swiglu(module) or rms_norm_form(module) is not None:
            last = name
            yield name


def _is_earlier(model: nn.Module, name: str) -> bool:
    """Whether it is in an item of a module list that is not the last one."""
    return any(part.startswith("-") and part != "-1" for part in name_from_end(model, name).split("."))


def _noting(seen: list[Tensor]) -> Any:
    return lambda module, args, output: seen.append(output)


def _last_hidden_states(trial: Trial) -> Tensor:
    states: list[Tensor] = []

    def head(hidden: Tensor, lm_head: nn.Module) -> Tensor:
        states.append(hidden)
        return lm_head.forward(hidden)

    trial.runner.run_pack(Pack.from_samples(trial.samples[:1]), EncodedMedia(), head)
    return states[0]


def _reaches_only(gradient: Tensor | None, row: int) -> bool:
    """Whether ``gradient`` ``[1, T, ...]`` is zero but for that row.

    It may be zero there, too: the first row of a causal model sees nothing but itself, whatever its query is.
    """
    if gradient is None:
        return False
    reached = gradient[0].flatten(1).any(1).nonzero().flatten().tolist()
    return reached == [row] or (row == 0 and not reached)
