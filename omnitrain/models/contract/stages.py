"""Check where a foundation may be cut into pipeline stages: the whole model's loss and gradients must stay.

A tiny model runs a pack as a whole, then in two stages for each cut, then in as many stages as it can be cut into. What
each stage needs is measured, too: whether it needs the input embeddings, and which side features it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract, StageContract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.checks_packing import SMALLEST
from omnitrain.models.contract.tiny_model import tiny_config, tiny_configs
from omnitrain.models.contract.trial import Failure, Step, Trial, attempt, compare, gradients_of
from omnitrain.models.discovery import MediaFeatures, ParameterReads, text_blocks, watching
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.stage import BlockSpan, StageCall, hidden_among
from omnitrain.recipe.globs import any_layer

# Relative to the largest gradient of a parameter. The gradients of a parameter that two stages read are summed in
# another order than in the whole model; all other gradients are equal bit for bit.
TOLERANCE = 1e-5
# So that there is a stage that is neither the first nor the last, and has more than one block.
_LAYERS = 4
# A model with all layers is built only up to this size.
_MOST_PARAMETERS = 300_000_000


def stage_contract_of(model: PreTrainedModel, contract: Contract) -> StageContract:
    """Return where a foundation may be cut, from the cache or by checking a tiny model, run by ``contract``."""
    check = partial(check_stages, type(model), model.config, contract, len(text_blocks(model)))
    return cached(model, ".stages.json", StageContract, check)


def check_stages(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract, num_blocks: int
) -> StageContract:
    """Check a tiny model's cuts; if it cannot be cut everywhere, also the cuts of a small model with all layers."""
    if num_blocks < 2:
        return StageContract(f"it has {num_blocks} block")
    small, _, whole = tiny_configs(config, least_layers=_LAYERS)
    found = _checked(model_class, small, contract)
    if found.problem:  # sizes that are cut may belong together
        found = _checked(model_class, whole, contract)
    if not found.problem and not found.refused:
        return replace(found, cuts=tuple(range(1, num_blocks)))
    deep = tiny_config(config, least_layers=num_blocks)
    with torch.device("meta"):
        num_parameters = 0 if found.problem else sum(p.numel() for p in model_class(deep).parameters())
    if not found.problem and num_parameters <= _MOST_PARAMETERS:
        found = _checked(model_class, deep, contract)
    if len(found.cuts) + len(found.refused) < num_blocks - 1:
        fact = found.problem or "; ".join(f"cut before block {cut}, {fact}" for cut, fact in found.refused.items())
        return replace(found, cuts=(), refused={}, problem=fact)
    return found


def _checked(model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract) -> StageContract:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        found = attempt(_StageTrial.measured_on, model_class, config, contract)
    return StageContract(str(found)) if isinstance(found, Failure) else found


