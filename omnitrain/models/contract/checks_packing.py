"""Measure packing, attention, head, media and gradients. A "fact" describes a failure; None means no failure."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.trial import Trial, compare, largest, relative, worst
from omnitrain.models.discovery import config_nodes, float_tensors, raise_if_ours, watching
from omnitrain.models.discovery.text_run import first_block
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.recurrent_segments import cut_tokens
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.torch_private import BatchNorm

# Relative to the largest value compared. Rounding is a hundred times smaller, a wrong mask or position far larger.
TOLERANCE = 1e-3
# Smaller gradients, relative to the largest of all, are differences of large numbers.
SMALLEST = 1e-3
# Rounding in expert layers may change this much with their number of rows.
ROUNDING = 1e-4
# A relative difference of losses above this is an added term; rounding of a mean is smaller.
_ADDED = 1e-5
_ROUTER_LOGITS = "output_router_logits"
_LOSS_WEIGHTS = ("loss_coef", "loss_coefficient", "loss_weight", "loss_alpha")


@torch.no_grad()
def logit_error(trial: Trial) -> float:
    """Return the largest difference to plain transformers' logits over all samples, each alone in its pack."""
    packs = [Pack.from_samples([sample]) for sample in trial.samples]
    found = (trial.logits(trial.encoded(pack)) for pack in packs)
    return worst(relative(logits, case.logits) for logits, case in zip(found, trial.cases, strict=True))


@torch.no_grad()
def head_fact(trial: Trial) -> str | None:
    """Check that the head is a linear layer, called once, whose output is the logits."""
    inside: list[tuple[Tensor, Tensor]] = []

    def head(hidden: Tensor, lm_head: nn.Module) -> Tensor:
        logits: Tensor = lm_head.forward(hidden)
        inside.append((logits, logits.clone()))
        return logits

    kind: type = type(trial.ours.get_output_embeddings())
    if not issubclass(kind, nn.Linear):
        return f"its head is a {kind.__name__}, not a linear layer"
    output = trial.runner.run_pack(EncodedPack(Pack.from_samples(trial.samples[:1])), head)
    if len(inside) != 1:
        return f"its head is called {len(inside)} times"
    ((returned, before),) = inside
    if output.logits is not returned or not torch.equal(returned, before):  # some models write over them
        return "logits are transformed after the head"
    return None


@torch.no_grad()
def mixing_modalities(trial: Trial) -> tuple[str, ...]:
    """Return the modalities in which a second item of a call changes the features of the first."""
    mixing = []
    for modality, interface in trial.native.interfaces.items():
        mixes = not interface.items_are_independent  # measured in evaluation mode
        if not mixes and any(isinstance(module, BatchNorm) for module in trial.plain.modules()):
            alone, together = (interface.encode(trial.plain, interface.probe_batch(count)).main for count in (1, 2))
            mixes = relative(together[: len(alone)], alone) > TOLERANCE
        mixing += [modality] * mixes
    return tuple(mixing)


@torch.no_grad()
def unread_side_features(trial: Trial, modality: str) -> list[str]:
    """Return the side features that can be set to zero without a change of the logits."""
    sample = next(case.probe.sample for case in trial.cases if modality in case.probe.modalities)
    pack = Pack.from_samples([sample])
    encoded = trial.encoded(pack)
    logits = trial.logits(encoded)
    features = encoded.native[modality]
    unread = []
    for name in trial.native.interfaces[modality].side:
        zeroed = replace(features, side={**features.side, name: torch.zeros_like(features.side[name])})
        if torch.equal(logits, trial.logits(EncodedPack(pack, {**encoded.native, modality: zeroed}))):
            unread.append(name)
    return unread


@torch.no_grad()
def packing_fact(trial: Trial) -> str | None:
    """Check that packed samples have the losses of plain transformers, independent of their neighbours' words."""
    pack = Pack.from_samples(trial.samples)
    encoded = trial.encoded(pack)
    together = trial.losses(encoded)
    cases = {case.probe.sample.index: case for case in trial.cases}
    name = {
        index: f"a sample of {len(case.probe.sample)} tokens ({' and '.join(case.probe.modalities) or 'text'})"
        for index, case in cases.items()
    }
    for index, case in cases.items():
        error = relative(together[index], case.losses)
        if not error <= TOLERANCE:
            return f"the loss of {name[index]} differs by {error:.1e} when it is packed"
    for changed in (pack.info.indices[::2], pack.info.indices[1::2]):
        losses = trial.losses(EncodedPack(Pack.from_samples(trial.reworded(changed)), encoded.native))
        for index in cases.keys() - set(changed):
            error = relative(losses[index], together[index])
            if not error <= ROUNDING:
                return f"other words in neighbouring samples change the loss of {name[index]} by {error:.1e}"
    return None


