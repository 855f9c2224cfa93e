"""The contract check: what an unmodified HF model honours, and does not, measured on its twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.contract.cache import contract_path, read_contract, write_contract
from omnitrain.models.contract.findings import Contract
from omnitrain.models.contract.leaks import first_leak
from omnitrain.models.contract.probes import Probe, probe_samples
from omnitrain.models.contract.twin import build_twin, twin_config
from omnitrain.models.foundation import EncodedMedia, FoundationRunner, Head
from omnitrain.models.native import discover

# Relative to the largest value compared. Rounding stays a hundred times below, a wrong mask or position far above.
_TOLERANCE = 1e-3
_MOST_SEGMENTED_CLASSES = 3

_T = TypeVar("_T")


def contract_of(model: PreTrainedModel) -> Contract:
    """The contract of a foundation, from the cache or by checking its twin.

    Raises:
        UserError: it cannot be trained here; names every check that refused it and what was measured.
    """
    path = contract_path(type(model), model.config)
    contract = read_contract(path) or check_contract(type(model), model.config)
    if contract.refusals:
        facts = dict.fromkeys(f"{finding.check}: {finding.fact}" for finding in contract.refusals)
        raise UserError(
            f"model.foundation: {type(model).__name__} cannot be trained with this config: {'; '.join(facts)}"
        )
    write_contract(path, contract)
    return contract


def check_contract(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Contract:
    """Check ``model_class`` on a small twin of ``config``: same widths, few layers, peaked weights.

    Returns:
        The contract with a finding per check. A model that fails even unpacked has a finding that refuses it.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return _checked(_Checkup(model_class, config))


def _checked(checkup: _Checkup) -> Contract:
    for check in (checkup.modalities, checkup.attention, checkup.head, checkup.items, checkup.side, checkup.packing):
        check()
        if checkup.contract.refusals:
            return checkup.contract
    checkup.gradients()
    return checkup.contract


