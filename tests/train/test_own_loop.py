"""``ot.prepare``: a loop in a few lines has the losses and weights of the loop of pieces, on any ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration

import omnitrain as ot
from omnitrain.data.loading.slots import merge_states
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Data
from tests.parallel.factories import any_to_any
from tests.tiny import TASKS, tiny_processor, tiny_row, write_parquet
from tests.train.test_native_foundation import save_llava

SIZES = {"pack_tokens": 120, "global_batch_size": 4}
SGD = partial(torch.optim.SGD, lr=0.1)
PLANS = {
    "tp2": {"default": {"tp": 2}},
    "vision1+dp1": {
        "sections": {"vision": {"ranks": 1, "components": ["image_encoder"]}},
    },
}


@pytest.fixture(autouse=True)
def _alone() -> Any:
    yield
    if dist.is_initialized():
        leave_process_groups()


def rows() -> list[ot.Row]:
    return [tiny_row(TASKS[i % len(TASKS)], i) for i in range(10)]


def trained(folder: Path, plan: ot.ParallelPlan | None = None) -> list[float]:
    """The losses of an epoch; the model is saved in ``folder``."""
    model = any_to_any()
    run = ot.prepare(model, rows(), plan, processor=tiny_processor(model), optimizer=SGD, **SIZES)
    losses = []
    for batch in run:
        losses.append(run.forward_backward(batch).item())
        ot.clip_gradients(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.model.save_pretrained(folder)
    assert len(run) == 3
    return losses


def trained_by_pieces(folder: Path) -> list[float]:
    state, model = ot.init_parallel_state(), any_to_any()
    processor = tiny_processor(model)
    model = ot.build_parallelize_model(model, enable_mixed_precision=False).train()
    ranks = {"rank": state.dp_rank, "ranks": state.dp_size}
    tails = model.runner.contract.without_tails
    loader = ot.build_dataloader(rows(), processor, without_tails=tails, **SIZES, **ranks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan_step, losses = ot.step_planner(model), []
    for packs in loader:
        loss = ot.accumulate_gradients(model, plan_step(packs))
        dist.all_reduce(loss)
        ot.clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def largest_difference(one: Path, other: Path) -> float:
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def test_it_trains_as_the_loop_of_pieces_to_the_bit_and_on_two_ranks_as_in_one_process(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = trained_by_pieces(tmp_path / "pieces")
    leave_process_groups()
    assert trained(tmp_path / "one") == expected and len(set(expected)) == 3
    assert largest_difference(tmp_path / "pieces", tmp_path / "one") == 0
    for name, plan in PLANS.items():
        found = ranks.run(trained, tmp_path / name, ot.ParallelPlan.model_validate(plan), timeout_s=90, world=2)
        assert found == [pytest.approx(expected, rel=1e-4)] * 2
        assert largest_difference(tmp_path / name, tmp_path / "one") < 1e-4


@pytest.mark.second
def test_an_hf_model_trains_on_a_file_with_its_optimizer_in_host_memory(tmp_path: Path) -> None:
    """Its weights come from its folder, its samples from its processor; norms and biases have no weight decay."""
    source = tmp_path / "llava"
    save_llava(source)
    data = write_parquet(tmp_path / "rows.parquet", [tiny_row("image_to_text", i) for i in range(4)])
    plan = ot.ParallelPlan(default=ot.ComponentPlan(memory={"offload": ["optimizer"]}))
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(source))
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    sources = {"processor": AutoProcessor.from_pretrained(source), "weights_path": source}
    run = ot.prepare(model, data, plan, optimizer=adamw, micro_batch_size=2, **sources)
    assert type(run.optimizer).__name__ == "OffloadedOptimizer"
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.5, 0.0]
    losses = []
    for _ in range(4):
        for batch in run:
            losses.append(run.forward_backward(batch).item())
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]
    run.loader.load_state_dict(run.loader.state_dict())
    assert run.loader.epoch == 4


def test_the_data_of_a_recipe_has_no_end_and_slots(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "rows.parquet", rows())
    of_recipe = Data(train=[ot.recipe.DataSource(path=str(data))], pack_tokens=120, packing_buffer=4, workers=0)
    model = any_to_any()
    run = ot.prepare(model, of_recipe, processor=tiny_processor(model), slots=2)
    assert [len(batch.packs) for batch in islice(run, 9)] == [2] * 9 and run.optimizer is None
    with pytest.raises(TypeError):
        len(run)


def states_of_rank(data: Any, options: dict[str, Any]) -> list[Any]:
    """The state of this rank's loader after each of three steps, and how many packs a step has on this rank."""
    model, plan = any_to_any(), ot.ParallelPlan.model_validate(PLANS["vision1+dp1"])
    run = ot.prepare(model, data, plan, processor=tiny_processor(model), **options)
    states = []
    for batch in chain(run, run):
        state = run.loader.state() if isinstance(data, Data) else run.loader.state_dict()
        states.append((len(batch.packs), state))
        if len(states) == 4:
            return states
    raise AssertionError(states)