def leaking_class(trial: Trial) -> str | None:
    """Return the class of the first module whose output changes, or that fails, when two samples are packed."""
    pack = Pack.from_samples(trial.samples[:2])
    cu_seqlens = tuple(pack.cu_seqlens.tolist())
    for index, (start, stop) in reversed(list(zip(pack.info.indices, pairwise(cu_seqlens), strict=True))):
        alone = Pack.from_samples([sample for sample in trial.samples if sample.index == index])
        expected, watch = _Watch(trial, stop - start, 0, stop - start), _Watch(trial, cu_seqlens[-1], start, stop)
        expected.run(alone)
        try:
            watch.run(pack, PackedSequence(cu_seqlens))
        except Exception as error:  # a foreign forward
            raise_if_ours(error)
            name = watch.running[-1] if watch.running else None
        else:
            name = expected.first_difference(watch)
        if name is not None:
            return type(trial.ours.get_submodule(name)).__name__
    return None


def holds_blocks(trial: Trial, class_name: str) -> bool:
    """Whether modules of a class contain text layers, which FSDP would gather once for each sample of a rank."""
    block = first_block(trial.ours)
    holders = [module for module in trial.ours.modules() if module is not block and type(module).__name__ == class_name]
    return any(inner is block for holder in holders for inner in holder.modules())


@torch.no_grad()
def needs_no_tails(trial: Trial) -> bool:
    """Whether a sample's first tokens keep their logits without its last tokens; False for a model with experts."""
    for case in () if trial.has_experts else trial.telling_cases:
        sample = case.probe.sample
        trained = sample.loss_mask & (np.arange(len(sample)) < len(sample) - 3)
        pack = Pack.from_samples([replace(sample, loss_mask=trained).without_tail()])
        if not relative(trial.logits(trial.encoded(pack)), case.logits[: pack.num_tokens]) <= TOLERANCE:
            return False
    return not trial.has_experts


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
    """Compare the loss and gradients of all samples with plain transformers'."""
    samples = [case.probe.sample for case in trial.telling_cases]
    if trial.contract.without_tails:
        samples = [sample.without_tail() for sample in samples]
    expected = trial.expected
    found = trial.step(trial.packed(samples))
    if not abs(found.loss - expected.loss) <= TOLERANCE * abs(expected.loss):
        return f"the loss is {found.loss:.4f}, but transformers' loss is {expected.loss:.4f}"
    difference = compare(found.gradients, expected.gradients, SMALLEST)
    return f"the gradient of {difference}" if not difference.error <= 10 * TOLERANCE else None


def unused_parameters(trial: Trial) -> tuple[str, ...]:
    """Return the trainable parameters that get no gradient in plain transformers."""
    trainable = [name for name, parameter in trial.plain.named_parameters() if parameter.requires_grad]
    return tuple(name for name in trainable if not largest(trial.expected.gradients.get(name)))


# Relative to the largest value of a tensor. Rounding is smaller, the effect of another sample or position larger.
_SAME = 1e-4


class _Watch:
    """Records the inputs and outputs of every module at the tokens ``start`` to ``stop`` of ``length`` tokens."""

    def __init__(self, trial: Trial, length: int, start: int, stop: int) -> None:
        self._trial, self._length, self._start, self._stop = trial, length, start, stop
        # (name, index of the call) -> inputs and outputs with a dim for tokens; inner modules return before outer ones.
        self.calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.running: list[str] = []  # were called and have not returned

    @torch.no_grad()
    def run(self, pack: Pack, packed: PackedSequence | None = None) -> None:
        modules = ((name, module) for name, module in self._trial.ours.named_modules() if name)
        with watching(modules, lambda name, *_: self.running.append(name), self._note):
            self._trial.logits(EncodedPack(pack), packed)

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.running.remove(name)
        index = sum(1 for other, _ in self.calls if other == name)
        self.calls[name, index] = self._tokens((args, kwargs)), self._tokens(output)

    def _tokens(self, value: Any) -> list[Tensor]:
        cut = float_tensors(cut_tokens(value, self._length, self._start, self._stop))
        return [tensor.clone() for tensor in cut if self._stop - self._start in tensor.shape[1:]]

    def first_difference(self, other: _Watch) -> str | None:
        """The first module to return with the same inputs and other outputs."""
        for key, (inputs, outputs) in self.calls.items():
            other_inputs, other_outputs = other.calls.get(key, ([], []))
            if inputs and outputs and _equal(inputs, other_inputs) and not _equal(outputs, other_outputs):
                return key[0]
        return None


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_SAME * float(a.abs().max()))
        for a, b in zip(one, other, strict=True)
    )
