"""A training loop of a user's own: loss, clipping, saving, and going on after a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import omnitrain as ot
from omnitrain.errors import TrainingError, UserError, WeightsError
from omnitrain.models.build import build_omni_model
from omnitrain.parallel.ranks import RankPool
from tests.parallel.factories import qwen3_moe, qwen3_of_four_heads
from tests.parallel.laid_out import PLAIN, full
from tests.parallel.test_experts import samples_of

MAX_NORM = 0.1


def packs() -> list[ot.Pack]:
    return [ot.Pack.from_samples(samples_of(qwen3_of_four_heads()))]


def step_and_save(folder: Path, state: dict[str, int], lora: dict[str, object] | None) -> tuple[float, float, bool]:
    """Loss and norm of a step of SGD, and whether what was saved is what was trained."""
    if dist.is_initialized():
        ot.init_parallel_state(**state)
        plan = ot.ParallelPlan(default=ot.ComponentPlan(lora=lora))
        model = ot.build_parallelize_model(qwen3_moe() if lora else qwen3_of_four_heads(), parallel_plan=plan, **PLAIN)
    else:
        model = build_omni_model(foundation=qwen3_of_four_heads())
    loss = ot.accumulate_gradients(model, ot.step_planner(model)(packs()))
    if dist.is_initialized():
        dist.all_reduce(loss)
    norm = ot.clip_gradients(model.parameters(), MAX_NORM)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    model.save_pretrained(folder)
    stored = dict(ot.OmniModel.from_pretrained(str(folder)).named_parameters())
    same = all(torch.equal(full(p.detach()), stored[name]) for name, p in model.named_parameters())
    return loss.item(), norm.item(), same and len(stored) == len(list(model.parameters()))


def test_a_loop_of_ones_own_reads_the_loss_clips_and_saves_on_tensor_parallel_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    loss, norm, _ = step_and_save(tmp_path / "one", {}, None)
    for found in ranks.run(step_and_save, tmp_path / "two", {"tp_size": 2}, None, timeout_s=60, world=2):
        assert found == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4), True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all((one[name] - two[name]).abs().max() < 1e-5 for name in one)


def test_adapters_are_saved_beside_the_base_and_come_back_with_it(ranks: RankPool, tmp_path: Path) -> None:
    lora = {"targets": ["q_proj", "experts.*"], "rank": 2}
    assert all(found[2] for found in ranks.run(step_and_save, tmp_path, {}, lora, timeout_s=60, world=2))
    assert (tmp_path / "adapters" / "foundation" / "adapter_config.json").is_file()


def save_into_a_file(folder: Path) -> str:
    (folder / "taken").touch()
    model = ot.build_parallelize_model(qwen3_of_four_heads(), parallel_state=ot.init_parallel_state(), **PLAIN)
    with pytest.raises((NotADirectoryError, FileExistsError, AssertionError, TrainingError)) as told:
        model.save_pretrained(folder / "taken" / "model")
    return type(told.value).__name__


def test_where_the_first_rank_cannot_write_no_rank_waits_for_it(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(save_into_a_file, tmp_path, timeout_s=60, world=2)
    assert first == "NotADirectoryError" and second == "TrainingError"


def refused_twice_then_trained(empty: Path) -> list[str]:
    ot.init_parallel_state()
    foundation, told = qwen3_of_four_heads(), []
    frozen = ot.ParallelPlan(default=ot.ComponentPlan(freeze=True))
    with pytest.raises((UserError, WeightsError)):
        ot.build_parallelize_model(foundation, weights_path=str(empty), parallel_plan=frozen, **PLAIN)
    model = ot.build_parallelize_model(foundation, **PLAIN)
    assert all(p.requires_grad for p in model.parameters())
    for build in (ot.build_parallelize_model, lambda m: ot.build_omni_model(foundation=m)):
        with pytest.raises(UserError, match="parallelized already") as again:
            build(foundation)
        told.append(str(again.value))
    ot.accumulate_gradients(model, ot.step_planner(model)(packs()))
    return told


def test_after_a_refusal_the_model_is_as_it_was_and_a_second_layout_leaves_the_first(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert [len(told) for told in ranks.run(refused_twice_then_trained, tmp_path, timeout_s=60, world=2)] == [2, 2]
