"""Encoders on all pipeline ranks: losses, gradients and weights of one process, and each item encoded once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.step.windows import window_chooser
from omnitrain.plan.schedule.actions import Action
from omnitrain.recipe.layout import parse_layout
from tests.parallel.laid_out import PLAIN, gradients
from tests.parallel.schedule.pipelines import build
from tests.parallel.schedule.test_layouts import require_equal, samples_of


@pytest.mark.slow
def test_encoders_on_all_ranks_of_two_pipelines_train_as_one_process(ranks: RankPool) -> None:
    require_equal(ranks, "qwen3_vl_moe", ["pp2.dp2.ep2.world", "pp2.v2.dp2.accum4.window2.world"])


@pytest.mark.slow
def test_items_of_several_micro_batches_are_divided_without_a_pipeline(ranks: RankPool) -> None:
    require_equal(ranks, "qwen3_vl", ["dp2.accum4.window2.world", "sp2.accum2.window2.group"])


def parallelized(layout: str, encoder: Mapping[str, Any]) -> ot.OmniModel:
    """Qwen3-VL with experts under a layout, whose image encoder has the fields of ``encoder``."""
    plan = parse_layout(layout).plan()
    degrees = {"pp": "pp", "dp_shard": "dp_shard", "ulysses": "ulysses", "ep": "ep"}
    ot.init_parallel_state(**{f"{key}_size": getattr(plan.default, field) for key, field in degrees.items()})
    plan = plan.model_copy(update={"components": {"image_encoder": ot.ComponentPlan(**encoder)}})
    model = build("qwen3_vl_moe")
    return ot.build_parallelize_model(model.train(), parallel_plan=plan, **PLAIN)


def encoded_patches(layout: str, drawn: list[list[int]]) -> tuple[int, int]:
    """Patches that this rank's tower encoded, and those of minimal inputs among them; ``drawn``: samples of packs."""
    model = parallelized(layout, {})
    rows: list[int] = []
    tower = model.foundation.model.visual.blocks[0]
    tower.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    samples = samples_of("qwen3_vl_moe")
    batch = step_planner(model)([Pack.from_samples([samples[index] for index in pack]) for pack in drawn])
    accumulate_gradients(model, batch)
    state = ot.get_parallel_state()
    plan, names = batch.plan, batch.plan.topology.media
    calls = [c for k in range(plan.num_micro_batches) for c in plan.calls_of(state.rank, "image_encoder", k)]
    minimal = [names[call.call_site] for call in calls if not call.items]
    return sum(rows), sum(len(model.minimal_input(name)[0][KEYS[name]]) for name in minimal)


KEYS = {"foundation.image": "pixel_values", "foundation.video": "pixel_values_videos"}


def test_each_item_is_encoded_once_and_all_stages_take_part(ranks: RankPool) -> None:
    samples = samples_of("qwen3_vl_moe")
    drawn = [[index for index, sample in enumerate(samples) if sample.spans], [0], list(range(len(samples)))]
    held = sum(
        len(span.item.features[KEYS[span.component]])
        for pack in drawn
        for index in pack
        for span in samples[index].spans
    )
    found = ranks.run(encoded_patches, "pp2.world", drawn, timeout_s=60, world=2)
    assert held > 0 and sum(rows - minimal for rows, minimal in found) == held
    assert all(rows - minimal > held / 4 for rows, minimal in found)


