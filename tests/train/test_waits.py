"""A step is queued on the device as a whole: nothing in it waits for what the host knows already."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import ExpertsBalance, Ops, Optimizer, Recipe
from omnitrain.train.build_from_recipe import use_ops
from omnitrain.train.metrics.meter import LossMeter
from omnitrain.train.trainer import Trainer
from tests.parallel import factories
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_recipe, tiny_samples
from tests.waits import DEVICE, Device

ON_CPU_ALONE = "omnitrain.ops.cpu.short_attention"


def text() -> tuple[OmniModel, list[Sample]]:
    model = tiny_model(encoders={}, decoders={}, foundation=FOUNDATION)
    return model, tiny_samples(tiny_processor(model), 4, ["text"])


def any_to_any() -> tuple[OmniModel, list[Sample]]:
    model = tiny_model()
    return model, tiny_samples(tiny_processor(model))


def experts() -> tuple[OmniModel, list[Sample]]:
    foundation = factories.qwen3_moe()
    model = build_omni_model(foundation=foundation)
    return model, [probe.sample for probe in probe_samples(foundation, model.runner.native)]


def vision_language() -> tuple[OmniModel, list[Sample]]:
    """Several images and a video."""
    foundation = factories.qwen3_vl()
    model = build_omni_model(foundation=foundation)
    return model, [probe.sample for probe in probe_samples(foundation, model.runner.native)]


def device_after_a_step(model: OmniModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> Device:
    """Of two micro-batches and an update; knows nothing of what runs on no GPU."""
    use_ops(model.train(), Ops(), torch.device("cpu"), torch.float32)
    batch = step_planner(model)([Pack.from_samples(samples[first::2]) for first in range(2)])
    optimizer, meter = build_optimizer(model, Optimizer(), ()), LossMeter()
    routers = RouterMonitor(model, ExpertsBalance())
    monkeypatch.setattr(OmniModel, "device", DEVICE)
    device = Device(chain(model.parameters(), model.buffers()))
    with device.watched():
        accumulate_gradients(model, batch, on_output=meter.add, routers=routers)
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
    device.mixes -= {mix for mix in device.mixes if mix.startswith(ON_CPU_ALONE)}
    return device


def waits_of(device: Device) -> dict[str, int]:
    """Without those of code that never runs on a GPU."""
    return {place: times for place, times in device.waits.items() if not place.startswith(ON_CPU_ALONE)}


@pytest.mark.parametrize("case", [text, any_to_any, experts, vision_language])
def test_a_step_waits_for_nothing(
    case: Callable[[], tuple[OmniModel, list[Sample]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits_of(device_after_a_step(*case(), monkeypatch)) == {}


def test_the_host_waits_once_in_a_step_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Recipe.load(str(tiny_recipe(tmp_path))))
    batch = next(iter(trainer.loader))
    monkeypatch.setattr(OmniModel, "device", DEVICE)
    device = Device(chain(trainer.model.parameters(), trainer.model.buffers()))
    with device.watched():
        trainer.train_step(batch)
    assert waits_of(device) == {"omnitrain.train.trainer train_step": 1}


@pytest.mark.parametrize("case", [text, any_to_any, experts, vision_language])
def test_tensors_of_the_host_and_of_the_device_do_not_meet(
    case: Callable[[], tuple[OmniModel, list[Sample]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_after_a_step(*case(), monkeypatch).mixes == set()


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.clone().index_put_([x > 0], torch.tensor(0.0)),
        lambda x: torch.ones(2).to(DEVICE),
        lambda x: torch.tensor([1.0], device=DEVICE),
        lambda x: torch.arange(2, device=DEVICE).tolist(),
        lambda x: (x + torch.ones(2)).view(2, 1)[:1].cpu(),
    ],
)
def test_a_wait_is_seen(waits: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)
    device = Device([x])
    with device.watched():
        x * 2 + x.index_select(0, torch.tensor([0, 1]))
        torch.ones(2).tolist()
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert device.waits == {}
    with device.watched():
        waits(x)
    assert device.waits.keys() == {"elsewhere"}


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x + torch.ones(2),
        lambda x: x.index_select(0, torch.tensor([0, 1])),
        lambda x: x.index_copy_(0, torch.tensor([0, 1]), x.clone()),
        lambda x: torch.cat([torch.ones(2), torch.ones(2, device=DEVICE)]),
    ],
)
def test_a_mix_is_seen(mixes: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)
    device = Device([x])
    with device.watched():
        x * torch.tensor(2.0) + torch.ones(2).to(DEVICE, non_blocking=True)
        torch.ones(2).copy_(x)
        x.clone().requires_grad_()[torch.tensor([1, 0], device=DEVICE)].sum().backward()
    assert device.mixes == set()
    with device.watched():
        mixes(x)
    assert [mix.partition(":")[0] for mix in device.mixes] == ["elsewhere"]
