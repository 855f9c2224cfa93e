"""Run the same tiny model by plain transformers and by omnitrain, and compare."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import IGNORED, Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.components.contract import Contract, Outcome
from omnitrain.models.contract.samples import Probe, ordinary_words, probe_samples, reworded
from omnitrain.models.contract.tiny_model import build_tiny_model
from omnitrain.models.discovery import discover, failure_of_model, rest_codecs
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.hf.hub_kernels import torch_kernels
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.ops.attention.spec import AttentionCall

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Failure(str):
    """How the model's own code failed, in one line."""


def attempt(measure: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | Failure:
    """Return the result of ``measure``, or how the model's own code failed; other exceptions are raised."""
    try:
        return measure(*args, **kwargs)
    except Exception as error:  # the model's code may raise anything
        return Failure(failure_of_model(error))


@dataclass(frozen=True)
class PlainRun:
    """A probe, and the output of plain transformers for it."""

    probe: Probe  # the sample
    logits: Tensor  # ``[T, vocabulary]``
    losses: Tensor  # ``[n]``, one per supervised token


class Trial:
    """Two copies of a tiny model with shared parameters, ``plain`` and ``ours``, and the findings so far."""

    def __init__(self, tiny_model: PreTrainedModel, contract: Contract) -> None:
        self.plain = tiny_model.train()  # transformers runs it
        self.native = discover(self.plain)
        rest_codecs(self.plain, self.native)
        self.cases: list[PlainRun] = []  # the probes that it accepts
        self._unused = self._copy_of(self.plain)  # never run: a forward may leave state in a model
        self.contract = contract
        self._attach()

    @classmethod
    @contextmanager
    def of(
        cls, model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract | None = None
    ) -> Iterator[Trial]:
        """Build a model of ``config``, which must be small; in this context, torch code runs instead of its kernels."""
        tiny_model = build_tiny_model(model_class, config)
        with torch_kernels(tiny_model):
            yield cls(tiny_model, contract or Contract())

    def use(self, **changes: Any) -> None:
        """Change fields of the contract, and run by it from now on."""
        self.contract = replace(self.contract, **changes)
        self._attach()

    def note(self, check: str, outcome: Outcome, fact: str, **changes: Any) -> None:
        """Add a finding to the contract, and change fields of the contract as :meth:`use` does."""
        self.contract = self.contract.noting(check, outcome, fact)
        if changes:
            self.use(**changes)

    def _copy_of(self, model: PreTrainedModel) -> PreTrainedModel:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})

    def _attach(self) -> None:
        self.ours = self._copy_of(self._unused)
        self.runner = FoundationRunner(self.ours, self.contract, native=self.native)
        self.runner.skip_unread_rows()

    @property
    def has_experts(self) -> bool:
        """Whether the model has routers: they count tokens, so skipping unread tokens would change their counts."""
        foundation: Any = self.plain
        kinds = (module for module in foundation.get_decoder().modules() if not isinstance(module, nn.Conv1d))
        return any(parameter.ndim == 3 for module in kinds for parameter in module.parameters(recurse=False))

    @cached_property
    def probes(self) -> list[Probe]:
        """Samples of all modalities."""
        return probe_samples(self.plain, self.native)

    @property
    def packs(self) -> list[Pack]:
        """All probes: in one pack, or each in a pack of its own if the contract does not allow packing."""
        return self.packed(probe.sample for probe in self.probes)

    def packed(self, samples: Iterable[Sample]) -> list[Pack]:
        """Return the packs that the contract allows of these samples: one, or one per sample."""
        return [Pack.from_samples(each) for each in ([list(samples)] if self.contract.packs else zip(samples))]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all cases."""
        return [case.probe.sample for case in self.cases]

    @property
    def telling_cases(self) -> list[PlainRun]:
        """Two texts, mixtures, and modalities that no mixture has: enough for gradients, which take long."""
        texts = [case for case in self.cases if not case.probe.modalities]
        several = [case for case in self.cases if len(case.probe.modalities) > 1]
        covered = {modality for case in several for modality in case.probe.modalities}
        single = [case for case in self.cases if len(case.probe.modalities) == 1]
        return [*texts[:2], *several, *(case for case in single if case.probe.modalities[0] not in covered)]

    def reworded(self, indices: Sequence[int]) -> list[Sample]:
        """Return all samples; the samples with these indices have other words."""
        words = ordinary_words(self.plain)
        return [
            reworded(case.probe, words) if case.probe.sample.index in indices else case.probe.sample
            for case in self.cases
        ]

    @torch.no_grad()
    def run_plain(self, probe: Probe) -> PlainRun:
        """Run a probe by plain transformers."""
        return PlainRun(probe, *self._plain(probe))

    def own_loss(self, probe: Probe, **arguments: Any) -> float:
        """Return the model's own loss of a probe: the mean over tokens, and any term that the model adds."""
        trained = torch.from_numpy(probe.sample.loss_mask)[None]
        labels = probe.arguments["input_ids"].where(trained, IGNORED)
        return float(self.plain(**probe.arguments, labels=labels, use_cache=False, **arguments).loss)

    @cached_property
    def expected(self) -> Step:
        """Plain transformers' loss and gradients of the telling cases."""
        self.plain.zero_grad(set_to_none=True)
        for case in self.telling_cases:
            self._plain(case.probe)[1].sum().backward()
        return Step(sum(float(case.losses.sum()) for case in self.telling_cases), gradients_of(self.plain))

    def _plain(self, probe: Probe) -> tuple[Tensor, Tensor]:
        logits = self.plain(**probe.arguments, use_cache=False).logits[0]
        rows = torch.from_numpy(probe.sample.loss_mask[1:].nonzero()[0])
        labels = probe.arguments["input_ids"][0, rows + 1]
        return logits, F.cross_entropy(logits[rows].float(), labels, reduction="none")

    def encoded(self, pack: Pack) -> EncodedPack:
        """Return the pack with the features of its media."""
        return EncodedPack(pack, self.runner.encode(pack))

    def logits(self, encoded: EncodedPack, packed: PackedSequence | None = None) -> Tensor:
        """Return all logits of a pack, ``[T, vocabulary]``; without ``packed`` the pack runs as one sample."""
        output = self.runner.run_pack(encoded, lambda hidden, head: head.forward(hidden), packed)
        logits: Tensor = output.logits[0]
        return logits

    def losses(self, encoded: EncodedPack) -> dict[int, Tensor]:
        """Return sample index -> losses ``[n]``, one per supervised token."""
        pack, rows = encoded.pack, self.runner.text_loss(encoded)[0].rows
        owner = torch.bucketize(pack.text_rows, torch.tensor(list(accumulate(pack.info.lengths))), right=True)
        return {index: rows[owner == position] for position, index in enumerate(pack.info.indices)}

    def step(self, packs: Iterable[Pack]) -> Step:
        """Compute our loss and gradients of some packs."""
        self.ours.zero_grad(set_to_none=True)
        total = 0.0
        for pack in packs:
            loss = self.runner.text_loss(self.encoded(pack)).text.sum
            loss.backward()
            total += loss.item()
        return Step(total, gradients_of(self.ours))


