"""A training loop of a user's own: loss, clipping, saving, and going on after a refusal."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

import omnitrain as ot
from omnitrain.errors import TrainingError, UserError, WeightsError
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.discovery import discover
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import MAIN
from tests.parallel.expert.test_experts import samples_of
from tests.parallel.factories import (
    any_to_any,
    ernie4_5_vl_moe,
    lfm2_vl,
    llava,
    qwen3_moe,
    qwen3_moe_with_adapters,
    qwen3_of_four_heads,
)
from tests.parallel.laid_out import PLAIN, full, laid_out, samples

MAX_NORM = 0.1
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def packs() -> list[ot.Pack]:
    return [ot.Pack.from_samples(samples_of(qwen3_of_four_heads()))]


def loss_and_norm(model: ot.OmniModel) -> tuple[float, float]:
    """Of a step whose packs are the same on all ranks."""
    loss = ot.accumulate_gradients(model, ot.step_planner(model)(packs()))
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item(), ot.clip_gradients(model.parameters(), MAX_NORM).item()


def step_and_save(folder: Path, state: dict[str, int], lora: dict[str, object] | None) -> tuple[float, float, bool]:
    """Loss and norm of a step of SGD, and whether what was saved is what was trained."""
    if dist.is_initialized():
        ot.init_parallel_state(**state)
        plan = ot.ParallelPlan(default=ot.ComponentPlan(lora=lora))
        model = ot.build_parallelize_model(qwen3_moe() if lora else qwen3_of_four_heads(), parallel_plan=plan, **PLAIN)
    else:
        model = build_omni_model(foundation=qwen3_of_four_heads())
    loss, norm = loss_and_norm(model)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    model.save_pretrained(folder)
    stored = dict(ot.OmniModel.from_pretrained(str(folder)).named_parameters())
    same = all(torch.equal(full(p.detach()), stored[name]) for name, p in model.named_parameters())
    return loss, norm, same and len(stored) == len(list(model.parameters()))


def test_a_loop_of_ones_own_reads_the_loss_clips_and_saves_on_tensor_parallel_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    loss, norm, _ = step_and_save(tmp_path / "one", {}, None)
    for found in ranks.run(step_and_save, tmp_path / "two", {"tp_size": 2}, None, timeout_s=60, world=2):
        assert found == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4), True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all((one[name] - two[name]).abs().max() < 1e-5 for name in one)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_saved_beside_the_base_and_come_back_with_it(ranks: RankPool, tmp_path: Path, tp: int) -> None:
    lora = {"targets": ["q_proj", "o_proj", "experts.*"], "rank": 2}
    found = ranks.run(step_and_save, tmp_path, {"tp_size": tp}, lora, timeout_s=60, world=2)
    assert all(is_same for _, _, is_same in found)
    assert (tmp_path / "adapters" / "foundation" / "adapter_config.json").is_file()


def trained_by_the_page(word: str, folder: Path) -> list[str]:
    """The losses that the loop of the page prints, with SGD, in which a wrong norm shows in the first update."""
    plan = parse_layout(word).plan()
    state = init_state_of(plan)
    model = ot.build_parallelize_model(any_to_any().train(), parallel_plan=plan, **PLAIN)
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1].replace("AdamW", "SGD"), names)
    own = [ot.Pack.from_samples([sample]) for sample in samples()] if state.section == MAIN else []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names["train"](model, own, epochs=1, rate=1.0, packs_per_step=3)
    model.save_pretrained(folder)
    return re.findall(r"loss (\S+)", printed.getvalue())


def test_the_loop_of_the_page_clips_as_one_process_where_ranks_hold_parts_of_the_model(
    ranks: RankPool, tmp_path: Path
) -> None:
    (expected,) = ranks.run(trained_by_the_page, "dp1", tmp_path / "dp1", timeout_s=60, world=1)
    one = load_file(tmp_path / "dp1" / "model.safetensors")
    start = dict(any_to_any().named_parameters())
    assert len(expected) == 3 and max((one[name] - start[name]).abs().max() for name in one if name in start) > 0.01
    for word in ("pp2", "vision1+dp1"):
        found, _ = ranks.run(trained_by_the_page, word, tmp_path / word, timeout_s=60, world=2)
        assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in expected], abs=2e-4)
        saved = load_file(tmp_path / word / "model.safetensors")
        assert saved.keys() == one.keys() and max((saved[name] - one[name]).abs().max() for name in one) < 1e-4


def loss_and_norm_of_images(factory: Callable[[], PreTrainedModel]) -> tuple[float, float]:
    """Of a pack with three samples that show an image each; of two ranks, the second has two of them."""
    plain = factory()
    shown = next(probe.sample for probe in probe_samples(plain, discover(plain)) if len(probe.sample.spans) == 1)
    model = laid_out(model=plain) if dist.is_initialized() else build_omni_model(foundation=plain)
    pack = ot.Pack.from_samples([shown] * (dist.get_rank() + 1 if dist.is_initialized() else 3))
    loss = ot.accumulate_gradients(model, ot.step_planner(model)([pack]))
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item(), ot.clip_gradients(model.parameters(), None).item()


@pytest.mark.second
@pytest.mark.parametrize("factory", [llava, lfm2_vl])
def test_towers_with_code_of_their_own_around_them_train_sharded(
    ranks: RankPool, factory: Callable[[], PreTrainedModel]
) -> None:
    """LLaVA reads an inner layer, which transformers records by the name of a class, and FSDP changes that.

    LFM2-VL calls its projector image by image: ranks with more images would gather it more often.
    """
    expected = loss_and_norm_of_images(factory)
    for found in ranks.run(loss_and_norm_of_images, factory, timeout_s=60, world=2):
        assert np.allclose(found, expected, rtol=1e-4)


def test_the_weight_of_a_loss_that_is_not_there_is_told() -> None:
    model = build_omni_model(foundation=qwen3_of_four_heads())
    with pytest.raises(UserError, match="loss_weights: the model has no loss 'txt'; did you mean `text`"):
        ot.accumulate_gradients(model, ot.step_planner(model)(packs()), loss_weights={"txt": 0.0})


def test_what_is_no_pack_and_no_omni_model_is_told() -> None:
    with pytest.raises(UserError, match="found a Qwen3ForCausalLM; expected the OmniModel that build_omni_model or"):
        ot.step_planner(qwen3_of_four_heads())
    plan_step = ot.step_planner(build_omni_model(foundation=qwen3_of_four_heads()))
    for given, found in ((packs()[0], "a Pack"), (samples_of(qwen3_of_four_heads())[:2], "a list of Sample")):
        with pytest.raises(UserError, match=f"packs: found {found}; expected a list of Packs"):
            plan_step(given)


def losses_and_norms(table: list[list[list[list[int]]]]) -> list[tuple[float, float]]:
    """Of the steps of ``table[rank][step][pack]``, samples by number; a rank whose own have ended passes no packs."""
    model = laid_out() if dist.is_initialized() else any_to_any().train()
    plan_step, every, found = ot.step_planner(model), samples(), list[tuple[float, float]]()
    steps = iter(table[dist.get_rank() if dist.is_initialized() else 0])
    while (batch := plan_step([ot.Pack.from_samples([every[i] for i in pack]) for pack in next(steps, [])])).packs:
        loss = ot.accumulate_gradients(model, batch)
        if dist.is_initialized():
            dist.all_reduce(loss)
        found.append((loss.item(), ot.clip_gradients(model.parameters(), None).item()))
        model.zero_grad()
    assert batch.plan.num_micro_batches == 0
    return found


def test_ranks_with_fewer_packs_than_others_or_none_step_with_them_and_all_end_together(ranks: RankPool) -> None:
    uneven = [[[[0, 1], [2, 3], [6]], [[4]], [[5]]], [[[5]]]]  # one rank of two has three steps, of three packs at most
    expected = losses_and_norms([[[[0, 1], [2, 3], [6], [5]], [[4]], [[5]]]])
    for found in ranks.run(losses_and_norms, uneven, timeout_s=60, world=2):
        assert len(found) == 3 and np.allclose(found, expected, rtol=1e-4)


def meta_and_laid_out(folder: Path, source: str, built_from: Path | None = None, **default: int) -> ot.OmniModel:
    """With the weights of ``folder``; built on the meta device from it, or another one, as ``source`` says."""
    bare = build_omni_model(**{source: str(built_from or folder)}, init_device="meta")
    plan = ot.ParallelPlan(default=ot.ComponentPlan(**default))
    return ot.build_parallelize_model(bare, str(folder), init_state_of(plan), plan, **PLAIN)


def found_from_meta(folder: Path, damaged: Path, without: Path) -> tuple[list[tuple[float, float]], list[str]]:
    """Losses and norms of models with adapters, and refusals: of files, of adapters that are not in them."""
    own = damaged if dist.get_rank() else folder
    sources = itertools.product(("config_path", "weights_path"), (1, 2))
    found = [loss_and_norm(meta_and_laid_out(own, source, tp=tp)) for source, tp in sources]
    with pytest.raises(UserError) as told:
        meta_and_laid_out(damaged, "config_path")
    refused = [str(told.value)]
    for init_device, weights in (("meta", without), ("cpu", folder)):
        model = build_omni_model(weights_path=str(folder), init_device=init_device)
        with pytest.raises(UserError) as told:
            ot.build_parallelize_model(model, str(weights), ot.init_parallel_state(), **PLAIN)
        refused.append(str(told.value))
    return found, refused


@pytest.mark.second
def test_adapters_of_a_checkpoint_come_with_weights_path_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    folder, damaged, without = (tmp_path / name for name in ("adapted", "damaged", "plain"))
    qwen3_moe_with_adapters().save_pretrained(folder)
    shutil.copytree(folder, damaged)
    (damaged / "adapters" / "foundation" / "adapter_model.safetensors").write_bytes(b"")
    build_omni_model(foundation=qwen3_moe()).save_pretrained(without)
    expected = pytest.approx(loss_and_norm(build_omni_model(weights_path=str(folder))), rel=1e-5)
    assert expected != loss_and_norm(build_omni_model(weights_path=str(without)))
    for found, refused in ranks.run(found_from_meta, folder, damaged, without, timeout_s=60, world=2):
        assert found == [expected] * 4
        broken, other, both = refused
        assert "cannot read the adapters" in broken
        assert "found none; expected foundation (rank 3, alpha 32, 8 matrices)" in other
        assert "LoRA adapters, and weights_path would replace both" in both


def refused_for_adapters(folders: list[Path]) -> str:
    """Of the model on the meta device from this rank's folder, with the weights of rank 0's."""
    with pytest.raises(UserError) as told:
        meta_and_laid_out(folders[0], "weights_path", built_from=folders[dist.get_rank()])
    return str(told.value)


def test_adapters_that_are_not_those_of_rank_0_are_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, rank in zip(folders, (3, 2), strict=True):
        qwen3_moe_with_adapters(rank).save_pretrained(folder)
    expected = (
        "rank 1 has other LoRA adapters than rank 0: found foundation (rank 2, alpha 32, 8 matrices); expected "
        "foundation (rank 3, alpha 32, 8 matrices); build the same model on every rank"
    )
    assert ranks.run(refused_for_adapters, folders, timeout_s=60, world=2) == [expected, expected]


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
    foundation, messages = qwen3_of_four_heads(), []
    frozen = ot.ParallelPlan(default=ot.ComponentPlan(freeze=True))
    with pytest.raises((UserError, WeightsError)):
        ot.build_parallelize_model(foundation, weights_path=str(empty), parallel_plan=frozen, **PLAIN)
    model = ot.build_parallelize_model(foundation, **PLAIN)
    assert all(p.requires_grad for p in model.parameters())
    for build in (ot.build_parallelize_model, lambda m: ot.build_omni_model(foundation=m)):
        with pytest.raises(UserError, match="parallelized already") as again:
            build(foundation)
        messages.append(str(again.value))
    ot.accumulate_gradients(model, ot.step_planner(model)(packs()))
    return messages


def test_after_a_refusal_the_model_is_as_it_was_and_a_second_layout_leaves_the_first(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert [len(told) for told in ranks.run(refused_twice_then_trained, tmp_path, timeout_s=60, world=2)] == [2, 2]


def over_one_call(word: str) -> dict[str, float]:
    """Parameter of this rank -> size of its gradients over two calls without ``zero_grad``, over that of one."""
    plan = parse_layout(word).plan()
    state = init_state_of(plan)
    model = ot.build_parallelize_model(any_to_any().train(), parallel_state=state, parallel_plan=plan, **PLAIN)
    plan_step, found = ot.step_planner(model), list[dict[str, float]]()
    for _ in range(2):
        ot.accumulate_gradients(model, plan_step([ot.Pack.from_samples(samples())]))
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({name: full(gradient).norm().item() for name, gradient in trained.items()})
    return {name: found[1][name] / size for name, size in found[0].items() if size > 1e-6}


@pytest.mark.parametrize(("word", "shared"), [("tp2", "norm.weight"), ("pp2", "embed_tokens.weight")])
def test_gradients_of_several_calls_add_up_where_ranks_hold_the_same_parameters(
    ranks: RankPool, word: str, shared: str
) -> None:
    """Of an earlier call they are the same on these ranks: a sum over the ranks counted each of them, 3 for 2."""
    for found in ranks.run(over_one_call, word, timeout_s=60, world=2):
        assert any(name.endswith(shared) for name in found)
        assert found == pytest.approx(dict.fromkeys(found, 2.0), rel=1e-4)


def sizes_of_vision_experts(numbers: list[int]) -> list[float | None]:
    """Of the gradients of a step in which this rank has a pack of the sample of its number."""
    plain = ernie4_5_vl_moe()
    probes = probe_samples(plain, discover(plain))
    model = laid_out(model=plain) if dist.is_initialized() else build_omni_model(foundation=plain)
    number = numbers[dist.get_rank() if dist.is_initialized() else 0]
    ot.accumulate_gradients(model, ot.step_planner(model)([ot.Pack.from_samples([probes[number].sample])]))
    weights = [p for name, p in model.named_parameters() if "vision_moe" in name and name.endswith("proj")]
    return [None if weight.grad is None else full(weight.grad).norm().item() for weight in weights]


@pytest.mark.slow  # its contract; a layer like them in one process: tests/models/contract/test_checks_unread.py
def test_experts_that_no_sample_of_a_step_reads_have_no_gradient(ranks: RankPool) -> None:
    """As in transformers; zeros let AdamW decay them, and momentum move them further."""
    text, image = 0, 3
    assert sizes_of_vision_experts([text]) == [None, None]
    assert ranks.run(sizes_of_vision_experts, [text, text], timeout_s=60, world=2) == [[None, None]] * 2
    first, second = ranks.run(sizes_of_vision_experts, [text, image], timeout_s=60, world=2)
    assert first == second and all(size is not None and size > 1e-3 for size in first)
