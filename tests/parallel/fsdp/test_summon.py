from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.units import gathered
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from tests.tiny import tiny_model, tiny_processor, tiny_samples

BLOCKS = (
    "foundation.model.layers.",
    "image_encoder.tower.encoder.layers.",
    "audio_encoder.tower.layers.",
)
ENCODER = "image_encoder.projector.layers.1.weight"


def sharded_model(full_shard: bool = True) -> tuple[OmniModel, Pack]:
    model = build_parallelize_model(
        tiny_model().eval(),
        parallel_state=init_parallel_state(),
        enable_full_shard=full_shard,
        enable_mixed_precision=False,
    )
    return model, Pack.from_samples(tiny_samples(tiny_processor(model), 7))


def sharded(model: OmniModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


def loss_of(model: OmniModel, pack: Pack) -> torch.Tensor:
    return model(pack).losses["text"].sum


@torch.no_grad()
def use_outside_of_forward(full_shard: bool) -> dict[str, Any]:
    model, pack = sharded_model(full_shard)
    everything, before = sharded(model), loss_of(model, pack).item()
    in_blocks = {name for name in everything if name.startswith(BLOCKS)}
    seen: dict[str, Any] = {"in blocks": len(in_blocks), "elsewhere": len(everything) - len(in_blocks)}
    with gathered(model):
        seen["at first"] = len(in_blocks & sharded(model)), len(sharded(model) - in_blocks)
        if dist.get_rank() == 0:  # a collective here would be one that the other rank does not issue
            hidden = model.foundation.get_input_embeddings()(torch.tensor([5]))
            model.foundation.get_output_embeddings()(hidden)
            model.image_encoder.projector.layers[1]
            model.image_decoder.lm_embed(hidden[:, None], lambda logits: logits.argmax(-1))
            model.audio_decoder.lm_generate([3, 4])
        seen["same loss"] = loss_of(model, pack).item() == before
        seen["after a forward"] = len(in_blocks & sharded(model)), len(sharded(model) - in_blocks)
    seen["all sharded again"] = sharded(model) == everything
    loss_of(model, pack)
    seen["encoder sharded by its own forward"] = ENCODER in sharded(model)
    return seen


@pytest.mark.parametrize("full_shard", [False, True])
def test_inside_only_blocks_are_sharded_and_one_rank_alone_may_use_the_rest(ranks: RankPool, full_shard: bool) -> None:
    for seen in ranks.run(use_outside_of_forward, full_shard, world=2, timeout_s=120):
        blocks = seen["in blocks"] if full_shard else 0
        assert seen["in blocks"] > 30 and seen["elsewhere"] > 30
        assert seen["at first"] == seen["after a forward"] == (blocks, 0)
        assert seen["same loss"] and seen["all sharded again"]
        assert seen["encoder sharded by its own forward"] == full_shard


def fail_inside() -> list[Any]:
    model, pack = sharded_model()
    everything, loss = sharded(model), loss_of(model, pack).item()
    hook = model.foundation.model.layers[1].register_forward_pre_hook(_fail)
    seen: list[Any] = []
    try:
        with gathered(model):
            loss_of(model, pack)
    except KeyError as error:
        seen.append(str(error))
    hook.remove()
    seen.append(sharded(model) == everything)
    loss_of(model, pack).backward()
    return [*seen, sharded(model) == everything, loss_of(model, pack).item() == loss]


def _fail(*_: Any) -> None:
    raise KeyError("inside")


def test_an_error_inside_leaves_a_model_that_is_sharded_and_trains(ranks: RankPool) -> None:
    for seen in ranks.run(fail_inside, world=2, timeout_s=120):
        assert seen == ["'inside'", True, True, True]
