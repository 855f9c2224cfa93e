"""The two twins side by side: what plain transformers computes for some samples, and what we compute for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.pack import IGNORED, Pack
from omnitrain.data.sample import Sample
from omnitrain.models.components.contract import Contract, Outcome
from omnitrain.models.contract.samples import Probe, ordinary_words, probe_samples, reworded
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_config
from omnitrain.models.discovery import discover, failure_of_model
from omnitrain.models.foundation.runner import EncodedMedia, FoundationRunner
from omnitrain.ops.attention import PackedRow
from omnitrain.ops.attention.spec import Call

_T = TypeVar("_T")


class Failure(str):
    """In one line, how the model's own code failed."""


def attempt(measure: Callable[[], _T]) -> _T | Failure:
    """What ``measure`` returns, or how the model's own code failed in it; other failures are raised."""
    try:
        return measure()
    except Exception as error:  # a foreign forward
        return Failure(failure_of_model(error))


@dataclass(frozen=True)
class Case:
    """A probe, and what plain transformers made of it.

    Attributes:
        probe: the sample.
        logits: ``[T, vocabulary]``.
        losses: ``[n]``, of the tokens that are trained on.
    """

    probe: Probe
    logits: Tensor
    losses: Tensor


class Trial:
    """Both twins, and what is known so far.

    Attributes:
        plain: the twin as transformers runs it, in training mode.
        native: the modalities that it reads by itself.
        cases: the probes that it takes.
        scales: parameter -> largest absolute value of its gradient, once there are gradients.
        contract: what was found so far.
        ours: a twin with the same parameters, as we run it.
        runner: runs it by the contract.
    """

    def __init__(self, twin: PreTrainedModel) -> None:
        """Set the other one beside ``twin``, which :func:`build_tiny_model` made."""
        self.plain = twin.train()
        self.native = discover(self.plain)
        self.cases: list[Case] = []
        self.scales: dict[str, float] = {}
        self.contract = Contract()
        self._unused = self._twin_of(self.plain)  # a forward may leave something behind in a model
        self._attach()

    @classmethod
    def by(cls, model: PreTrainedModel, contract: Contract) -> Trial:
        """Of a small twin of ``model``, run by the contract that was found for it."""
        trial = cls(build_tiny_model(type(model), tiny_config(model.config)))
        trial.use(**vars(contract))
        return trial

    def use(self, **changes: Any) -> None:
        """Change the contract, and run by it from now on."""
        self.contract = replace(self.contract, **changes)
        self._attach()

    def note(self, check: str, outcome: Outcome, fact: str) -> None:
        """One more finding."""
        self.contract = self.contract.noting(check, outcome, fact)

    def _twin_of(self, model: PreTrainedModel) -> PreTrainedModel:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})

    def _attach(self) -> None:
        self.ours = self._twin_of(self._unused)
        self.runner = FoundationRunner(self.ours, self.contract, native=self.native)
        self.runner.skip_unread_rows()

    @property
    def has_experts(self) -> bool:
        """Whether there are routers: they count rows, so leaving out what no loss reads would show in their counts."""
        foundation: Any = self.plain
        kinds = (module for module in foundation.get_decoder().modules() if not isinstance(module, nn.Conv1d))
        return any(parameter.ndim == 3 for module in kinds for parameter in module.parameters(recurse=False))

    # Plain transformers -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_plain(self, probe: Probe) -> Case:
        """What plain transformers makes of a probe."""
        logits, losses = self._plain(probe)
        return Case(probe, logits, losses)

    def own_loss(self, probe: Probe, **asked: Any) -> float:
        """The model's own mean loss of a probe's tokens, with what it adds to that."""
        trained = torch.from_numpy(probe.sample.loss_mask)[None]
        labels = probe.arguments["input_ids"].where(trained, IGNORED)
        return float(self.plain(**probe.arguments, labels=labels, use_cache=False, **asked).loss)

    def start_gradients(self, cases: Sequence[Case]) -> None:
        """Gradients of these cases by plain transformers, negated, so that ours add up to the error in their place."""
        self.plain.zero_grad()
        for case in cases:
            self._plain(case.probe)[1].sum().backward()
        self.scales = {name: largest(parameter.grad) for name, parameter in self.plain.named_parameters()}
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()

    def _plain(self, probe: Probe) -> tuple[Tensor, Tensor]:
        logits = self.plain(**probe.arguments, use_cache=False).logits[0]
        rows = torch.from_numpy(probe.sample.loss_mask[1:].nonzero()[0])
        labels = probe.arguments["input_ids"][0, rows + 1]
        return logits, F.cross_entropy(logits[rows].float(), labels, reduction="none")

    # Ours -------------------------------------------------------------------------------------------------------------

    def media(self, pack: Pack) -> EncodedMedia:
        """Rows of the pack's media."""
        return EncodedMedia(self.runner.encode(pack))

    def logits(self, pack: Pack, media: EncodedMedia, row: PackedRow | None = None) -> Tensor:
        """All logits of a pack, ``[T, vocabulary]``; without a row as of one sample, unpacked."""
        output = self.runner.run_pack(pack, media, lambda hidden, head: head.forward(hidden), row)
        logits: Tensor = output.logits[0]
        return logits

    def losses(self, pack: Pack, media: EncodedMedia) -> dict[int, Tensor]:
        """Sample index -> ``[n]``, one per token that is trained on."""
        rows = self.runner.text_loss(pack, media)[0].rows
        owner = torch.bucketize(pack.text_rows, torch.tensor(list(accumulate(pack.info.lengths))), right=True)
        return {index: rows[owner == place] for place, index in enumerate(pack.info.indices)}

    @property
    def texts(self) -> list[Sample]:
        """Tiny samples of text alone."""
        return [probe.sample for probe in probe_samples(self.plain, self.native) if not probe.modalities]

    @property
    def samples(self) -> list[Sample]:
        """Of all cases."""
        return [case.probe.sample for case in self.cases]

    @property
    def telling_cases(self) -> list[Case]:
        """Few that show all there is: two texts, several media, and modalities that none of these has.

        Gradients take most of a check's time.
        """
        texts = [case for case in self.cases if not case.probe.modalities]
        several = [case for case in self.cases if len(case.probe.modalities) > 1]
        covered = {modality for case in several for modality in case.probe.modalities}
        single = [case for case in self.cases if len(case.probe.modalities) == 1]
        return [*texts[:2], *several, *(case for case in single if case.probe.modalities[0] not in covered)]

    def reworded(self, indices: Sequence[int]) -> list[Sample]:
        """The samples, those of these indices with other words."""
        words = ordinary_words(self.plain)
        return [
            reworded(case.probe, words) if case.probe.sample.index in indices else case.probe.sample
            for case in self.cases
        ]