class _Checkup:
    """The plain twin, the same twin as we run it, and what is known so far."""

    def __init__(self, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
        self.plain = build_twin(model_class, twin_config(config)).train()
        self.ours = copy.deepcopy(self.plain)
        self.native = discover(self.plain)
        self.probes: list[Probe] = []
        self.logits: list[Tensor] = []
        self.contract = Contract()
        self.runner = FoundationRunner(self.ours)

    def _use(self, **changes: object) -> None:
        self.contract = replace(self.contract, **changes)  # type: ignore[arg-type]
        self.runner = FoundationRunner(self.ours, self.contract)

    # Checks -----------------------------------------------------------------------------------------------------------

    def modalities(self) -> None:
        """Each modality's rows can be made apart from the forward, as many as there are placeholders."""
        for modality, port in self.native.ports.items():
            fact = f"rows of {port.component} enter through {port.method}"
            self._note(f"modality {modality}", "passed", fact)
        for probe in probe_samples(self.plain, self.native):
            logits = self._attempt(partial(self._plain_logits, probe))
            if not isinstance(logits, str):
                self.probes.append(probe)
                self.logits.append(logits)
            elif len(probe.modalities) > 1:
                mixture = " and ".join(sorted(set(probe.modalities)))
                self._note("mixtures", "passed", f"transformers refuses {mixture} in one sample: {logits}")
            else:
                self._note("modalities", "refused", f"{' '.join(probe.modalities) or 'text'}: {logits}")
        for modality, reason in self.native.refused.items():
            self._note(f"modality {modality}", "fallback", f"cannot be trained, samples with it are refused: {reason}")

    def attention(self) -> None:
        """Through our attention, a sample alone has the logits of plain transformers."""
        error = self._attempt(self._largest_logit_error)
        if not isinstance(error, str) and error <= _TOLERANCE:
            exactly = "bit for bit" if error == 0 else f"within {error:.0e} of the largest"
            self._note("attention", "passed", f"logits of a sample alone are those of transformers, {exactly}")
            return
        fact = error if isinstance(error, str) else f"logits differ by {error:.1e} of the largest"
        self.ours = copy.deepcopy(self.plain)
        self._use(attention="native", packs=False)
        self._note("attention", "fallback", f"{fact}; the model keeps its own attention")

    def head(self) -> None:
        """What the model returns as logits is what its head returned."""
        fact = self._attempt(self._head_fact)
        if fact is None:
            self._note("head", "passed", "the loss is computed inside the head")
            return
        self._use(head="plain")
        self._note("head", "fallback", f"{fact}; the loss is computed on the logits of the supervised rows")

    def items(self) -> None:
        """A tower's rows of an item do not depend on the items beside it."""
        mixed = tuple(modality for modality, port in self.native.ports.items() if not port.items_are_independent)
        if mixed:
            self._use(single_items=mixed)
            fact = f"rows of {', '.join(mixed)} change with their neighbours; items are encoded one at a time"
            self._note("items", "fallback", fact)
        elif self.native.ports:
            self._note("items", "passed", "an item's rows are the same alone and beside others")

    def side(self) -> None:
        """Side features (deepstack levels) are read by the model."""
        for modality, port in self.native.ports.items():
            if not port.side:
                continue
            probe = next(probe for probe in self.probes if modality in probe.modalities)
            unread = [name for name in port.side if self._zeroing_changes_nothing(probe, modality, name)]
            if unread:
                self._note("side features", "refused", f"{modality}: the model does not read {', '.join(unread)}")
            else:
                self._note("side features", "passed", f"{modality}: {', '.join(port.side)} reach the logits")

    def packing(self) -> None:
        """Packed samples are what they are alone, and gradients with them."""
        if not self.contract.packs:
            fact = "only omnitrain's attention keeps packed samples apart"
            self._note("packing", "fallback", f"one sample per row: {fact}")
            return
        segmented: tuple[str, ...] = ()
        while fact := self._attempt(self._packing_fact):
            leak = self._leaking_class()
            if leak is None or leak in segmented or len(segmented) == _MOST_SEGMENTED_CLASSES:
                where = f", first in {leak}" if leak else ""
                self._use(packs=False, segmented=())
                self._note("packing", "fallback", f"one sample per row: {fact}{where}")
                return
            segmented = (*segmented, leak)
            self._use(segmented=segmented)
        how = f"; {', '.join(segmented)} runs sample by sample" if segmented else ""
        self._note("packing", "fallback" if segmented else "passed", f"packed samples equal each alone{how}")

    def gradients(self) -> None:
        """Loss and every gradient equal those of plain transformers; parameters that never get one are listed."""
        fact = self._attempt(self._gradient_fact)
        if fact is not None and self.contract.packs:
            self._use(packs=False, segmented=())
            self._note("packing", "fallback", f"one sample per row: {fact}")
            fact = self._attempt(self._gradient_fact)
        if fact is not None:
            self._note("gradients", "refused", fact)
            return
        without = tuple(name for name, parameter in self.plain.named_parameters() if not _has_gradient(parameter))
        self.contract = replace(self.contract, without_gradient=without)
        self._note("gradients", "passed", "loss and gradients are those of transformers")
        if without:
            shown = ", ".join(without[:4]) + (", ..." if len(without) > 4 else "")
            self._note("unused parameters", "passed", f"{len(without)} never get a gradient: {shown}")

    # Measurements; a fact is what went wrong, None that nothing did ---------------------------------------------------

    @torch.no_grad()
    def _plain_logits(self, probe: Probe) -> Tensor:
        return self.plain(**probe.arguments, use_cache=False).logits[0]

    def _largest_logit_error(self) -> float:
        return max(self._logit_error(probe, logits) for probe, logits in zip(self.probes, self.logits, strict=True))

    @torch.no_grad()
    def _logit_error(self, probe: Probe, expected: Tensor) -> float:
        pack = Pack.from_samples([probe.sample])
        return _relative(self._logits(pack, self._media(pack)), expected)

    def _logits(self, pack: Pack, media: EncodedMedia) -> Tensor:
        """All logits of a pack of one sample, ``[T, vocabulary]``."""
        output = self._run(pack, media, lambda hidden, lm_head: type(lm_head).forward(lm_head, hidden))
        logits: Tensor = output.logits[0]
        return logits

    def _run(self, pack: Pack, media: EncodedMedia, head: Head) -> Any:
        arguments = {"position_ids": pack.position_ids, "use_cache": False, **pack.token_inputs}
        return self.runner.run(pack.input_ids, head=head, media=media, arguments=arguments)

    def _media(self, pack: Pack) -> EncodedMedia:
        return EncodedMedia(self.runner.encode(pack))

    @torch.no_grad()
    def _head_fact(self) -> str | None:
        inside: list[Tensor] = []

        def head(hidden: Tensor, lm_head: PreTrainedModel) -> Tensor:
            inside.append(type(lm_head).forward(lm_head, hidden))
            return inside[-1]

        lm_head = self.ours.get_output_embeddings()
        if not isinstance(lm_head, torch.nn.Linear):
            return f"its head is a {type(lm_head).__name__}, not a linear layer"
        pack = Pack.from_samples([self.probes[0].sample])
        output = self._run(pack, EncodedMedia(), head)
        if len(inside) != 1:
            return f"its head is called {len(inside)} times"
        if output.logits is not inside[0]:
            return "logits are transformed after the head"
        return None

    @torch.no_grad()
    def _zeroing_changes_nothing(self, probe: Probe, modality: str, name: str) -> bool:
        pack = Pack.from_samples([probe.sample])
        media = self._media(pack)
        rows = media.native[modality]
        zeroed = replace(rows, side={**rows.side, name: torch.zeros_like(rows.side[name])})
        without = EncodedMedia({**media.native, modality: zeroed})
        return torch.equal(self._logits(pack, media), self._logits(pack, without))

    @torch.no_grad()
    def _packing_fact(self) -> str | None:
        samples = [probe.sample for probe in self.probes]
        together = self._rows_by_sample(samples)
        for sample in samples:
            error = _relative(together[sample.index], self._rows_by_sample([sample])[sample.index])
            if not error <= _TOLERANCE:
                return f"{sample.id} differs from itself alone by {error:.1e}"
        for sample, changed in zip(samples, self._changed(samples), strict=True):
            others = self._rows_by_sample([changed if other is sample else other for other in samples])
            for index, rows in others.items():
                if index != sample.index and not torch.equal(rows, together[index]):
                    return f"changing {sample.id} changes sample {index} of the same row"
        return None

    def _rows_by_sample(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        pack = Pack.from_samples(samples)
        rows = self.runner.text_loss(pack, self._media(pack))[0].rows
        borders = pack.cu_seqlens.tolist()
        owner = torch.bucketize(pack.text_rows, torch.tensor(borders[1:]), right=True)
        return {index: rows[owner == place] for place, index in enumerate(pack.info.indices)}

    def _changed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Each sample with other words in place of those it is trained on: same length and media."""
        words = self.probes[0].sample.input_ids
        changed = []
        for sample in samples:
            ids = sample.input_ids.copy()
            ids[sample.loss_mask] = np.resize(words, int(sample.loss_mask.sum()))
            changed.append(replace(sample, input_ids=ids))
        return changed

    def _leaking_class(self) -> str | None:
        """Class name of the first module that lets one sample into the next, or refuses to run both in one row."""
        first, second = sorted((probe.sample for probe in self.probes[:2]), key=len)
        changed = self._changed([first])[0]
        packs = [Pack.from_samples([one, second]) for one in (first, changed)]
        name = first_leak(
            self.ours, lambda variant: self.runner.text_loss(packs[variant]), len(first), len(first) + len(second)
        )
        return None if name is None else type(self.ours.get_submodule(name)).__name__

    def _gradient_fact(self) -> str | None:
        expected = self._plain_loss()
        samples = [probe.sample for probe in self.probes]
        packs = [samples] if self.contract.packs else [[sample] for sample in samples]
        self.ours.zero_grad()
        total = 0.0
        for pack in map(Pack.from_samples, packs):
            term = self.runner.text_loss(pack, self._media(pack))[0]
            term.sum.backward()
            total += term.sum.item()
        if abs(total - expected) > _TOLERANCE * abs(expected):
            return f"the loss is {total:.4f}, that of transformers {expected:.4f}"
        return _gradient_difference(self.ours, self.plain)

    def _plain_loss(self) -> float:
        """Sum of the losses of all probes; leaves gradients on the plain twin."""
        self.plain.zero_grad()
        total = 0.0
        for probe in self.probes:
            logits = self.plain(**probe.arguments, use_cache=False).logits[0]
            rows = torch.from_numpy(probe.sample.loss_mask[1:].nonzero()[0])
            loss = F.cross_entropy(logits[rows].float(), probe.arguments["input_ids"][0, rows + 1], reduction="sum")
            loss.backward()
            total += loss.item()
        return total

    # Small things -----------------------------------------------------------------------------------------------------

    def _note(self, check: str, outcome: str, fact: str) -> None:
        self.contract = self.contract.noting(check, outcome, fact)  # type: ignore[arg-type]

    def _attempt(self, measure: Callable[[], _T]) -> _T | str:
        """What ``measure`` returns; a failure of the model's own code is a fact about it, in one line."""
        try:
            return measure()
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _has_gradient(parameter: Tensor) -> bool:
    return not parameter.requires_grad or (parameter.grad is not None and bool(parameter.grad.any()))


def _relative(got: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _gradient_difference(ours: torch.nn.Module, plain: torch.nn.Module) -> str | None:
    expected: Mapping[str, Tensor | None] = {name: parameter.grad for name, parameter in plain.named_parameters()}
    floor = 1e-3 * max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    worst, owner = 0.0, ""
    for name, parameter in ours.named_parameters():
        one, other = (torch.zeros_like(parameter) if g is None else g for g in (parameter.grad, expected[name]))
        error = float((one - other).abs().max() / other.abs().max().clamp(min=floor))
        if not error <= worst:
            worst, owner = error, name
    return f"the gradient of {owner} is off by {worst:.1e}" if not worst <= 10 * _TOLERANCE else None
