"""Find modules that work on each token alone up to the last hidden states, that samples skip, or that others read.

The parameters of a module that does not run while they are read cannot be an FSDP unit, which gathers only for itself.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import SkippedModule
from omnitrain.models.contract.trial import PlainRun, Trial
from omnitrain.models.discovery import ParameterReads, watching
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.ops.cpu.unread_rows import name_from_end
from omnitrain.ops.fused.rms_norm import rms_norm_form
from omnitrain.ops.fused.swiglu import is_swiglu
from omnitrain.recipe.globs import any_layer


def tokenwise_modules(trial: Trial) -> tuple[str, ...]:
    """Return modules in which each token of the output reaches only the same token of the last hidden states.

    Measured on a text: gradients of other tokens must be exactly zero. Items of a module list are named by their index
    from the end. A model with experts has none.
    """
    if trial.has_experts:
        return ()
    model = trial.ours
    names = list(_candidates(model))
    calls: dict[str, list[Tensor]] = {name: [] for name in names}
    watched = [(name, model.get_submodule(name)) for name in names]
    with watching(watched, after=lambda name, *args: calls[name].append(args[-1])):
        hidden = trial.runner.text_loss(EncodedPack(Pack.from_samples(trial.samples[:1]))).hidden
    if hidden is None:
        return ()
    once = {name: seen[0] for name, seen in calls.items() if len(seen) == 1}
    outputs = {name: output for name, output in once.items() if output.shape[:2] == hidden.shape[:2]}
    local = set(outputs)
    for token in (0, hidden.size(1) // 2, hidden.size(1) - 1) if outputs else ():
        target = hidden[0, token] @ torch.randn(hidden.size(-1), generator=torch.Generator().manual_seed(token))
        gradients = torch.autograd.grad(target, list(outputs.values()), retain_graph=True, allow_unused=True)
        local &= {name for name, gradient in zip(outputs, gradients, strict=True) if _reaches_only(gradient, token)}
    return tuple(name_from_end(model, name) for name in names if name in local)


def _candidates(model: Any) -> Iterator[str]:
    """Outermost linear layers, SwiGLU MLPs and RMS norms in last blocks and outside of blocks."""
    head, last = model.get_output_embeddings(), None
    for name, module in model.named_modules():
        if module is head or not name or (last is not None and name.startswith(f"{last}.")):
            continue
        if any(part.startswith("-") and part != "-1" for part in name_from_end(model, name).split(".")):
            continue  # in an earlier block
        if type(module) is nn.Linear or is_swiglu(module) or rms_norm_form(module) is not None:
            last = name
            yield name


def _reaches_only(gradient: Tensor | None, token: int) -> bool:
    """Whether ``gradient`` ``[1, T, ...]`` is zero at other tokens. Token 0, which sees only itself, may have none."""
    if gradient is None:
        return False
    reached = gradient[0].flatten(1).any(1).nonzero().flatten().tolist()
    return reached == [token] or (token == 0 and not reached)


# Module -> arguments of each of its calls in one forward.
_Calls = dict[str, list[dict[str, Any]]]

_SHORTEST = 2  # tokens: one to read, one to predict


@torch.no_grad()
def skipped_modules_of(trial: Trial) -> tuple[SkippedModule, ...]:
    """Return outermost modules that only some samples call; a size that varies is a number of rows."""
    calls = [_calls_of(trial, case) for case in trial.cases]
    always = set.intersection(*(set(seen) for seen in calls))
    everything = max(calls, key=len)
    sometimes = [name for name in everything if name not in always]
    outermost = [name for name in sometimes if _caller(name, everything) in always]
    skipped: dict[str, SkippedModule] = {}
    for name in outermost:
        arguments = [call for seen in calls for call in seen.get(name, ())]
        caller = _caller(name, everything)
        module = SkippedModule(any_layer(name), any_layer(caller))
        # Ranks gather blocks one after the other, so a module with blocks must be called at its position.
        has_blocks = any(isinstance(inner, nn.ModuleList) for inner in trial.ours.get_submodule(name).modules())
        caller_takes_rows = all(any(map(_is_rows, seen[caller][0].values())) for seen in calls)
        skipped.setdefault(module.module, _with_sizes(module, arguments, caller_takes_rows or not has_blocks))
    return tuple(skipped.values())


def unread_by_short_samples(trial: Trial) -> tuple[SkippedModule, ...]:
    """Return modules whose parameters only long texts read, so that ranks' gradient reductions would not match."""
    texts = [case.probe.sample for case in trial.cases if not case.probe.modalities]
    if not texts:
        return ()
    longest, first = max(texts, key=len), slice(_SHORTEST)
    shortest = replace(
        longest,
        input_ids=longest.input_ids[first],
        loss_mask=np.array([False] * (_SHORTEST - 1) + [True]),
        position_ids=longest.position_ids[..., first],
        token_inputs={name: values[first] for name, values in longest.token_inputs.items()},
    )
    short, long = (trial.step([Pack.from_samples([sample])]).gradients for sample in (shortest, longest))
    modules = dict.fromkeys(any_layer(name.rpartition(".")[0]) for name in sorted(long.keys() - short.keys()))
    problem = f"samples of {_SHORTEST} tokens do not read its parameters"
    return tuple(SkippedModule(module, "", problem=problem) for module in modules)


