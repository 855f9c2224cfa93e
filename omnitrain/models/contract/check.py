"""The contract check: measure on a tiny model which optimizations an unmodified HF model allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.checks_packing import (
    TOLERANCE,
    gradient_fact,
    head_fact,
    holds_blocks,
    leaking_class,
    logit_error,
    mixing_modalities,
    needs_no_tails,
    own_loss_fact,
    packing_fact,
    unread_side_features,
    unused_parameters,
)
from omnitrain.models.contract.checks_unread import (
    read_from_outside,
    skipped_modules_of,
    tokenwise_modules,
    unread_by_short_samples,
)
from omnitrain.models.contract.samples import forbidden_words
from omnitrain.models.contract.tiny_model import tiny_config, tiny_configs
from omnitrain.models.contract.trial import Failure, Trial, attempt
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.in_forward import outermost_unreached
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.hf.hub_kernels import kernels_of
from omnitrain.ops.attention.install import use_omnitrain_attention

_MOST_SEGMENTED_CLASSES = 3


def contract_of(model: PreTrainedModel, key: str = "model.foundation") -> Contract:
    """Return a foundation's contract, cached or measured; UserError: names each check that refused it, and ``key``."""

    def accepted() -> Contract:
        contract = check_contract(type(model), model.config)
        if contract.refusals:
            facts = "; ".join(dict.fromkeys(f"{finding.check}: {finding.fact}" for finding in contract.refusals))
            raise UserError(f"{key}: omnitrain cannot train {type(model).__name__} with this config: {facts}")
        return contract

    return cached(model, ".json", Contract, accepted)


