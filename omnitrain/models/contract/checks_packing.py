"""Measure packing, attention, head, media and gradients. A "fact" describes a failure; None means no failure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.harness import Case, Trial, head_of, largest, relative
from omnitrain.models.discovery import config_nodes, float_tensors, raise_if_ours
from omnitrain.models.foundation.recurrent_segments import cut_tokens
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.torch_private import BatchNorm

# Relative to the largest value compared. Rounding is a hundred times smaller, a wrong mask or position far larger.
TOLERANCE = 1e-3
# Rounding in expert layers may change this much with their number of rows.
ROUNDING = 1e-4
# A relative difference of losses above this is an added term; rounding of a mean is smaller.
_ADDED = 1e-5
_ROUTER_LOGITS = "output_router_logits"
_LOSS_WEIGHTS = ("loss_coef", "loss_coefficient", "loss_weight", "loss_alpha")


@torch.no_grad()
def logit_error(trial: Trial) -> float:
    """Return the largest difference to plain transformers' logits over all samples, each alone in its pack."""
    packs = [Pack.from_samples([case.probe.sample]) for case in trial.cases]
    errors = [
        relative(trial.logits(pack, trial.media(pack)), case.logits)
        for pack, case in zip(packs, trial.cases, strict=True)
    ]
    return max(errors)


@torch.no_grad()
def head_fact(trial: Trial) -> str | None:
    """Check that the head is a linear layer, called once, whose output is the logits."""
    inside: list[Tensor] = []

    def head(hidden: Tensor, lm_head: nn.Module) -> Tensor:
        inside.append(lm_head.forward(hidden))
        return inside[-1]

    kind = type(head_of(trial.ours))
    if not issubclass(kind, nn.Linear):
        return f"its head is a {kind.__name__}, not a linear layer"
    output = trial.runner.run_pack(Pack.from_samples(trial.samples[:1]), EncodedMedia(), head)
    if len(inside) != 1:
        return f"its head is called {len(inside)} times"
    if output.logits is not inside[0]:
        return "logits are transformed after the head"
    return None


@torch.no_grad()
def mixing_modalities(trial: Trial) -> tuple[str, ...]:
    """Return the modalities in which a second item of a call changes the features of the first."""
    return tuple(modality for modality in trial.native.interfaces if _mixes(trial, modality))


def _mixes(trial: Trial, modality: str) -> bool:
    interface = trial.native.interfaces[modality]
    if not interface.items_are_independent:  # measured in evaluation mode
        return True
    if not any(isinstance(module, BatchNorm) for module in trial.plain.modules()):
        return False
    alone, together = (interface.encode(trial.plain, interface.probe_batch(count)).main for count in (1, 2))
    return relative(together[: len(alone)], alone) > TOLERANCE


@torch.no_grad()
def unread_side_features(trial: Trial, modality: str) -> list[str]:
    """Return the side features that can be set to zero without a change of the logits."""
    sample = next(case.probe.sample for case in trial.cases if modality in case.probe.modalities)
    pack = Pack.from_samples([sample])
    media = trial.media(pack)
    logits = trial.logits(pack, media)
    features = media.native[modality]
    unread = []
    for name in trial.native.interfaces[modality].side:
        zeroed = replace(features, side={**features.side, name: torch.zeros_like(features.side[name])})
        if torch.equal(logits, trial.logits(pack, EncodedMedia({**media.native, modality: zeroed}))):
            unread.append(name)
    return unread


@torch.no_grad()
def packing_fact(trial: Trial) -> str | None:
    """Check that packed samples have the losses of plain transformers, independent of their neighbours' words."""
    pack = Pack.from_samples(trial.samples)
    media = trial.media(pack)
    together = trial.losses(pack, media)
    for case in trial.cases:
        error = relative(together[case.probe.sample.index], case.losses)
        if not error <= TOLERANCE:
            return f"the loss of {_description(case)} differs by {error:.1e} when it is packed"
    for changed in (pack.info.indices[::2], pack.info.indices[1::2]):
        losses = trial.losses(Pack.from_samples(trial.reworded(changed)), media)
        for case in trial.cases:
            index = case.probe.sample.index
            error = relative(losses[index], together[index])
            if index not in changed and not error <= ROUNDING:
                return f"other words in neighbouring samples change the loss of {_description(case)} by {error:.1e}"
    return None


def _description(case: Case) -> str:
    return f"a sample of {len(case.probe.sample)} tokens ({' and '.join(case.probe.modalities) or 'text'})"


def leaking_class(trial: Trial) -> str | None:
    """Return the class of the first module whose output changes, or that fails, when two samples are packed."""
    pack = Pack.from_samples(trial.samples[:2])
    cu_seqlens = tuple(pack.cu_seqlens.tolist())
    for index, (start, stop) in reversed(list(zip(pack.info.indices, pairwise(cu_seqlens), strict=True))):
        alone = Pack.from_samples([sample for sample in trial.samples if sample.index == index])
        name = first_leak(
            trial.ours,
            partial(trial.logits, alone, EncodedMedia()),
            partial(trial.logits, pack, EncodedMedia(), PackedSequence(cu_seqlens)),
            start,
            stop,
            cu_seqlens[-1],
        )
        if name is not None:
            return type(trial.ours.get_submodule(name)).__name__
    return None


@torch.no_grad()
def needs_no_tails(trial: Trial) -> bool:
    """Whether a sample's first tokens keep their logits without its last tokens; False for a model with experts."""
    return not trial.has_experts and all(_tail_error(trial, case) <= TOLERANCE for case in trial.telling_cases)