class Step(NamedTuple):
    """The loss of some packs, and name -> gradient."""

    loss: float
    gradients: dict[str, Tensor]


class Difference(NamedTuple):
    """The tensor that differs most, and its error relative to its largest expected value."""

    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.name} differs by {self.error:.1e} of its largest value"


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameter -> its gradient, for parameters that have one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float = 0.0) -> dict[str, float]:
    """Return name -> its largest difference over its largest value (at least ``scale`` times that of all names).

    A name that only one side has is compared with zeros.
    """
    least = scale * max(map(largest, expected.values()), default=0.0)
    return {
        name: relative(found.get(name), expected.get(name), max(least, 1e-30))
        for name in dict.fromkeys((*expected, *found))
    }


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float = 0.0) -> Difference:
    """Return the largest of :func:`errors_of`, and its name; NaN is larger than any number."""
    errors = errors_of(found, expected, scale)
    name = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default="")
    return Difference(name, errors.get(name, 0.0))


def relative(found: Tensor | None, expected: Tensor | None, least: float = 1e-30) -> float:
    """Return the largest difference, relative to the largest expected value, or to ``least``; None counts as zeros."""
    difference = found if expected is None else expected if found is None else found - expected
    return largest(difference) / max(largest(expected), least)


def largest(tensor: Tensor | None) -> float:
    """Return the largest absolute value; 0 for None and for an empty tensor."""
    if tensor is None or not tensor.numel():
        return 0.0
    low, high = tensor.detach().aminmax()
    return float(torch.maximum(high, -low))


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if any error is NaN."""
    return float(torch.tensor(list(errors)).max())


class WholeSequence:
    """A whole pack as a :class:`~omnitrain.ops.attention.SequenceSlice`, which records the layers that mix tokens."""

    num_ranks = 1

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.num_local_tokens, self.attention = num_tokens, num_tokens, self
        self.positions = self.host_positions = torch.arange(num_tokens)
        self.heads: set[int] = set()  # numbers of query heads
        self.attended: list[tuple[AttentionCall, Tensor]] = []  # calls and outputs of all attentions, in order
        self.gathered: list[Tensor] = []  # inputs and outputs of recurrent layers, and gathered tensors, in order

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        """Compute attention, and record the call and its output."""
        self.heads.add(call.query.size(1))
        self.attended.append((call, compute(call)))
        return self.attended[-1][1]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute a recurrent layer over all heads, and record its inputs and output."""
        output = compute(tensors, slice(0, tensors[0].size(1)))
        self.gathered += [*tensors, output]
        return output

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Record ``tensor`` and return it."""
        self.gathered.append(tensor)
        return tensor


class ReplayedSlice:
    """A :class:`~omnitrain.ops.attention.SequenceSlice` of a recorded pack; its layers return recorded outputs."""

    num_ranks = 1

    def __init__(self, whole: WholeSequence, positions: Tensor) -> None:
        self.positions = self.host_positions = positions
        self.num_tokens, self.num_local_tokens, self.attention = whole.num_tokens, len(positions), self
        self._attended, self._gathered = iter(whole.attended), iter(whole.gathered)
        self.errors = [0.0]  # of the slice's inputs to these layers

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        """Compare the inputs with the recorded call, and return the recorded output of the slice's tokens."""
        expected, output = next(self._attended)
        for name in ("query", "key", "value"):
            self.errors.append(relative(getattr(call, name), getattr(expected, name)[:, :, self.positions]))
        return output[:, self.positions]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compare the inputs with the recorded ones, and return the recorded output of the slice's tokens."""
        for tensor in tensors:
            self.gather(tensor, 0)
        return next(self._gathered)[self.positions]

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Compare ``tensor`` with the recorded one, and return the recorded tensor of all tokens."""
        whole = next(self._gathered)
        self.errors.append(relative(tensor, whole.index_select(dim, self.positions)))
        return whole