def test_a_section_has_the_state_of_the_ranks_that_draw(ranks: RankPool, tmp_path: Path) -> None:
    """After three steps of an epoch and one of the next; the states of a recipe's data merge."""
    drawn, section = ranks.run(states_of_rank, rows(), SIZES, world=2, timeout_s=60)
    assert [state for _, state in drawn] == [state for _, state in section]
    assert [(state["epoch"], state["steps"]) for _, state in section] == [(0, 1), (0, 2), (0, 3), (1, 1)]
    data = write_parquet(tmp_path / "rows.parquet", rows())
    of_recipe = Data(train=[ot.recipe.DataSource(path=str(data))], pack_tokens=120, packing_buffer=4, workers=0)
    drawn, section = ranks.run(states_of_rank, of_recipe, {"slots": 2}, world=2, timeout_s=60)
    for (packs, state), (no_packs, empty) in zip(drawn, section, strict=True):
        assert (packs, no_packs) == (2, 0) and not empty.slots and merge_states([state, empty]) == state


HALF = ot.ParallelPlan(default=ot.ComponentPlan(precision={"param": "bfloat16"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "optimizer: found a SGD, but the model's parameters are not",
        ),
        ({"optimizer": "adamw"}, "optimizer: found a str"),
        ({"plan": {"tp": 2}}, "plan: found a dict; expected a ParallelPlan"),
        ({"micro_batch": 2}, "micro_batch: build_dataloader has no such argument for this data; did you mean `micro_b"),
        ({"processor": None}, "row 0"),
        ({"processor": "llava"}, "processor: found a str"),
        ({"plan": HALF, "optimizer": SGD}, "trainable tensors are not float32"),
        ({"data": "rows.jsonll"}, "rows.jsonll"),
        ({"pack_tokens": None}, "pass one of them: the rows of a micro-batch, or the most tokens of a pack"),
    ],
)
def test_what_does_not_fit_is_told(options: dict[str, Any], message: str) -> None:
    arguments = {"data": rows(), "processor": tiny_processor(any_to_any()), **SIZES, **options}
    with pytest.raises((UserError, ValueError)) as told:
        next(iter(ot.prepare(any_to_any(), **arguments)))
    assert message in str(told.value)


def test_a_model_that_cannot_pack_gets_one_sample_in_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = any_to_any()
    monkeypatch.setattr(model.runner, "contract", replace(model.runner.contract, packs=False))
    run = ot.prepare(model, rows(), processor=tiny_processor(model), **SIZES)
    assert [len(pack.info.lengths) for pack in next(iter(run)).packs] == [1] * 4


def test_a_model_in_bf16_trains_in_fp32() -> None:
    model = any_to_any().to(torch.bfloat16)
    run = ot.prepare(model, rows(), processor=tiny_processor(model), optimizer=SGD, **SIZES)
    assert {p.dtype for p in run.model.parameters() if p.requires_grad} == {torch.float32}
    assert run.forward_backward(next(iter(run))).dtype == torch.float32


def tilted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def first_losses(**given: Any) -> float:
    model = any_to_any()
    run = ot.prepare(model, rows(), processor=tiny_processor(model), **SIZES, **given)
    return float(run.forward_backward(next(iter(run))))


def test_a_loss_of_the_user_takes_the_place_of_a_heads_cross_entropy() -> None:
    plain = first_losses()
    both = first_losses(losses={"text": tilted, "image_decoder": tilted, "audio_decoder": tilted})
    assert both == pytest.approx(2 * plain, rel=1e-6)


def test_a_loss_of_the_user_is_refused_for_a_head_that_is_not_there() -> None:
    with pytest.raises(UserError, match="losses: found a head 'txt'; did you mean `text`"):
        first_losses(losses={"txt": tilted})
