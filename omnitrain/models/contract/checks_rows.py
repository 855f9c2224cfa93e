"""Modules behind the last mixing of rows: a row of their output reaches that row of the last hidden states only."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.models.components.contract import SkippedModule
from omnitrain.models.contract.harness import Case, Trial
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.ops.cpu.unread_rows import name_from_end
from omnitrain.ops.fused.rms_norm import rms_norm_form
from omnitrain.ops.fused.swiglu import is_swiglu
from omnitrain.recipe.globs import any_layer


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


# Module -> the arguments of each of its calls in one forward.
_Calls = dict[str, list[dict[str, Any]]]

_SHORTEST = 2  # tokens: one to read, one to predict


@torch.no_grad()
def skipped_modules_of(trial: Trial) -> tuple[SkippedModule, ...]:
    """Outermost modules with parameters that the forward of some sample calls, and that of another does not.

    Media are encoded before, so towers are none of them. What a module takes where there is nothing for it follows from
    its calls: sizes that differ between them count rows, and are zero then.
    """
    calls = [_calls_of(trial, case) for case in trial.cases]
    always = set.intersection(*(set(seen) for seen in calls))
    everything = max(calls, key=len)
    sometimes = [name for name in everything if name not in always]
    outermost = [name for name in sometimes if _caller(name, everything) in always]
    found: dict[str, SkippedModule] = {}
    for name in outermost:
        own = [arguments for seen in calls for arguments in seen.get(name, ())]
        caller = _caller(name, everything)
        kind = SkippedModule(any_layer(name), any_layer(caller))
        is_near = all(any(map(_is_rows, seen[caller][0].values())) for seen in calls)
        found.setdefault(kind.module, _with_sizes(kind, own, is_near or _is_flat(trial.ours.get_submodule(name))))
    return tuple(found.values())


def unread_by_short_samples(trial: Trial) -> tuple[SkippedModule, ...]:
    """Modules whose parameters a long text reads and the shortest does not, such as a compressor of many tokens.

    They get a gradient on some ranks only, so ranks would not reduce the same.
    """
    texts = [case.probe.sample for case in trial.cases if not case.probe.modalities]
    longest = max(texts, key=len, default=None)
    if longest is None:
        return ()
    reads = [_parameters_read(trial, sample) for sample in (_shortest_part(longest), longest)]
    modules = dict.fromkeys(any_layer(name.rpartition(".")[0]) for name in sorted(reads[1] - reads[0]))
    problem = f"samples of {_SHORTEST} tokens do not read its parameters"
    return tuple(SkippedModule(module, "", problem=problem) for module in modules)


def _shortest_part(sample: Sample) -> Sample:
    first = slice(_SHORTEST)
    inputs = {name: values[first] for name, values in sample.token_inputs.items()}
    trained = np.array([False] * (_SHORTEST - 1) + [True])
    ids, positions = sample.input_ids[first], sample.position_ids[..., first]
    return replace(sample, input_ids=ids, loss_mask=trained, position_ids=positions, token_inputs=inputs)


def _parameters_read(trial: Trial, sample: Sample) -> set[str]:
    """Names of those that get a gradient."""
    trial.ours.zero_grad()
    trial.runner.text_loss(Pack.from_samples([sample]))[0].sum.backward()
    read = {name for name, parameter in trial.ours.named_parameters() if parameter.grad is not None}
    trial.ours.zero_grad()
    return read


def _calls_of(trial: Trial, case: Case) -> _Calls:
    """In the order of the first call of each module."""
    seen: _Calls = {}
    pack = Pack.from_samples([case.probe.sample])
    media = trial.media(pack)
    with ExitStack() as hooks:
        for name, module in trial.ours.named_modules():
            if next(module.parameters(), None) is not None:
                hook = partial(_note, seen, name)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        trial.logits(pack, media)
    return seen


def _note(seen: _Calls, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    seen.setdefault(name, []).append(dict(list(given.arguments.items())[1:]))


def _caller(name: str, called: _Calls) -> str:
    """The nearest module around it that is called at all; lists of modules are not."""
    outer: Iterator[str] = (name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1))
    return next((around for around in outer if around in called), "")


def _is_flat(module: nn.Module) -> bool:
    """Whether it has no blocks, which ranks gather one after the other, so that their place among others counts."""
    return not any(isinstance(part, nn.ModuleList) for part in module.modules())


def _with_sizes(kind: SkippedModule, calls: Sequence[dict[str, Any]], is_placed: bool) -> SkippedModule:
    """With what it takes where there is nothing for it; ``is_placed``: it can be called at its place, or at any."""
    if not is_placed:
        return replace(kind, problem="it has blocks, and what calls it is not always given rows")
    for name, value in ((name, value) for arguments in calls for name, value in arguments.items()):
        if not _is_rows(value):
            return replace(kind, problem=f"it takes `{name}`, of which nobody says what it is for no rows")
    shapes = [[tuple(value.shape) for value in arguments.values()] for arguments in calls]
    if len({tuple(map(len, own)) for own in shapes}) > 1:
        return replace(kind, problem="its calls have tensors of different numbers of dims")
    takes = tuple(
        tuple(sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*argument, strict=True))
        for argument in zip(*shapes, strict=True)
    )
    if not takes or not all(0 in sizes for sizes in takes):
        return replace(kind, problem="its calls do not differ in size, so there is none for no rows")
    return replace(kind, takes=takes)


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