def gradients_of(layout: str, encoder: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model = parallelized(layout, encoder)
    samples = samples_of("qwen3_vl_moe")
    batch = step_planner(model)([Pack.from_samples(samples[k:]) for k in range(4)])
    accumulate_gradients(model, batch)
    return gradients(model)


@pytest.mark.second
def test_each_stage_has_copies_of_an_encoder_with_degrees_of_its_own(ranks: RankPool) -> None:
    of_first, of_last = [[], []]
    for encoder in ({"place": "world"}, {"place": "world", "mode": "replicate"}):
        first, _, _, last = ranks.run(gradients_of, "pp2.dp2", encoder, timeout_s=60, world=4)
        of_first.append(first)
        of_last.append(last)
    for sharded, copied in (of_first, of_last):
        assert sharded.keys() == copied.keys() and any("visual" in name for name in copied)
        for name, gradient in sharded.items():
            torch.testing.assert_close(copied[name], gradient, rtol=1e-5, atol=1e-6)


def require_same_bits(ranks: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    for before, after in zip(ranks, others, strict=True):
        assert before.keys() == after.keys() and any("visual" in name for name in before)
        assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.slow
def test_pairs_change_no_bit_of_separate_encoders(ranks: RankPool) -> None:
    layouts = ("pp2.v2.dp2.ep2.world", "pp2.v2.dp2.ep2.paired.world")
    require_same_bits(*(ranks.run(gradients_of, layout, {}, timeout_s=60, world=4) for layout in layouts))


@pytest.mark.slow  # by default they train as one process (test_separate.py)
def test_features_that_wait_in_host_memory_have_the_same_bits(ranks: RankPool) -> None:
    settings = [{"place": "world", "encode": {"window": 2, "features_on": memory}} for memory in ("device", "cpu")]
    require_same_bits(*(ranks.run(gradients_of, "pp2", encoder, timeout_s=60, world=2) for encoder in settings))


def parameters_of_auto() -> tuple[dict[str, int], int, int]:
    """What ``window: auto`` counts, all parameters of the foundation, and those of experts that a token passes by."""
    model = parallelized("pp2", {"place": "world", "encode": {"window": "auto"}})
    chooser, config = window_chooser(model), model.foundation.config.text_config
    assert chooser is not None
    experts = [w.numel() for _, layer in experts_in(model.foundation) for w in layer.parameters(recurse=False)]
    embeddings = model.foundation.get_input_embeddings().weight.numel()
    passed_by = sum(experts) * (config.num_experts - config.num_experts_per_tok) // config.num_experts
    whole = sum(weight.numel() for weight in model.components["foundation"].values())
    return chooser.num_parameters, whole, passed_by + embeddings


def test_auto_counts_the_chosen_experts_alike_on_all_ranks(ranks: RankPool) -> None:
    (counts, whole, unread), other = ranks.run(parameters_of_auto, timeout_s=60, world=2)
    assert (counts, whole, unread) == other
    assert 0 < whole - unread - counts["foundation"] < 0.01 * whole  # the last norm
    assert unread > 0.2 * whole


def limited_gradients(limit: int | None, window: int | str) -> tuple[dict[str, torch.Tensor], int, int | None]:
    """Gradients, the most bytes of features that waited on this rank, and the window of the step."""
    model = parallelized("pp2", {"place": "world", "encode": {"window": window, "feature_bytes": limit}})
    samples, most = samples_of("qwen3_vl_moe"), 0
    batch = step_planner(model)([Pack.from_samples(samples[k % 4 :]) for k in range(6)])
    exchange = StepGraph.exchange

    def noted(self: StepGraph, action: Action) -> None:
        nonlocal most
        exchange(self, action)
        most = max(most, self.waiting_bytes("image_encoder"))

    with patch.object(StepGraph, "exchange", noted):
        accumulate_gradients(model, batch)
    return gradients(model), most, batch.plan.topology.component("image_encoder").window


def refusal(limit: int) -> str:
    """What the user reads. It is raised on the ranks and caught there, so that they stay warm."""
    with pytest.raises(UserError) as error:
        limited_gradients(limit, 2)
    return str(error.value)


def test_features_that_wait_stay_within_their_limit_of_bytes(ranks: RankPool) -> None:
    """A step has the largest windows that fit; the gradients are the same but for the order of their sums."""
    free = ranks.run(limited_gradients, None, "step", timeout_s=60, world=2)
    most, limit = free[0][1], free[0][1] * 3 // 4
    limited = ranks.run(limited_gradients, limit, "auto", timeout_s=60, world=2)
    assert [window for *_, window in free] == [None, None] and free[1][1] == 0
    assert limited[0][2] in (1, 2, 3) and limited[0][2] == limited[1][2] and 0 < limited[0][1] <= limit < most
    for (found, *_), (expected, *_) in zip(limited, free, strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    refused = r"image_encoder.encode.feature_bytes: found 100, but one item has \d+ features of"
    assert all(re.search(refused, message) for message in ranks.run(refusal, 100, timeout_s=60, world=2))


def memory_that_waits() -> list[tuple[int, int]]:
    """After each backward of a micro-batch: bytes of features and gradients that wait, and of the memory they keep."""
    model = parallelized("dp1", {"place": "world", "encode": {"window": 4}})
    batch = step_planner(model)([Pack.from_samples(samples_of("qwen3_vl_moe")) for _ in range(4)])
    take, found = StepGraph.take_gradients, []

    def noted(self: StepGraph, micro_batch: int) -> None:
        take(self, micro_batch)
        kinds = [
            kind for w in self._nodes["image_encoder"].windows.values() for kind in (w.held, w.leaves, w.gradients)
        ]
        tensors = [tensor for kind in kinds for tensors in kind.values() for tensor in tensors]
        memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        found.append((self.waiting_bytes("image_encoder"), sum(memory.values())))

    with patch.object(StepGraph, "take_gradients", noted):
        accumulate_gradients(model, batch)
    return found


def test_features_of_a_micro_batch_keep_no_memory_of_the_others_in_their_window(ranks: RankPool) -> None:
    (found,) = ranks.run(memory_that_waits, timeout_s=60, world=1)
    assert len(found) == 4 and all(0 < waiting == memory for waiting, memory in found)


def waiting_tensors(freeze: bool) -> int:
    """Features and gradients that wait in a step of one rank."""
    model = parallelized("dp1", {"place": "world", "encode": {"window": 2}, "freeze": freeze})
    batch = step_planner(model)([Pack.from_samples(samples_of("qwen3_vl_moe")) for _ in range(2)])
    with patch.object(StepGraph, "_waiting_there", autospec=True, side_effect=StepGraph._waiting_there) as waiting:
        accumulate_gradients(model, batch)
    return sum(len(call.args[2]) for call in waiting.call_args_list)


def test_no_gradients_wait_for_a_frozen_encoder(ranks: RankPool) -> None:
    (trained,), (frozen,) = (ranks.run(waiting_tensors, freeze, timeout_s=60, world=1) for freeze in (False, True))
    assert trained == 2 * frozen > 0