class _StageTrial:
    """Runs a tiny model as a whole and in stages."""

    def __init__(self, trial: Trial) -> None:
        self.runner, self.model, self.packs = trial.runner, trial.ours, trial.packs
        self.count = len(text_blocks(self.model))
        self.whole = self.step((), StageContract())

    @classmethod
    def measured_on(cls, *of_trial: Any) -> StageContract:
        with Trial.of(*of_trial) as trial:
            return cls(trial).measured()

    def measured(self) -> StageContract:
        """Measure all cuts, with the fewest inputs of a stage that make most cuts exact."""
        if skipped := self.skipped_blocks():
            return StageContract(f"some samples skip whole blocks: {', '.join(skipped)}")
        plain, levels = StageContract(returns=self.returns()), self.levels()
        found: list[StageContract] = []
        for needs_embeddings, known in product((False, True), (levels, {}) if levels else ({},)):
            found.append(self.tried(replace(plain, needs_embeddings=needs_embeddings, levels=known)))
            if not found[-1].refused:
                break
        best = max(found, key=lambda contract: len(contract.cuts))
        if not best.cuts:
            return replace(best, problem=next(iter(best.refused.values())))
        return self.cut_everywhere(best)

    def skipped_blocks(self) -> list[str]:
        """Return the modules with blocks that a forward skips for some samples; ranks call them on empty tensors."""
        blocks = set(text_blocks(self.model))
        names = tuple({f"{any_layer(name)}." for name, module in self.model.named_modules() if module in blocks})
        called = [each for each in self.runner.contract.skipped_modules if not each.problem]
        return [s.module for s in called if f"{s.module}.".startswith(names) and not f"{s.parent}.".startswith(names)]

    def tried(self, contract: StageContract) -> StageContract:
        """Measure each cut by itself."""
        facts = {cut: self.fact((cut,), contract) for cut in range(1, self.count)}
        refused = {cut: fact for cut, fact in facts.items() if fact}
        return replace(contract, cuts=tuple(cut for cut in facts if cut not in refused), refused=refused)

    def cut_everywhere(self, contract: StageContract) -> StageContract:
        """Measure all cuts together."""
        if fact := self.fact(contract.cuts, contract) if len(contract.cuts) > 1 else "":
            return replace(contract, problem=f"cut before blocks {contract.cuts}, {fact}")
        return replace(contract, readers=self.readers(contract))

    def fact(self, cuts: Sequence[int], contract: StageContract) -> str:
        """Return how the loss or a gradient differs from the whole model's; empty if all are equal."""
        step = attempt(self.step, cuts, contract)
        if isinstance(step, Failure):
            return f"it fails: {step}"
        if not abs(step.loss - self.whole.loss) <= TOLERANCE * abs(self.whole.loss):
            return f"the loss is {step.loss:.6f}, but that of the whole model is {self.whole.loss:.6f}"
        difference = compare(step.gradients, self.whole.gradients, SMALLEST)
        return f"the gradient of {difference}" if not difference.error <= TOLERANCE else ""

    def step(self, cuts: Sequence[int], contract: StageContract) -> Step:
        """Run forward and backward of all packs, in stages divided by ``cuts``; gradients of features, too."""
        self.model.zero_grad(set_to_none=True)
        loss, gradients = 0.0, dict[str, Tensor]()
        spans = [BlockSpan(start, stop, self.count) for start, stop in pairwise((0, *cuts, self.count))]
        for index, pack in enumerate(self.packs):
            leaves = {
                name: features.with_tensors([t.detach().requires_grad_() for t in features.tensors()], features.counts)
                for name, features in self.runner.encode(pack).items()
            }
            loss += self._forward_backward(EncodedPack(pack, leaves), spans, contract)
            for modality, features in leaves.items():
                for name, leaf in zip(features.layout.names, features.tensors(), strict=True):
                    if leaf.grad is not None:
                        gradients[f"{name} of {modality} in pack {index}"] = leaf.grad
        return Step(loss, gradients | gradients_of(self.model))

    def _forward_backward(self, encoded: EncodedPack, spans: Sequence[BlockSpan], contract: StageContract) -> float:
        """Run a pack through all stages, or the whole model, and back; return its loss."""
        sent: list[Tensor] = []
        arrived: list[Tensor] = []
        for span in spans[:-1]:
            stage = StageCall(span, contract, arrived[-1] if arrived else None)
            sent.append(self.runner.stage_output(encoded, stage))
            if not sent[-1].requires_grad:
                raise UserError("the forward runs the blocks before the cut without gradients, as for a recurrence")
            arrived.append(sent[-1].detach().requires_grad_())
        last = StageCall(spans[-1], contract, arrived[-1]) if arrived else None
        loss = self.runner.text_loss(encoded, last).text.sum
        loss.backward()
        while sent:
            sent.pop().backward(arrived.pop().grad)
        return loss.item()

    @torch.no_grad()
    def readers(self, contract: StageContract) -> dict[str, tuple[str, ...]]:
        """Return parameter outside of blocks -> the stages that read it; see :class:`StageContract`."""
        spans = [BlockSpan(start, stop, self.count) for start, stop in pairwise((0, *contract.cuts, self.count))]
        inside = {id(parameter) for parameter in text_blocks(self.model).parameters()}
        read: dict[str, set[str]] = {"first": set(), "inner": set(), "last": set()}
        for pack in self.packs:
            encoded, hidden = EncodedPack(pack, self.runner.encode(pack)), None
            for span in spans:
                stage = StageCall(span, contract, hidden)
                with ParameterReads(self.model) as reads:
                    if span.is_last:
                        self.runner.text_loss(encoded, stage)
                    else:
                        hidden = self.runner.stage_output(encoded, stage)
                read["first" if span.is_first else "last" if span.is_last else "inner"] |= reads.names
        if len(spans) == 2:  # no inner stage to measure
            read["inner"] = read["first"] | read["last"]
        outside = [name for name, parameter in self.model.named_parameters() if id(parameter) not in inside]
        readers = {name: tuple(stage for stage, names in read.items() if name in names) for name in outside}
        return {name: stages for name, stages in readers.items() if stages}

    @torch.no_grad()
    def returns(self) -> tuple[int, int] | None:
        """Return how blocks return the hidden states; see :class:`StageContract`."""
        found: list[Any] = []
        with watching(text_blocks(self.model).named_children(), after=lambda *args: found.append(args[-1])):
            self.runner.text_loss(EncodedPack(self.packs[0], self.runner.encode(self.packs[0])))
        if not found:
            raise RuntimeError("the forward does not call the list of layers that was found")
        output = found[0]
        if isinstance(output, Tensor):
            return None
        return len(output), next(index for index, value in enumerate(output) if isinstance(value, Tensor))

    @torch.no_grad()
    def levels(self) -> dict[str, int]:
        """Return side feature -> the block after which it first changes the hidden states."""
        levels: dict[str, set[int]] = {}
        for pack in self.packs:
            media = self.runner.encode(pack)
            inputs = self._block_inputs(pack, media)
            for modality, features in media.items():
                for name in features.layout.names[1:]:
                    others = features.only([other for other in features.layout.names if other != name])
                    changed = self._block_inputs(pack, {**media, modality: others})
                    pairs = enumerate(zip(inputs, changed, strict=True))
                    first = next((block for block, (a, b) in pairs if not torch.equal(a, b)), self.count)
                    levels.setdefault(name, set()).add(max(first - 1, 0))
        return {name: min(blocks) for name, blocks in levels.items() if len(blocks) == 1}

    def _block_inputs(self, pack: Pack, media: dict[str, MediaFeatures]) -> list[Tensor]:
        found: list[Tensor] = []
        blocks = text_blocks(self.model).named_children()
        with watching(blocks, before=lambda _, __, args, kwargs: found.append(hidden_among(args, kwargs))):
            self.runner.text_loss(EncodedPack(pack, media))
        return found