def _tail_error(trial: Trial, case: Case) -> float:
    sample = case.probe.sample
    trained = sample.loss_mask & (np.arange(len(sample)) < len(sample) - 3)
    pack = Pack.from_samples([replace(sample, loss_mask=trained).without_tail()])
    return relative(trial.logits(pack, trial.media(pack)), case.logits[: pack.num_tokens])


@torch.no_grad()
def own_loss_fact(trial: Trial) -> str | None:
    """Find a term that transformers adds to the loss of a sample's tokens, such as a router's auxiliary loss."""
    case, forward = trial.cases[0], inspect.signature(type(trial.plain).forward)
    tokens = float(case.losses.mean())
    added, when = trial.own_loss(case.probe) - tokens, ""
    if abs(added) <= _ADDED * tokens and _ROUTER_LOGITS in forward.parameters:
        added = trial.own_loss(case.probe, **{_ROUTER_LOGITS: True}) - tokens
        when = f" where {_ROUTER_LOGITS} is set"
    if abs(added) <= _ADDED * tokens:
        return None
    nodes = [vars(node).items() for node in config_nodes(trial.plain.config)]
    weights = {f"{name} {value}" for items in nodes for name, value in items if name.endswith(_LOSS_WEIGHTS) and value}
    by = f" ({', '.join(sorted(weights))})" if weights else ""
    return f"transformers adds {added:.1e} to a sample's loss of {tokens:.2f}{when}{by}"


def gradient_fact(trial: Trial) -> str | None:
    """Check that the loss and gradients of all samples equal those of plain transformers."""
    cases = trial.telling_cases
    samples = [case.probe.sample for case in cases]
    if trial.contract.without_tails:
        samples = [sample.without_tail() for sample in samples]
    packs = [samples] if trial.contract.packs else [[sample] for sample in samples]
    trial.start_gradients(cases)
    total = 0.0
    for pack in map(Pack.from_samples, packs):
        term = trial.runner.text_loss(pack, trial.media(pack))[0]
        term.sum.backward()
        total += term.sum.item()
    expected = sum(float(case.losses.sum()) for case in cases)
    if not abs(total - expected) <= TOLERANCE * abs(expected):
        return f"the loss is {total:.4f}, but transformers' loss is {expected:.4f}"
    largest_error, parameter = _largest_gradient_error(trial)
    if not largest_error <= 10 * TOLERANCE:
        return f"the gradient of {parameter} has an error of {largest_error:.1e}"
    return None


def _largest_gradient_error(trial: Trial) -> tuple[float, str]:
    """The largest error relative to the gradient's largest value, and the parameter's name."""
    floor = TOLERANCE * max(trial.scales.values())  # smaller gradients are differences of large numbers
    largest_error, worst_name = 0.0, ""
    for name, parameter in trial.ours.named_parameters():
        error = largest(parameter.grad) / max(trial.scales[name], floor)
        if not error <= largest_error:
            largest_error, worst_name = error, name
    return largest_error, worst_name


def unused_parameters(trial: Trial) -> tuple[str, ...]:
    """Return the trainable parameters that get no gradient in plain transformers."""
    trainable = [name for name, parameter in trial.plain.named_parameters() if parameter.requires_grad]
    return tuple(name for name in trainable if not trial.scales[name])


# Relative to the largest value of a tensor. Rounding is smaller, the effect of another sample or position larger.
_SAME = 1e-4

_Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def first_leak(
    model: nn.Module, alone: Callable[[], Any], packed: Callable[[], Any], start: int, stop: int, length: int
) -> str | None:
    """Return the name of the first module whose output for a sample changes when the sample is packed.

    It is the first module to return with the same inputs and other outputs, so inner modules come before outer ones. If
    the model fails on the packed sequence, it is the innermost module that was running.

    Args:
        model: the model whose modules are compared.
        alone: runs the model on the sample.
        packed: runs the model on a sequence of ``length`` tokens; the sample has tokens ``start`` to ``stop``.
        start: first token of the sample in the packed sequence.
        stop: end of the sample in the packed sequence, exclusive.
        length: number of tokens of the packed sequence.

    Returns:
        The name; None if no module differs, among those whose tensors have a dim for tokens.
    """
    watch = _Watch(model)
    expected = watch.calls(alone, stop - start, 0, stop - start)
    try:
        got = watch.calls(packed, length, start, stop)
    except Exception as error:  # a foreign forward
        raise_if_ours(error)
        return watch.running[-1] if watch.running else None
    for key, (inputs, outputs) in expected.items():
        other_inputs, other_outputs = got.get(key, ([], []))
        if inputs and outputs and _equal(inputs, other_inputs) and not _equal(outputs, other_outputs):
            return key[0]
    return None


class _Watch:
    """Records the inputs and outputs of every module.

    Attributes:
        running: names of the modules that were called and have not returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running: list[str] = []

    @torch.no_grad()
    def calls(self, run: Callable[[], Any], length: int, start: int, stop: int) -> _Calls:
        """Return ``(name, index of the call)`` -> inputs and outputs at the tokens, in the order of the returns."""
        seen: _Calls = {}
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name:
                    hook = self._hook(name, seen, length, start, stop)
                    hooks.enter_context(
                        module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
                    )
                    hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            run()
        return seen

    def _hook(self, name: str, seen: _Calls, length: int, start: int, stop: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.remove(name)
            index = sum(1 for other, _ in seen if other == name)
            inputs, outputs = (list(_tokens(value, length, start, stop)) for value in ((args, kwargs), output))
            seen[name, index] = (inputs, outputs)

        return hook


def _tokens(value: Any, length: int, start: int, stop: int) -> Iterator[Tensor]:
    for tensor in float_tensors(cut_tokens(value, length, start, stop)):
        if stop - start in tensor.shape[1:]:
            yield tensor.clone()


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_SAME * float(a.abs().max()))
        for a, b in zip(one, other, strict=True)
    )