def require_attention_backend(runner: FoundationRunner, backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run two packed texts through a tiny model of the foundation with ``backend``, as training on ``device`` would.

    Raises UserError: the backend, which is not ``auto``, cannot compute a layer (the message names both, and the
    backends that can), or the model keeps its own attention.
    """
    model, contract = runner.model, runner.contract
    if contract.attention != "omnitrain":
        raise UserError(
            f"attention backend {backend!r}: {type(model).__name__} keeps its own attention; set the backend to auto"
        )
    tiny = Trial.of(type(model), tiny_config(model.config), contract)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), tiny as trial:
        use_omnitrain_attention(trial.ours, backend)
        trial.ours.to(device, dtype)
        texts = [probe.sample for probe in trial.probes if not probe.modalities]
        trial.runner.text_loss(EncodedPack(Pack.from_samples(texts[: 2 if contract.packs else 1]).to(device)))


def check_contract(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Contract:
    """Check ``model_class`` on a tiny ``config``, whose towers and MLPs keep their size if a check does not pass.

    Returns the contract with a finding per check. For a model that fails even unpacked, one finding has ``refused``.
    """
    configs = tiny_configs(config)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        for (small, larger), accepted in zip(pairwise(configs), ({"passed"}, {"passed", "fallback"}), strict=True):
            if small.to_dict() == larger.to_dict():
                continue
            contract = attempt(_contract_on, model_class, small)
            if isinstance(contract, Contract) and {f.outcome for f in contract.findings} - {"left out"} <= accepted:
                return contract
        contract = attempt(_contract_on, model_class, configs[-1])
        return Contract().noting("tiny model", "refused", contract) if isinstance(contract, Failure) else contract


def _contract_on(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Contract:
    """Run the checks until one refuses. An exception of the model's code refuses it if the check has no fallback."""
    with Trial.of(model_class, config) as trial:
        for name, check in _checks().items():
            failed = attempt(check, trial)
            if isinstance(failed, Failure):
                trial.note(name, "refused", failed)
            if trial.contract.refusals:
                break
    if kernels := kernels_of(trial.plain):
        replaced = "; the check ran torch code instead" if any(kernel.is_used for kernel in kernels) else ""
        trial.note("kernels", "passed", ", ".join(map(str, kernels)) + replaced)
    return trial.contract


def _checks() -> dict[str, Callable[[Trial], None]]:
    """Return check name -> check, in order: outputs, then computations that can be skipped, then gradients."""
    outside = "parameters are read while their module does not run: {}"  # an outer module must gather them
    skipping = "these modules skip tokens that no loss reads: {}"  # gradients are then checked without these tokens
    no_tails = "tokens after the last supervised token are skipped"  # as here
    return {
        "modalities": _modalities,
        "attention": _attention,
        "head": _head,
        "items": _items,
        "side features": _side_features,
        "packing": _packing,
        "skipped modules": _skipped_modules,
        "units": partial(_noting, "units", read_from_outside, outside, "read_outside"),
        "own loss": _own_loss,
        "unread tokens": partial(_noting, "unread tokens", tokenwise_modules, skipping, "tokenwise"),
        "tails": partial(_noting, "tails", needs_no_tails, no_tails, "without_tails"),
        "gradients": _gradients,
    }


def _modalities(trial: Trial) -> None:
    """Check that features of each modality can be computed outside the forward, one per placeholder."""
    for modality, interface in trial.native.interfaces.items():
        fact = f"features of {interface.component} enter through {interface.method}"
        trial.note(f"modality {modality}", "passed", fact)
    for modality, reason in trial.native.in_forward.items():
        fact = f"read by the model's own forward, one sample per pack: {reason}"
        trial.note(f"modality {modality}", "fallback", fact)
    for modality, reason in trial.native.refused.items():
        trial.note(f"modality {modality}", "fallback", f"samples with this modality are refused: {reason}")
    for probe in trial.probes:
        case = attempt(trial.run_plain, probe)
        if not isinstance(case, Failure):
            trial.cases.append(case)
        elif len(set(probe.modalities)) > 1:
            mixture = " and ".join(sorted(set(probe.modalities)))
            trial.note("mixtures", "passed", f"transformers refuses {mixture} in one sample: {case}")
        else:
            trial.note("modalities", "refused", f"{' '.join(probe.modalities) or 'text'}: {case}")


def _attention(trial: Trial) -> None:
    """Check that a single sample has the logits of plain transformers with omnitrain's attention."""
    error = attempt(logit_error, trial)
    if not isinstance(error, Failure) and error <= TOLERANCE:
        exactly = "bit for bit" if error == 0 else f"within {error:.0e} of the largest"
        trial.note("attention", "passed", f"logits of a single sample equal those of transformers, {exactly}")
        return
    fact = error if isinstance(error, Failure) else f"logits of a single sample differ by {error:.1e} of the largest"
    trial.note("attention", "fallback", f"{fact}; the model keeps its own attention", attention="native", packs=False)
    trial.note("packing", "fallback", "one sample per pack: only omnitrain's attention keeps packed samples apart")


def _head(trial: Trial) -> None:
    """Check that the logits are the output of the head, unchanged."""
    if (fact := attempt(head_fact, trial)) is None:
        trial.note("head", "passed", "the loss is computed inside the head")
    else:
        if forbidden := forbidden_words(trial.plain):
            fact = f"the forward forbids {len(forbidden)} tokens, but where they are labels (media to write); {fact}"
        trial.note("head", "fallback", f"{fact}; the loss is computed on the logits of supervised tokens", head="plain")


def _items(trial: Trial) -> None:
    """Check that a tower's features of an item do not depend on other items in the call."""
    if mixed := mixing_modalities(trial):
        fact = f"features of {', '.join(mixed)} depend on other items in the call; samples are encoded one at a time"
        trial.note("items", "fallback", fact, by_sample=mixed)
    elif trial.native.interfaces:
        trial.note("items", "passed", "the features of an item do not depend on other items in the call")


def _side_features(trial: Trial) -> None:
    """Check that the model reads its side features (deepstack levels)."""
    for modality, interface in trial.native.interfaces.items():
        if unread := unread_side_features(trial, modality) if interface.side else []:
            trial.note("side features", "refused", f"{modality}: the model does not read {', '.join(unread)}")
        elif interface.side:
            trial.note("side features", "passed", f"{modality}: {', '.join(interface.side)} reach the logits")


def _packing(trial: Trial) -> None:
    """Check that packed samples give the same losses as single ones; modules that mix them run sample by sample."""
    if not trial.contract.packs:
        return
    segmented: tuple[str, ...] = ()
    while fact := attempt(packing_fact, trial):
        leak = leaking_class(trial)
        is_full = len(segmented) == _MOST_SEGMENTED_CLASSES
        if leak is None or is_full or leak in segmented or holds_blocks(trial, leak):
            _unpack(trial, fact if leak is None else f"{fact}, first in {leak}")
            return
        segmented = (*segmented, leak)
        trial.use(segmented=segmented)
    alone = f"; {' and '.join(segmented)} run sample by sample" if segmented else ""
    fact = f"packed samples give the same losses as single ones{alone}"
    trial.note("packing", "fallback" if segmented else "passed", fact)


def _skipped_modules(trial: Trial) -> None:
    """Find modules that some samples skip: they are called on empty inputs, so that all ranks make the same calls."""
    calls = attempt(skipped_modules_of, trial)
    skipped = () if isinstance(calls, Failure) else calls
    trial.use(skipped_modules=skipped)
    if skipped and isinstance(failed := attempt(logit_error, trial), Failure):
        problem = f"on empty inputs it fails: {failed}"
        skipped = tuple(replace(module, problem=module.problem or problem) for module in skipped)
    short = attempt(unread_by_short_samples, trial)
    if not isinstance(short, Failure):
        prefixes = tuple(f"{module.module}." for module in skipped)
        skipped += tuple(module for module in short if not f"{module.module}.".startswith(prefixes))
    trial.use(skipped_modules=skipped)
    names = ", ".join(module.module for module in skipped)
    problems = "; ".join(dict.fromkeys(module.problem for module in skipped if module.problem))
    if skipped:
        how = f"{problems}: one rank only" if problems else "they call them on empty inputs"
        trial.note("skipped modules", "fallback" if problems else "passed", f"some samples skip {names}; {how}")


def _noting(check: str, measure: Callable[[Trial], Any], said: str, use: str, trial: Trial) -> None:
    """Note and use what a measure finds; nothing if the model's code fails in it."""
    found = attempt(measure, trial)
    if found and not isinstance(found, Failure):
        trial.note(check, "passed", said.format(", ".join(found) if isinstance(found, tuple) else ""), **{use: found})


def _own_loss(trial: Trial) -> None:
    """Report a term that the model's own loss adds to the loss of the tokens (a router's auxiliary loss)."""
    fact = attempt(own_loss_fact, trial)
    if fact is not None and not isinstance(fact, Failure):  # a model without its own loss adds nothing
        trial.note("own loss", "left out", f"{fact}; omnitrain trains only the loss of the tokens")


def _gradients(trial: Trial) -> None:
    """Compare the loss and all gradients with plain transformers'; list parameters that never get a gradient."""
    fact = attempt(gradient_fact, trial)
    skipping = {"unread tokens": trial.contract.tokenwise, "tails": trial.contract.without_tails}
    if fact is not None and any(skipping.values()):
        trial.use(tokenwise=(), without_tails=False)
        for check in (check for check, is_used in skipping.items() if is_used):
            trial.note(check, "fallback", f"{fact} without the tokens that no loss reads; all tokens are computed")
        fact = attempt(gradient_fact, trial)
    if fact is not None and trial.contract.packs:
        _unpack(trial, fact)
        fact = attempt(gradient_fact, trial)
    if fact is not None:
        trial.note("gradients", "refused", fact)
        return
    trial.note("gradients", "passed", "the loss and all gradients equal those of transformers")
    if unused := unused_parameters(trial):
        shown = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
        reached = [name for name, gradient in trial.expected.gradients.items() if gradient.any()]
        fact = f"{len(unused)} of the tiny model never get a gradient: {shown}"
        trial.note("unused parameters", "passed", fact, beyond_text=outermost_unreached(reached, unused))


def _unpack(trial: Trial, fact: str) -> None:
    layers = ", ".join(trial.runner.own_attention)
    why = f"; {layers} computes attention in its own code, which cannot be replaced" if layers else ""
    trial.note("packing", "fallback", f"one sample per pack: {fact}{why}", packs=False, segmented=())
