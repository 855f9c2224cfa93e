"""Check that a foundation computes in bf16 as transformers' model in bf16 does.

The loss and the gradients of a tiny model may differ from transformers' loss and gradients by what rounding explains
(:class:`~omnitrain.ops.rounding.Rounding`). All runs use the first run's experts, since rounding changes choices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from omnitrain.data.packing.pack import IGNORED, Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.cache import cached
from omnitrain.models.contract.checks_sequence import SequenceContract, first_without_problem
from omnitrain.models.contract.samples import Probe
from omnitrain.models.contract.tiny_model import tiny_configs, without_dropout
from omnitrain.models.contract.trial import Failure, Trial, attempt
from omnitrain.models.discovery import rest_codecs
from omnitrain.models.hf.compute_dtype import compute_in, stays_fp32
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.ops.rounding import LOSS, Rounding, Step

_COMPARED = 2**14  # about so many elements of each gradient are compared
_Loss = Callable[[Probe], Tensor]
_Context = Callable[..., AbstractContextManager[object]]


def precision_problem_of(model: PreTrainedModel, contract: Contract) -> str:
    """Return why a foundation may not compute in bf16, or nothing; cached, or by a tiny model under ``contract``."""
    check = partial(check_precision, type(model), model.config, contract)
    return cached(model, ".precision.json", SequenceContract, lambda: SequenceContract(check())).problem


def check_precision(model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract) -> str:
    """Check a tiny model of ``config``; if it has a problem, check one with all layers of towers and full MLPs."""
    small, _, whole = tiny_configs(config)
    return first_without_problem(partial(_measured, model_class, tiny, contract) for tiny in (small, whole)).problem


@torch.enable_grad()
def _measured(model_class: type[PreTrainedModel], config: PreTrainedConfig, contract: Contract) -> SequenceContract:
    with Trial.of(model_class, config, contract) as trial:
        probes = [probe for probe in trial.probes[2:] if len(probe.modalities) < 2]
        plain, ours = _in_bf16(trial.plain), trial.ours
        rest_codecs(plain, trial.native)
        _compute_in_bf16(ours)
        weights = dict(ours.named_parameters())
        recording = Recording()
        contexts = chain([recording.recorded], repeat(recording.replayed))
        rounding = Rounding.measure(
            lambda: _step(ours, probes, partial(_our_loss, trial), next(contexts)),
            weights,
            lambda name: weights[name].dtype,
        )
        expected = attempt(_step, plain, probes, partial(_plain_loss, plain), recording.replayed)
    if isinstance(expected, Failure):  # transformers' model cannot compute in bf16, where ours can
        return SequenceContract()
    beyond = rounding.beyond(expected)
    worst = max(beyond, key=lambda name: beyond[name].excess, default="")
    what = worst if worst == LOSS else f"the gradient of {worst}"
    return SequenceContract(f"{what} is {beyond[worst]}" if worst else "")


def _in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """The same model as transformers builds it in bf16."""
    with local_torch_dtype(torch.bfloat16):
        plain = type(model)(copy.deepcopy(model.config)).train()
    plain.load_state_dict(model.state_dict())  # casts
    must_stay_fp32 = stays_fp32(plain)
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.float() if must_stay_fp32(name) else parameter.data
    without_dropout(plain)
    return plain


def _compute_in_bf16(model: PreTrainedModel) -> None:
    must_stay_fp32 = stays_fp32(model)
    dtypes = {p: torch.float32 if must_stay_fp32(n) else torch.bfloat16 for n, p in model.named_parameters()}
    compute_in(model, dtypes, torch.bfloat16, must_stay_fp32)
    for parameter, dtype in dtypes.items():
        parameter.data = parameter.data.to(dtype)


def _step(model: PreTrainedModel, probes: Sequence[Probe], loss_of: _Loss, experts: _Context) -> Step:
    """The mean loss of the probes, and elements of its gradients, which are added up in fp32."""
    count = sum(int(probe.sample.loss_mask[1:].sum()) for probe in probes)
    total, gradients = 0.0, dict[str, Tensor]()
    for probe in probes:
        model.zero_grad(set_to_none=True)
        with experts(model, [probe.sample.id], [len(probe.sample)]):
            loss = loss_of(probe) / count
        loss.backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                compared = parameter.grad.flatten()[:: max(1, parameter.numel() // _COMPARED)].float()
                gradients[name] = gradients[name] + compared if name in gradients else compared
    return total, gradients


def _our_loss(trial: Trial, probe: Probe) -> Tensor:
    pack = Pack.from_samples([probe.sample])
    groups = {
        name: tuple(replace(group, features=_low(group.features)) for group in batch.groups)
        for name, batch in pack.inputs.items()
    }
    inputs = {name: replace(batch, groups=groups[name]) for name, batch in pack.inputs.items()}
    pack = replace(pack, inputs=inputs)
    return trial.runner.text_loss(trial.encoded(pack)).text.sum


def _low(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _plain_loss(model: PreTrainedModel, probe: Probe) -> Tensor:
    labels = probe.arguments["input_ids"][0].where(torch.from_numpy(probe.sample.loss_mask), IGNORED)
    logits = model(**_low(probe.arguments), use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum")