def relative(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value expected."""
    if not expected.numel():
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def largest(tensor: Tensor | None) -> float:
    """The largest absolute value; 0 for nothing."""
    if tensor is None or not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()
    return float(torch.maximum(high, -low))


def head_of(model: PreTrainedModel) -> nn.Module:
    """The language-model head."""
    head: Any = model.get_output_embeddings()
    return head


class Recorded:
    """All of a row, as a :class:`~omnitrain.ops.attention.RowPart`, and what crossed from token to token in it.

    Attributes:
        heads: numbers of query heads of the attentions.
        attended: calls and outputs of all attentions, in order.
        gathered: all that was gathered, in order.
    """

    num_ranks = 1

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.num_rows, self.attention = num_tokens, num_tokens, self
        self.rows = self.host_rows = torch.arange(num_tokens)
        self.heads: set[int] = set()
        self.attended: list[tuple[Call, Tensor]] = []
        self.gathered: list[Tensor] = []

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """Compute, and keep."""
        self.heads.add(call.query.size(1))
        self.attended.append((call, compute(call)))
        return self.attended[-1][1]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute, and keep."""
        output = compute(tensors, slice(0, tensors[0].size(1)))
        self.gathered += [*tensors, output]
        return output

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Keep."""
        self.gathered.append(tensor)
        return tensor


class Replayed:
    """Some tokens of a recorded row, as a :class:`~omnitrain.ops.attention.RowPart`.

    Attributes:
        errors: of what the part handed over, relative.
    """

    num_ranks = 1

    def __init__(self, whole: Recorded, rows: Tensor) -> None:
        self.rows = self.host_rows = rows
        self.num_tokens, self.num_rows, self.attention = whole.num_tokens, len(rows), self
        self._attended, self._gathered = iter(whole.attended), iter(whole.gathered)
        self.errors = [0.0]

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """What was kept, of these tokens."""
        expected, output = next(self._attended)
        for name in ("query", "key", "value"):
            self.errors.append(relative(getattr(call, name), getattr(expected, name)[:, :, self.rows]))
        return output[:, self.rows]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """What was kept, of these tokens."""
        for tensor in tensors:
            self.gather(tensor, 0)
        return next(self._gathered)[self.rows]

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """What was kept, of all tokens."""
        whole = next(self._gathered)
        self.errors.append(relative(tensor, whole.index_select(dim, self.rows)))
        return whole


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN, where one is."""
    return float(torch.tensor(list(errors)).max())
