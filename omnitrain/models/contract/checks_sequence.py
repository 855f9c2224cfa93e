"""Whether the tokens of a row may lie on several ranks: a part of a sequence gives what the whole gives.

The twin runs over a whole row, and what all attentions and layers with a state took and gave is kept. Then it runs over
parts of that row, whose attentions give their tokens of what was kept. What a part hands to attention, and its logits,
must be those of the whole row: a model that counts its tokens, or looks at its neighbours, has others.
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

from omnitrain.data.pack import Pack
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
    """What the check found.

    Attributes:
        problem: why the tokens of a row may not lie on several ranks; empty: they may.
        heads: numbers of query heads of the model's attentions.
    """

    problem: str = ""
    heads: tuple[int, ...] = ()


def sequence_contract_of(model: PreTrainedModel, contract: Contract) -> SequenceContract:
    """From the cache, or by checking a twin of ``model``, a foundation that is run by ``contract``."""
    path = contract_path(type(model), model.config).with_suffix(".sequence.json")
    return kept_or_checked(path, partial(check_sequence, type(model), model.config, contract))


def kept_or_checked(path: Path, check: Callable[[], SequenceContract]) -> SequenceContract:
    """What is kept at ``path``, else what ``check`` finds, which is then kept there."""
    found = kept(path, lambda values: SequenceContract(values["problem"], tuple(values["heads"])))
    if found is None:
        found = check()
        keep(path, found)
    return found


def check_sequence(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract
) -> SequenceContract:
    """Check a small twin of ``config``; where that has a problem, one with whole towers and MLPs."""
    if contract.attention == "native":
        return SequenceContract("it keeps its own attention, which sees the tokens of one rank alone")
    small, _, whole = tiny_configs(config)
    return first_without_problem(partial(_measured, model_class, twin, contract) for twin in (small, whole))


def first_without_problem(measures: Iterable[Callable[[], SequenceContract]]) -> SequenceContract:
    """What the first of ``measures`` finds that finds no problem, else what the last one finds; without gradients."""
    found = SequenceContract()
    for measure in measures:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            measured = attempt(measure)
        found = SequenceContract(str(measured)) if isinstance(measured, Failure) else measured
        if not found.problem:
            break
    return found


def _measured(model_class: type[PreTrainedModel], twin: PreTrainedConfig, contract: Contract) -> SequenceContract:
    model = build_tiny_model(model_class, twin)
    with torch_kernels(model):
        native = discover(model)
        samples = [probe.sample for probe in probe_samples(model, native)]
        runner = FoundationRunner(model.train(), contract, native=native)
        heads: set[int] = set()
        for together in [samples] if contract.packs else [[sample] for sample in samples]:
            whole = _Whole.of(runner, Pack.from_samples(together))
            heads |= whole.heads
            for degrees in _SPLITS:
                for rows in split_sequence(whole.num_tokens, **degrees).rows:
                    error = whole.error_of(runner, torch.from_numpy(rows))
                    if not error <= TOLERANCE:
                        fact = f"logits of a part of a sequence differ by {error:.1e} of the largest from the whole's"
                        return SequenceContract(fact, tuple(sorted(heads)))
    return SequenceContract("", tuple(sorted(heads)))


class _Whole(Recorded):
    """A pack that was run as a whole."""

    def __init__(self, pack: Pack, media: EncodedMedia) -> None:
        super().__init__(pack.num_tokens)
        self.pack, self.media = pack, media
        self.logits = torch.empty(0)

    @classmethod
    def of(cls, runner: FoundationRunner, pack: Pack) -> _Whole:
        """Run ``pack``."""
        whole = cls(pack, EncodedMedia(runner.encode(pack)))
        whole.logits = _logits(runner, pack, whole.media, whole)
        return whole

    def error_of(self, runner: FoundationRunner, rows: Tensor) -> float:
        """The largest difference of logits of these tokens, and of what they hand to attention, relative."""
        part = Replayed(self, rows)
        logits = _logits(runner, self.pack, self.media, part)
        return worst([relative(logits, self.logits[rows]), *part.errors])


def _logits(runner: FoundationRunner, pack: Pack, media: EncodedMedia, part: Any) -> Tensor:
    own = EncodedMedia({name: rows for name, rows in _cut(runner, pack, media, part).items() if len(rows.main)})
    row = runner.row_of(pack, part)
    output = runner.run_pack(cut_pack(pack, part), own, lambda hidden, head: head.forward(hidden), row)
    logits: Tensor = output.logits[0]
    return logits


def _cut(runner: FoundationRunner, pack: Pack, media: EncodedMedia, part: Any) -> dict[str, MediaFeatures]:
    """Of rows in the order of their placeholders, those for the tokens of a part."""
    ids = pack.input_ids[0].cpu()
    placeholders = {name: (ids == runner.native.ports[name].token_id).nonzero()[:, 0] for name in media.native}
    return {name: rows.at(local_positions(part, placeholders[name])[0]) for name, rows in media.native.items()}