def _calls_of(trial: Trial, case: PlainRun) -> _Calls:
    """The calls of one forward, in the order of the first call of each module."""
    seen: _Calls = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        seen.setdefault(name, []).append(dict(list(bound.arguments.items())[1:]))

    pack = Pack.from_samples([case.probe.sample])
    encoded = trial.encoded(pack)
    modules = [(name, module) for name, module in trial.ours.named_modules() if any(True for _ in module.parameters())]
    with watching(modules, before=record):
        trial.logits(encoded)
    return seen


def _caller(name: str, called: _Calls) -> str:
    outer: Iterator[str] = (name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1))
    return next((around for around in outer if around in called), "")


def _with_sizes(skipped: SkippedModule, calls: Sequence[dict[str, Any]], can_be_called: bool) -> SkippedModule:
    """Add the shapes of its empty arguments, or the problem; ``can_be_called``: in every forward, in the same order."""
    if not can_be_called:
        return replace(skipped, problem="it has blocks, and the module that calls it does not always get rows")
    for name, value in ((name, value) for arguments in calls for name, value in arguments.items()):
        if not _is_rows(value):
            return replace(skipped, problem=f"it takes `{name}`, whose value for empty inputs is unknown")
    shapes = [[tuple(value.shape) for value in arguments.values()] for arguments in calls]
    if len({tuple(map(len, arguments)) for arguments in shapes}) > 1:
        return replace(skipped, problem="its calls have tensors with different numbers of dims")
    takes = tuple(
        tuple(sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*argument, strict=True))
        for argument in zip(*shapes, strict=True)
    )
    if not takes or not all(0 in sizes for sizes in takes):
        return replace(skipped, problem="all its calls have the same sizes, so the size for empty inputs is unknown")
    return replace(skipped, takes=takes)


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@torch.no_grad()
def read_from_outside(trial: Trial) -> tuple[str, ...]:
    """Return the names of these modules, with ``*`` for indices in module lists; tied parameters are ignored."""
    reads = _Outside(trial.ours)
    begin, end = (lambda _, m, *__: reads.running.append(m)), (lambda _, m, *__: reads.running.remove(m))
    with watching(trial.ours.named_modules(), begin, end), reads:
        for case in trial.telling_cases:
            pack = Pack.from_samples([case.probe.sample])
            trial.logits(trial.encoded(pack))
    called = [name for name, module in trial.ours.named_modules() if not isinstance(module, nn.ModuleList)]
    return tuple(dict.fromkeys(any_layer(name) for name in called if name in reads.names))


class _Outside(ParameterReads):
    """Records, for each parameter that is read, the modules around it that are not running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.running: list[nn.Module] = []
        holders = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {name for name, parameter in model.named_parameters() if holders[parameter] > 1}
        self._modules = dict(model.named_modules())

    def note(self, name: str) -> None:
        """Record the modules around the parameter ``name`` that are not running."""
        if name not in self._tied:
            around = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
            self.names |= {outer for outer in around if self._modules[outer] not in self.running}
