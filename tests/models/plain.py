"""What plain transformers computes for some samples: the reference that training is compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.models.build import build_omni_model
from omnitrain.models.contract.probes import Probe, probe_samples
from omnitrain.models.hf import foundation_class
from omnitrain.models.native import discover, peaked_
from omnitrain.models.omni import OmniModel


@dataclass
class Pair:
    """A model as it is, the same one as omnitrain trains it, and samples for both."""

    plain: PreTrainedModel
    ours: OmniModel
    probes: list[Probe]

    def pack(self) -> Pack:
        return Pack.from_samples([probe.sample for probe in self.probes])

    def packs_of_one(self) -> list[Pack]:
        return [Pack.from_samples([probe.sample]) for probe in self.probes]


def pair_of(config: PreTrainedConfig) -> Pair:
    """Texts of three lengths, every modality alone, two items of one, all together."""
    model = foundation_class(config)(config)
    peaked_(model)
    model.train()
    plain = copy.deepcopy(model)
    probes = [probe for probe in probe_samples(model, discover(model)) if _is_taken(plain, probe)]
    return Pair(plain, build_omni_model(foundation=model).train(), probes)


@torch.no_grad()
def _is_taken(plain: PreTrainedModel, probe: Probe) -> bool:
    try:
        plain(**probe.arguments, use_cache=False)
    except ValueError:  # some models refuse images and videos in one sample
        assert len(set(probe.modalities)) > 1
        return False
    return True


@torch.no_grad()
def plain_logits(model: PreTrainedModel, probe: Probe) -> Tensor:
    return model(**probe.arguments, use_cache=False).logits


@torch.no_grad()
def our_logits(model: OmniModel, pack: Pack) -> dict[int, Tensor]:
    """Sample index -> ``[T, vocabulary]``, for models whose logits are what the head returns."""
    logits = model.foundation.get_output_embeddings()(model(pack).hidden)[0]
    return dict(zip(pack.info.indices, logits.split(pack.info.lengths), strict=True))


def plain_step(pair: Pair, order: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all trained tokens, sample by sample in this order."""
    pair.plain.zero_grad()
    count = sum(int(probe.sample.loss_mask[1:].sum()) for probe in pair.probes)
    total = 0.0
    for probe in (pair.probes[place] for place in order):
        ids = probe.arguments["input_ids"][0]
        labels = torch.where(torch.from_numpy(probe.sample.loss_mask), ids, -100)[1:]
        logits = pair.plain(**probe.arguments, use_cache=False).logits[0, :-1].float()
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, _gradients(pair.plain)


def our_step(pair: Pair, packs: Sequence[Pack]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the same mean by omnitrain."""
    pair.ours.zero_grad()
    count = sum(pack.loss_counts()["text"] for pack in packs)
    total = 0.0
    for pack in packs:
        loss = pair.ours(pack).losses["text"].sum / count
        loss.backward()
        total += loss.item()
    return total, _gradients(pair.ours.foundation)


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if gradient.any()}


def gradient_errors(pair: Pair, packs: Sequence[Pack]) -> dict[str, float]:
    """Tensors outside of max(1e-5, 20 x their own noise) -> error, relative to the tensor's largest value.

    The noise of a tensor is what the reference itself differs by when the samples are added in another order.
    """
    order = list(range(len(pair.probes)))
    loss, expected = plain_step(pair, order)
    _, reordered = plain_step(pair, order[::-1])
    our_loss, got = our_step(pair, packs)
    wrong = {} if abs(our_loss - loss) <= 1e-5 * abs(loss) else {"loss": abs(our_loss - loss) / abs(loss)}
    # What a key bias without rotary positions gets: zero, but for the rounding of what cancels.
    zero = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name in {**expected, **got}:
        one, other, again = (gradients.get(name, torch.zeros(1)) for gradients in (got, expected, reordered))
        scale = max(float(other.abs().max()), 1e-30)
        error, noise = (float((each - other).abs().max()) / scale for each in (one, again))
        if not error <= max(1e-5, 20 * noise) and max(scale, float(one.abs().max())) > zero:
            wrong[name] = error
    return wrong
