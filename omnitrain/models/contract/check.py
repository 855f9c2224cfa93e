"""The contract check: what an unmodified HF model honours, and does not, measured on its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract, SkippedModule
from omnitrain.models.contract.cache import contract_path, keep, kept
from omnitrain.models.contract.checks_packing import (
    TOLERANCE,
    gradient_fact,
    head_fact,
    leaking_class,
    logit_error,
    mixing_modalities,
    needs_no_tails,
    own_loss_fact,
    packing_fact,
    unread_side_features,
    without_gradient,
)
from omnitrain.models.contract.checks_reads import read_from_outside
from omnitrain.models.contract.checks_rows import row_local_modules, skipped_modules_of, unread_by_short_samples
from omnitrain.models.contract.harness import Failure, Trial, attempt
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_configs
from omnitrain.models.foundation.in_forward import outermost_unreached
from omnitrain.models.hf.hub_kernels import kernels_of, torch_kernels

_MOST_SEGMENTED_CLASSES = 3


def contract_of(model: PreTrainedModel) -> Contract:
    """The contract of a foundation, from the cache or by checking its twin.

    Raises:
        UserError: it cannot be trained here; names every check that refused it and what was measured.
    """
    path = contract_path(type(model), model.config)
    if (known := kept(path, Contract.from_json)) is not None:
        return known
    contract = check_contract(type(model), model.config)
    if contract.refusals:
        facts = dict.fromkeys(f"{finding.check}: {finding.fact}" for finding in contract.refusals)
        raise UserError(
            f"model.foundation: {type(model).__name__} cannot be trained with this config: {'; '.join(facts)}"
        )
    keep(path, contract)
    return contract


def check_contract(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Contract:
    """Check ``model_class`` on a small twin of ``config``: same hidden widths, few layers, narrow MLPs, peaked weights.

    Where not everything passes, towers are kept whole, and where a model would be refused, MLPs, too.

    Returns:
        The contract with a finding per check. A model that fails even unpacked has a finding that refuses it.
    """
    twins = tiny_configs(config)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        for (small, larger), accepted in zip(pairwise(twins), ({"passed"}, {"passed", "fallback"}), strict=True):
            if small.to_dict() == larger.to_dict():
                continue
            contract = attempt(partial(_contract_on, model_class, small))
            if isinstance(contract, Contract) and {f.outcome for f in contract.findings} - {"left out"} <= accepted:
                return contract
        contract = attempt(partial(_contract_on, model_class, twins[-1]))
        return Contract().noting("twin", "refused", contract) if isinstance(contract, Failure) else contract


def _contract_on(model_class: type[PreTrainedModel], twin: PreTrainedConfig) -> Contract:
    plain = build_tiny_model(model_class, twin)
    with torch_kernels(plain):
        contract = _checked(Trial(plain))
    if kernels := kernels_of(plain):
        replaced = "; the check ran torch code in its place" if any(kernel.is_used for kernel in kernels) else ""
        contract = contract.noting("kernels", "passed", ", ".join(map(str, kernels)) + replaced)
    return contract


def _checked(trial: Trial) -> Contract:
    """Every check, until one refuses. What a model's code raises in one, where that has no fallback, is a refusal."""
    for name, check in _checks().items():
        failed = attempt(partial(check, trial))
        if isinstance(failed, Failure):
            trial.note(name, "refused", failed)
        if trial.contract.refusals:
            break
    return trial.contract


def _checks() -> dict[str, Callable[[Trial], None]]:
    """By name, in order: what a model gives, then what it need not compute for that, then its gradients."""
    return {
        "modalities": _modalities,
        "attention": _attention,
        "head": _head,
        "items": _items,
        "side features": _side_features,
        "packing": _packing,
        "left out": _left_out,
        "units": _units,
        "own loss": _own_loss,
        "last rows": _last_rows,
        "tails": _tails,
        "gradients": _gradients,
    }


