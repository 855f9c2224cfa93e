"""What plain transformers computes for some samples: the reference that training is compared with."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.samples import Probe, probe_samples
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.discovery import MediaFeatures, config_nodes, discover, override
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.ops.experts.routing_replay import Recording


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
    """A model of this config, and :func:`paired`."""
    return paired(foundation_class(config)(config))


def paired(model: PreTrainedModel) -> Pair:
    """With peaked weights: texts of three lengths, every modality alone, two items of one, all together."""
    init_peaked_(model)
    plain = copy.deepcopy(in_training(model))
    probes = [probe for probe in probe_samples(model, discover(model)) if _is_taken(plain, probe)]
    return Pair(plain, build_omni_model(foundation=model).train(), probes)


def in_training(model: PreTrainedModel) -> PreTrainedModel:
    """A new model in training mode; transformers makes media tokenizers in evaluation mode, where they stay."""
    resting = [module for module in model.modules() if not module.training]
    model.train()
    for module in resting:
        module.eval()
    return model


@torch.no_grad()
def _is_taken(plain: PreTrainedModel, probe: Probe) -> bool:
    try:
        plain(**probe.arguments, use_cache=False)
    except AttributeError as error:  # Llama 4 of transformers 5.24.0: no reference, and nothing to train
        pytest.skip(f"{type(plain).__name__} does not run in transformers {transformers.__version__}: {error}")
    except ValueError:  # some models refuse images and videos in one sample
        assert len(set(probe.modalities)) > 1
        return False
    return True


@torch.no_grad()
def plain_logits(model: PreTrainedModel, probe: Probe) -> Tensor:
    return model(**probe.arguments, use_cache=False).logits


@torch.no_grad()
def plain_logits_of_items_apart(both: Pair, probe: Probe) -> Tensor:
    """The same, with each image, video and clip run through the plain model's tower by itself."""
    interfaces = both.ours.runner.native.interfaces
    rows: dict[str, MediaFeatures] = {}
    for modality in dict.fromkeys(probe.modalities):
        interface = interfaces[modality]
        items = interface.probe_items(probe.modalities.count(modality))
        rows[modality] = MediaFeatures.cat([interface.encode(both.plain, item) for item in items])
    media = {name for interface in interfaces.values() for name in interface.arguments}
    arguments = {name: value for name, value in probe.arguments.items() if name not in media}
    positions = torch.from_numpy(probe.sample.position_ids)
    with override(both.plain, interfaces, rows) as extra:
        return both.plain(**arguments, **extra, position_ids=positions[..., None, :], use_cache=False).logits


@torch.no_grad()
def our_logits(model: OmniModel, pack: Pack, *, packed: bool = True) -> dict[int, Tensor]:
    """Sample index -> ``[T, vocabulary]``, of the forward that training runs: as a packed sequence, or unpacked."""
    runner = model.runner
    sequence = PackedSequence(tuple(pack.cu_seqlens.tolist())) if packed else None
    encoded = EncodedPack(pack, runner.encode(pack))
    logits = runner.run_pack(encoded, lambda hidden, head: type(head).forward(head, hidden), sequence).logits[0]
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


def exact_step(pair: Pair) -> tuple[float, dict[str, Tensor]]:
    """:func:`plain_step` in fp64 from first to last, for the same weights."""
    with _doubled(pair) as exact:
        return plain_step(exact, range(len(exact.probes)))


def low_plain_step(pair: Pair, routing: Sequence[Recording] | None) -> tuple[float, dict[str, Tensor]]:
    """:func:`plain_step` of transformers' bf16 model; gradients of samples are added up in fp32, named as ours are.

    ``routing``: decides which experts compute a token, since rounding changes some of these decisions.
    """
    kind, config = type(pair.plain), copy.deepcopy(pair.plain.config)
    with local_torch_dtype(torch.bfloat16):
        plain = in_training(kind(config))
    plain.load_state_dict(pair.plain.state_dict())  # casts
    must_stay_fp32 = stays_fp32(plain)
    for name, tensor in plain.named_parameters():
        tensor.data = tensor.data.float() if must_stay_fp32(name) else tensor.data
    named = nn.ModuleDict({"foundation": plain})
    total: Counter[str] = Counter()
    loss = 0.0
    for probe in pair.probes:
        one = Pair(plain, pair.ours, [replace(probe, arguments=_as(torch.bfloat16, probe.arguments))])
        share = int(probe.sample.loss_mask[1:].sum()) / sum(int(p.sample.loss_mask[1:].sum()) for p in pair.probes)
        replay = routing[0].replayed(named, [probe.sample.id], [len(probe.sample)]) if routing else nullcontext()
        with replay:
            own_loss, gradients = plain_step(one, [0])
        loss += own_loss * share
        total.update({f"foundation.{name}": gradient.float() * share for name, gradient in gradients.items()})
    return loss, dict(total)


def exact_logits(pair: Pair) -> dict[int, Tensor]:
    """Sample index -> :func:`plain_logits` in fp64, ``[T, vocabulary]``."""
    with _doubled(pair) as exact:
        return {probe.sample.index: plain_logits(exact.plain, probe)[0] for probe in exact.probes}


@contextmanager
def _doubled(pair: Pair) -> Iterator[Pair]:
    """The plain model and the samples in fp64. Experts run one by one: torch's grouped matrix product has no fp64."""
    plain = copy.deepcopy(pair.plain).double()
    for node in config_nodes(plain.config):
        node._experts_implementation_internal = "eager"
    probes = [replace(probe, arguments=_as(torch.float64, probe.arguments)) for probe in pair.probes]
    with doubling():
        yield Pair(plain, pair.ours, probes)


def _as(dtype: torch.dtype, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@contextmanager
def doubling() -> Iterator[None]:
    """While open, what is made without a dtype, or asked for as fp32, is fp64; in a backward, too."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling(), _DoublingOps():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Doubling(TorchFunctionMode):
    """Where models ask for fp32 (norms, softmax, rotary positions), they get fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **named)


class _DoublingOps(TorchDispatchMode):
    """The same of ops, which a backward runs without their functions; grouped products run matrix by matrix."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float64:
            return _products(*args, **named)
        return func(*map(_wider, args), **named)


def _products(left: Tensor, right: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """torch's grouped product has no fp64: rows ``[S, K]`` by ``[E, K, N]``, or sums over them by ``[S, N]``."""
    ends = offs.tolist()
    spans = [slice(start, stop) for start, stop in pairwise([0, *ends])]
    if right.ndim == 3:
        return torch.cat([left[span] @ matrix for span, matrix in zip(spans, right, strict=True)])
    return torch.stack([left[:, span] @ right[span] for span in spans])


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


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
