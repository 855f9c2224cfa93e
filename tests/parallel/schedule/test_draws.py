"""Dropout does not depend on the stages of a model, the order of micro-batches, or recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import StepDraws, seed_blocks
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.pipeline.apply import whole_over_stages
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import ComponentPlan, ParallelPlan
from tests.families import FAMILIES
from tests.models.staged import with_layers
from tests.tiny import FOUNDATION, MODEL, tiny_model, tiny_processor, tiny_samples

LENGTHS = (24, 9, 17, 30)


def packs() -> list[Pack]:
    return [
        Pack.from_samples([Sample(f"{n}", "text", np.arange(n) + 3, np.arange(n) > 0, np.arange(n), index=n)])
        for n in LENGTHS
    ]


def text_model(dropout: float) -> tuple[OmniModel, list[Pack]]:
    config = with_layers(FAMILIES["qwen3"](), 4)
    config.attention_dropout = dropout
    torch.manual_seed(0)
    foundation = foundation_class(config)(config)
    init_peaked_(foundation)
    return build_omni_model(foundation=foundation).train(), packs()


def model_with_towers(of_towers: float, of_foundation: float) -> tuple[OmniModel, list[Pack]]:
    """A model with two encoders, and packs of text, images and sound."""
    encoders = deepcopy(MODEL["encoders"])
    encoders["image_encoder"]["tower"]["config"]["attention_dropout"] = of_towers
    encoders["audio_encoder"]["tower"]["config"] |= {"dropout": of_towers, "attention_dropout": of_towers}
    foundation = FOUNDATION | {"num_hidden_layers": 4, "attention_dropout": of_foundation}
    model = tiny_model(foundation=foundation, encoders=encoders).train()
    return model, [Pack.from_samples([sample]) for sample in tiny_samples(tiny_processor(model), 5)]


Make = Callable[[], tuple[OmniModel, list[Pack]]]


def gradients(make: Make, plans: tuple[dict, ...], seed: int = 0) -> list[tuple[float, Mapping[str, Tensor]]]:
    """For each plan of the foundation: the loss on this rank, and the gradients of a step in which all is drawn."""
    found = []
    for plan in plans:
        model, of_step = make()
        if dist.is_initialized():
            model = build_parallelize_model(
                model,
                parallel_state=init_parallel_state(pp_size=2),
                parallel_plan=ParallelPlan(components={"foundation": ComponentPlan(**plan)}),
                enable_mixed_precision=False,
            )
        torch.manual_seed(seed)
        loss = accumulate_gradients(model, step_planner(model)(of_step)).item()
        whole = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((loss, whole_over_stages(whole, layout_of(model).pipeline) if dist.is_initialized() else whole))
    return found


def test_dropout_is_that_of_one_process_on_any_stages_with_and_without_recompute(ranks: RankPool) -> None:
    make = partial(text_model, 0.2)
    ((loss, expected),) = gradients(make, ({},))
    for other in (gradients(partial(text_model, 0.0), ({},)), gradients(make, ({},), seed=1)):
        assert other[0][0] != pytest.approx(loss, rel=1e-3)
    plans = tuple(
        {"schedule": schedule, "memory": {"recompute": recompute}}
        for schedule, recompute in (
            ({}, "full"),
            ({"chunks": 2}, "none"),
            ({"chunks": 2}, "full"),
            ({"kind": "zbv"}, "full"),
        )
    )
    first, last = ranks.run(gradients, make, plans, timeout_s=60, world=2)
    for (of_first, _), (of_last, found) in zip(first, last, strict=True):  # zbv has its last stage on the first rank
        assert of_first + of_last == pytest.approx(loss, rel=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    (_, plain), (_, once_more) = last[1:3]
    assert all(torch.equal(once_more[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("of_foundation", [0.2, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.second
def test_dropout_of_encoders_is_that_of_one_process(ranks: RankPool, of_foundation: float) -> None:
    make = partial(model_with_towers, 0.2, of_foundation)
    ((loss, expected),) = gradients(make, ({},))
    ((without, _),) = gradients(partial(model_with_towers, 0.0, of_foundation), ({},))
    assert without != pytest.approx(loss, rel=1e-4)
    plans = ({"schedule": {"chunks": 2}}, {"schedule": {"kind": "zbv"}, "memory": {"recompute": "full"}})
    first, last = ranks.run(gradients, make, plans, timeout_s=60, world=2)
    for (of_first, _), (of_last, found) in zip(first, last, strict=True):
        assert of_first + of_last == pytest.approx(loss, rel=1e-6)
        for name, gradient in expected.items():
            if gradient is not None:
                torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def seeds_of_encoders() -> list[tuple[str, int]]:
    """The seed with which each encoder begins on this rank; all ranks draw the same seed of the step."""
    model, of_step = model_with_towers(0.2, 0.2)
    encoders = ("image_encoder", "audio_encoder")
    plan = ParallelPlan(components={name: ComponentPlan(place="world") for name in encoders})
    state = init_parallel_state(pp_size=2)
    model = build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=False)
    found: dict[str, int] = {}
    for name in encoders:
        tower = model.get_submodule(name).tower
        tower.register_forward_pre_hook(lambda *_, name=name: found.setdefault(name, torch.initial_seed()) and None)
    torch.manual_seed(0)
    accumulate_gradients(model, step_planner(model)(of_step))
    return sorted(found.items())


def test_encoders_on_all_stages_draw_other_numbers_on_each_rank_and_the_same_again(ranks: RankPool) -> None:
    first, again = (ranks.run(seeds_of_encoders, timeout_s=60, world=2) for _ in range(2))
    assert first == again and len({seed for of_rank in first for _, seed in of_rank}) == 4


def test_what_encoders_draw_does_not_change_the_numbers_of_the_embeddings() -> None:
    """Tensor parallel ranks encode different items, but must drop the same embeddings."""
    states = []
    for of_towers in (0.0, 0.2):
        model, of_step = model_with_towers(of_towers, 0.2)
        assert model.draws  # its runner is built: the runs that discover modalities are over
        found: list[Tensor] = []
        block = model.foundation.model.layers[0]
        block._forward_pre_hooks.clear()  # without its own seed, it sees the state after the embeddings
        block.register_forward_pre_hook(lambda *_, found=found: found.append(torch.get_rng_state()))
        torch.manual_seed(0)
        accumulate_gradients(model, step_planner(model)(of_step))
        states.append(torch.stack(found))
    assert torch.equal(*states)


def test_every_block_of_every_micro_batch_and_step_draws_numbers_of_its_own() -> None:
    blocks = [nn.Identity() for _ in range(3)]
    seed_blocks(blocks)
    drawn = []
    for step in range(2):
        torch.manual_seed(step)
        draws = StepDraws(torch.device("cpu"))
        for micro_batch in range(2):
            with draws.forward(micro_batch):
                drawn.append(torch.rand(()).item())
                for block in blocks:
                    block(torch.zeros(1))
                    drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 4