def _modalities(trial: Trial) -> None:
    """Each modality's rows can be made apart from the forward, as many as there are placeholders."""
    for modality, port in trial.native.ports.items():
        trial.note(f"modality {modality}", "passed", f"rows of {port.component} enter through {port.method}")
    for modality, reason in trial.native.in_forward.items():
        fact = f"read by the model's own forward, one sample per row: {reason}"
        trial.note(f"modality {modality}", "fallback", fact)
    for modality, reason in trial.native.refused.items():
        trial.note(f"modality {modality}", "fallback", f"samples with it are refused: {reason}")
    for probe in probe_samples(trial.plain, trial.native):
        case = attempt(partial(trial.run_plain, probe))
        if not isinstance(case, Failure):
            trial.cases.append(case)
        elif len(set(probe.modalities)) > 1:
            mixture = " and ".join(sorted(set(probe.modalities)))
            trial.note("mixtures", "passed", f"transformers itself refuses {mixture} in one sample: {case}")
        else:
            trial.note("modalities", "refused", f"{' '.join(probe.modalities) or 'text'}: {case}")


def _attention(trial: Trial) -> None:
    """Through our attention, a sample alone has the logits of plain transformers."""
    error = attempt(partial(logit_error, trial))
    if not isinstance(error, Failure) and error <= TOLERANCE:
        exactly = "bit for bit" if error == 0 else f"within {error:.0e} of the largest"
        trial.note("attention", "passed", f"logits of a sample alone are those of transformers, {exactly}")
        return
    fact = error if isinstance(error, Failure) else f"logits of a sample alone differ by {error:.1e} of the largest"
    trial.use(attention="native", packs=False)
    trial.note("attention", "fallback", f"{fact}; the model keeps its own attention")
    trial.note("packing", "fallback", "one sample per pack: only omnitrain's attention keeps packed samples apart")


def _head(trial: Trial) -> None:
    """What the model returns as logits is what its head returned."""
    fact = attempt(partial(head_fact, trial))
    if fact is None:
        trial.note("head", "passed", "the loss is computed inside the head")
        return
    trial.use(head="plain")
    trial.note("head", "fallback", f"{fact}; the loss is computed on the logits of the supervised rows")


def _items(trial: Trial) -> None:
    """A tower's rows of an item do not depend on the items beside it."""
    if mixed := mixing_modalities(trial):
        trial.use(by_sample=mixed)
        fact = f"rows of {', '.join(mixed)} depend on the other items of a call; samples are encoded one at a time"
        trial.note("items", "fallback", fact)
    elif trial.native.ports:
        trial.note("items", "passed", "an item's rows are the same alone and beside others")


def _side_features(trial: Trial) -> None:
    """Side features (deepstack levels) are read by the model."""
    for modality, port in trial.native.ports.items():
        if not port.side:
            continue
        if unread := unread_side_features(trial, modality):
            trial.note("side features", "refused", f"{modality}: the model does not read {', '.join(unread)}")
        else:
            trial.note("side features", "passed", f"{modality}: {', '.join(port.side)} reach the logits")


def _packing(trial: Trial) -> None:
    """Packed samples are what they are alone; modules that prevent it run sample by sample."""
    if not trial.contract.packs:
        return
    segmented: tuple[str, ...] = ()
    while fact := attempt(partial(packing_fact, trial)):
        leak = leaking_class(trial)
        if leak is None or leak in segmented or len(segmented) == _MOST_SEGMENTED_CLASSES:
            _unpack(trial, fact if leak is None else f"{fact}, first in {leak}")
            return
        segmented = (*segmented, leak)
        trial.use(segmented=segmented)
    if segmented:
        fact = f"packed samples equal each alone, with {' and '.join(segmented)} run sample by sample"
        trial.note("packing", "fallback", fact)
    else:
        trial.note("packing", "passed", "packed samples equal each alone")


