"""Check that ranks may share a sequence: a slice must give the same logits as the whole.

The tiny model runs a whole sequence, and we record the inputs and outputs of all attentions and recurrent layers. Then
it runs slices of that sequence, in which these layers return the recorded outputs. The inputs of attention in a slice,
and its logits, must equal those of the whole sequence. A model that counts its tokens, or looks at its neighbours,
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import contract_path, keep, kept
from omnitrain.models.contract.checks_packing import TOLERANCE
from omnitrain.models.contract.harness import Failure, Recorded, Replayed, attempt, relative, worst
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_configs
from omnitrain.models.discovery import MediaFeatures, discover
from omnitrain.models.foundation.runner import EncodedMedia, FoundationRunner
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
from omnitrain.models.hf.hub_kernels import torch_kernels
from omnitrain.plan.sequence import split_sequence

_SPLITS = ({"sp": 3}, {"sp": 1, "cp": 2})


@dataclass(frozen=True)
class SequenceContract:
    """The result of the check.

    Attributes:
        problem: why ranks may not share the sequence; empty: they may.
        heads: numbers of query heads of the model's attentions.
    """

    problem: str = ""
    heads: tuple[int, ...] = ()


def sequence_contract_of(model: PreTrainedModel, contract: Contract) -> SequenceContract:
    """Return the sequence contract of a foundation, from the cache or by checking a tiny model.

    ``contract``: the foundation's contract, by which the tiny model runs.
    """
    path = contract_path(type(model), model.config).with_suffix(".sequence.json")
    return kept_or_checked(path, partial(check_sequence, type(model), model.config, contract))


def kept_or_checked(path: Path, check: Callable[[], SequenceContract]) -> SequenceContract:
    """Return the contract cached at ``path``, else the result of ``check``, which is then cached."""
    contract = kept(path, lambda values: SequenceContract(values["problem"], tuple(values["heads"])))
    if contract is None:
        contract = check()
        keep(path, contract)
    return contract


def check_sequence(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract
) -> SequenceContract:
    """Check a tiny model of ``config``; if it has a problem, check one with all layers of towers and full MLPs."""
    if contract.attention == "native":
        return SequenceContract("it keeps its own attention, which sees only the tokens of one rank")
    small, _, whole = tiny_configs(config)
    return first_without_problem(partial(_measured, model_class, tiny, contract) for tiny in (small, whole))


def first_without_problem(measures: Iterable[Callable[[], SequenceContract]]) -> SequenceContract:
    """Run ``measures`` until one finds no problem, and return the last result. They run without gradients."""
    contract = SequenceContract()
    for measure in measures:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            measured = attempt(measure)
        contract = SequenceContract(str(measured)) if isinstance(measured, Failure) else measured
        if not contract.problem:
            break
    return contract


def _measured(model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract) -> SequenceContract:
    model = build_tiny_model(model_class, config)
    with torch_kernels(model):
        native = discover(model)
        samples = [probe.sample for probe in probe_samples(model, native)]
        runner = FoundationRunner(model.train(), contract, native=native)
        heads: set[int] = set()
        for together in [samples] if contract.packs else [[sample] for sample in samples]:
            whole = _Whole.of(runner, Pack.from_samples(together))
            heads |= whole.heads
            for degrees in _SPLITS:
                for positions in split_sequence(whole.num_tokens, **degrees).positions:
                    error = whole.error_of(runner, torch.from_numpy(positions))
                    if not error <= TOLERANCE:
                        fact = f"logits of a slice differ by {error:.1e} of the largest from those of the whole"
                        return SequenceContract(fact, tuple(sorted(heads)))
    return SequenceContract("", tuple(sorted(heads)))


class _Whole(Recorded):
    """The record of a pack that ran as a whole."""

    def __init__(self, pack: Pack, media: EncodedMedia) -> None:
        super().__init__(pack.num_tokens)
        self.pack, self.media = pack, media
        self.logits = torch.empty(0)

    @classmethod
    def of(cls, runner: FoundationRunner, pack: Pack) -> _Whole:
        """Run ``pack`` and record it."""
        whole = cls(pack, EncodedMedia(runner.encode(pack)))
        whole.logits = _logits(runner, pack, whole.media, whole)
        return whole

    def error_of(self, runner: FoundationRunner, positions: Tensor) -> float:
        """Run these tokens as a slice; return the largest relative error of logits and attention inputs."""
        replayed = Replayed(self, positions)
        logits = _logits(runner, self.pack, self.media, replayed)
        return worst([relative(logits, self.logits[positions]), *replayed.errors])


def _logits(runner: FoundationRunner, pack: Pack, media: EncodedMedia, sequence_slice: Any) -> Tensor:
    features = _slice(runner, pack, media, sequence_slice)
    sliced = EncodedMedia({name: rows for name, rows in features.items() if len(rows.main)})
    packed = runner.packed_sequence_of(pack, sequence_slice)
    output = runner.run_pack(cut_pack(pack, sequence_slice), sliced, lambda hidden, head: head.forward(hidden), packed)
    logits: Tensor = output.logits[0]
    return logits


def _slice(runner: FoundationRunner, pack: Pack, media: EncodedMedia, sequence_slice: Any) -> dict[str, MediaFeatures]:
    """The features whose placeholders lie in the slice; features are in the order of their placeholders."""
    ids = pack.input_ids[0].cpu()
    placeholders = {name: (ids == runner.native.interfaces[name].token_id).nonzero()[:, 0] for name in media.native}
    return {
        name: rows.at(local_positions(sequence_slice, placeholders[name])[0]) for name, rows in media.native.items()
    }
