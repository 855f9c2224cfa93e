"""Modules that a forward calls for some samples only, such as experts for image tokens."""

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
from omnitrain.recipe.globs import any_layer

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