def _left_out(trial: Trial) -> None:
    """What some samples leave out is called on nothing for them, so that all ranks call the same."""
    calls = attempt(partial(skipped_modules_of, trial))
    found = () if isinstance(calls, Failure) else calls
    trial.use(skipped_modules=found)
    if found and isinstance(failed := attempt(partial(logit_error, trial)), Failure):
        found = tuple(replace(kind, problem=kind.problem or f"called on nothing, it fails: {failed}") for kind in found)
    short = attempt(partial(unread_by_short_samples, trial))
    found += () if isinstance(short, Failure) else tuple(kind for kind in short if not _is_below(kind, found))
    trial.use(skipped_modules=found)
    if not found:
        return
    names = ", ".join(kind.module for kind in found)
    problems = dict.fromkeys(kind.problem for kind in found if kind.problem)
    if problems:
        trial.note("left out", "fallback", f"some samples leave out {names}; {'; '.join(problems)}: one rank only")
    else:
        trial.note("left out", "passed", f"some samples leave out {names}; there they are called on nothing")


def _is_below(kind: SkippedModule, others: Sequence[SkippedModule]) -> bool:
    return any(f"{kind.module}.".startswith(f"{other.module}.") for other in others)


def _units(trial: Trial) -> None:
    """A module gathers its parameters when it is called; those that are read at other moments belong to one around."""
    found = attempt(partial(read_from_outside, trial))
    if found and not isinstance(found, Failure):
        trial.use(read_outside=found)
        trial.note("units", "passed", f"parameters are read while their module does not run: {', '.join(found)}")


def _own_loss(trial: Trial) -> None:
    """The model's own loss is that of its tokens, or what it adds (a balance of experts) is said to be left out."""
    fact = attempt(partial(own_loss_fact, trial))
    if fact is not None and not isinstance(fact, Failure):  # a model without a loss of its own adds nothing to it
        trial.note("own loss", "left out", f"{fact}; only the loss of the tokens is trained")


def _last_rows(trial: Trial) -> None:
    """Modules that need not compute the rows which no loss reads; gradients are then checked without those rows."""
    found = attempt(partial(row_local_modules, trial))
    if found and not isinstance(found, Failure):
        trial.use(row_local=found)
        trial.note("last rows", "passed", f"rows that no loss reads can be left out of {', '.join(found)}")


def _tails(trial: Trial) -> None:
    """What comes behind the last token that a loss reads need not be given; gradients are then checked without it."""
    if attempt(partial(needs_no_tails, trial)) is True:
        trial.use(without_tails=True)
        trial.note("tails", "passed", "what comes behind the last token that a loss reads is not given to the model")


def _gradients(trial: Trial) -> None:
    """Loss and every gradient equal those of plain transformers; parameters that never get one are listed."""
    fact = attempt(partial(gradient_fact, trial))
    skipped_modules = {"last rows": trial.contract.row_local, "tails": trial.contract.without_tails}
    if fact is not None and any(skipped_modules.values()):
        trial.use(row_local=(), without_tails=False)
        for check in (check for check, is_used in skipped_modules.items() if is_used):
            trial.note(check, "fallback", f"{fact} without the rows that no loss reads; all are computed")
        fact = attempt(partial(gradient_fact, trial))
    if fact is not None and trial.contract.packs:
        _unpack(trial, fact)
        fact = attempt(partial(gradient_fact, trial))
    if fact is not None:
        trial.note("gradients", "refused", fact)
        return
    trial.note("gradients", "passed", "loss and gradients are those of transformers")
    if without := without_gradient(trial):
        shown = ", ".join(without[:4]) + (", ..." if len(without) > 4 else "")
        reached = [name for name, scale in trial.scales.items() if scale]
        trial.use(without_gradient=without, beyond_text=outermost_unreached(reached, without))
        trial.note("unused parameters", "passed", f"{len(without)} of the twin never get a gradient: {shown}")


def _unpack(trial: Trial, fact: str) -> None:
    own = ", ".join(trial.runner.own_attention)
    trial.use(packs=False, segmented=())
    why = f"; {own} has an attention of its own, which cannot be replaced" if own else ""
    trial.note("packing", "fallback", f"one sample per pack: {fact}{why}")
