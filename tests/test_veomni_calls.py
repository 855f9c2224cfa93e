"""Calls as VeOmni's paper prints them (arXiv:2508.02317, appendix B) work, or the error says the equal call."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import omnitrain as ot
from omnitrain.data import OmniDataCollatorWithPacking, build_dataloader
from omnitrain.errors import UserError
from omnitrain.models import build_omni_model
from omnitrain.parallel.state import forget_parallel_state
from tests.data.render.test_packing_collator import features_of, native_of
from tests.tiny import FOUNDATION

PER_TOKEN = ["input_ids", "attention_mask", "labels", "position_ids", "mm_token_type_ids"]
IN_PAPER = [f"{medium}_{way}_mask" for medium in ("image", "video", "audio") for way in ("input", "output")]


@pytest.fixture
def state() -> Iterator[ot.parallel.ParallelState]:
    """The state as the paper's listing 5 asks for it."""
    sizes = {f"{axis}_size": 1 for axis in ("dp", "dp_replicate", "dp_shard", "tp", "ep", "pp", "ulysses")}
    ot.init_parallel_state(**sizes, dp_mode="fsdp2")  # type: ignore[arg-type]
    yield ot.get_parallel_state()
    forget_parallel_state()
    dist.destroy_process_group()


def test_a_collator_with_named_features_and_a_loader_of_a_dataset_make_packs() -> None:
    rows = features_of("qwen2_vl")
    collate = OmniDataCollatorWithPacking(
        native_of(), packing_features=PER_TOKEN, concat_features=["pixel_values", "image_grid_thw"]
    )
    sizes = {"micro_batch_size": 3, "global_batch_size": 3, "shuffle": False}
    ((pack,),) = list(build_dataloader(dataset=rows, collate_fn=[collate], **sizes))
    assert torch.equal(pack.input_ids, OmniDataCollatorWithPacking(native_of())(rows).input_ids)
    groups = [group for batch in pack.inputs.values() for group in batch.groups]
    assert sum(len(group.features["pixel_values"]) for group in groups) == sum(
        len(row.get("pixel_values", ())) for row in rows
    )


@pytest.mark.parametrize(
    "features",
    [
        {"packing_features": [*PER_TOKEN[:4], *IN_PAPER]},
        {"concat_features": [name.replace("mask", "features") for name in IN_PAPER]},
    ],
)
def test_features_of_veomnis_models_are_answered_by_the_equal_call(features: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"does not take 'image_input_.*'; pass `model\.native_inputs` in place of both"
    ):
        OmniDataCollatorWithPacking(**features)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"dataset": [1], "dyn_bsz": True, "max_seq_len": 64},
            "dyn_bsz, max_seq_len: arguments of another library; .* pa",
        ),
        (
            {"dataset": [1], "micro_batch_size": 1, "collate_fn": [len, len]},
            "collate_fn: found .* a list with one such",
        ),
        ({"micro_batch_size": 1}, r"expected the `data` of a recipe, or a dataset \(`dataset=`\)"),
    ],
)
def test_other_arguments_of_the_loader_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_dataloader(**options)


def test_a_model_is_built_from_its_parts() -> None:
    model = build_omni_model(
        config_path=None, weights_path=None, encoders={}, decoders={}, foundation=FOUNDATION, init_device="meta"
    )
    assert isinstance(model, ot.OmniModel) and next(model.parameters()).is_meta


def test_the_state_has_the_meshes_and_groups_of_the_listing(state: ot.parallel.ParallelState) -> None:
    assert (state.dp_mesh.size(), dist.get_world_size(state.dp_group), state.dp_shard_rank) == (1, 1, 0)
    assert dist.get_world_size(state.ulysses_group) == 1 and not state.ulysses_enabled
    query = torch.arange(48.0).view(2, 3, 4, 2)
    whole = ot.gather_seq_scatter_heads(query, seq_dim=1, head_dim=2, group=state.ulysses_group)
    assert torch.equal(ot.gather_heads_scatter_seq(whole, seq_dim=1, head_dim=2, group=state.ulysses_group), query)
    with pytest.raises(UserError, match=r"dp_mode is 'ddp'; expected one of .*; DDP is replicate"):
        ot.init_parallel_state(dp_mode="ddp")  # type: ignore[arg-type]


def test_a_plan_of_experts_is_a_plan() -> None:
    projections = [f"model.layers.*.mlp.experts.{part}_proj" for part in ("gate", "up", "down")]
    assert ot.ParallelPlan(ep_plan=dict.fromkeys(projections, Shard(0))).ep_plan == dict.fromkeys(projections, 0)


@pytest.mark.parametrize(("package", "shared"), [("models", 3), ("data", 4)])
def test_a_name_of_a_package_that_is_also_at_the_top_is_the_same(package: str, shared: int) -> None:
    module = importlib.import_module(f"omnitrain.{package}")
    both = {*module.__all__} & {*ot.__all__}
    assert len(both) == shared and all(getattr(module, name) is getattr(ot, name) for name in both)
    with pytest.raises(AttributeError, match=rf"module 'omnitrain\.{package}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("models", "build_tokenizer", r"AutoTokenizer\.from_pretrained"),
        ("models", "save_model_weights", r"model\.save_pretrained\(folder\)"),
        ("data", "build_dataset", r"ot\.data\.open_sources\("),
        ("data", "OmniSequenceShardCollator", r"ot\.step_planner\(model\)"),
    ],
)
def test_a_name_that_veomni_has_besides_is_answered(package: str, name: str, words: str) -> None:
    with pytest.raises(ImportError, match=rf"omnitrain\.{package} has no {name}: .*{words}"):
        exec(f"from omnitrain.{package} import {name}")
