"""Tensor parallel ranks with some of the tokens each between blocks: the same math, less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.collectives import gather_rows, scatter_rows
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from tests.parallel import factories
from tests.parallel.laid_out import full, laid_out
from tests.parallel.sequence.test_sequence import samples_of, text

DIVIDED = {"foundation": ot.ComponentPlan(sequence_parallel=True)}
HEADS = ("q_proj", "k_proj", "v_proj", "sinks")
BIASED = {f"layers.*.self_attn.{name}": "colwise" for name in HEADS} | {"layers.*.self_attn.o_proj": "rowwise"}


def statuses(ranks: RankPool, name: str, *plans: ot.ParallelPlan) -> str:
    report = verify(f"tests.parallel.factories:{name}", samples_of(name), plans, pool=ranks, timeout_s=240)
    return " ".join(row.reason or row.status for row in report.rows)


def plan(globs: dict[str, str] | None = None, **default: object) -> ot.ParallelPlan:
    return ot.ParallelPlan(default=ot.ComponentPlan(tp=2, **default), components=DIVIDED, tp_plan=globs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2_5_vl", "deepseek_v3", "gemma3", "qwen3_moe", "qwen3_next", "glm4_moe", "glm4v"]
)
def test_divided_tokens_train_every_family_as_one_process_does(ranks: RankPool, name: str) -> None:
    plans = [
        plan(dp_shard=1),
        plan(dp_shard=2, memory={"recompute": "full"}),
        plan(dp_shard=1, ulysses=2, memory={"recompute": "full"}),
    ]
    assert statuses(ranks, name, *plans) == "equal equal equal"


def test_divided_tokens_train_as_one_process_does(ranks: RankPool) -> None:
    """With experts and a bias behind the sum."""
    assert statuses(ranks, "gpt_oss", plan(BIASED, dp_shard=1, memory={"recompute": "full"})) == "equal"


def kept(name: str, divide: bool) -> tuple[int, str]:
    """Bytes that a forward keeps on this rank beside parameters, each storage once; and what the table says."""
    components = {"foundation": {"sequence_parallel": divide}}
    model = laid_out(
        {"memory": {"recompute": "full"}}, components, {"tp_size": 2}, model=getattr(factories, name)().train()
    )
    batch = step_planner(model)([Pack.from_samples([text(400)])])
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.runner.text_loss(EncodedPack(batch.packs[0])).text
    loss.sum.backward()  # FSDP and a graph without a backward keep each other
    (row,) = (row for row in ot.parallel.layout_of(model).table(model) if row.name == "foundation")
    return sum(sizes.values()), row.sequence


def test_blocks_keep_the_tokens_of_their_rank_alone(ranks: RankPool) -> None:
    (whole, said), (divided, says) = (
        ranks.run(kept, "qwen3", flag, timeout_s=60, world=2)[0] for flag in (False, True)
    )
    block_inputs = 2 * 400 * 64 * 4  # layers, tokens, width, bytes
    assert whole - divided == pytest.approx(block_inputs / 2, rel=0.1)
    assert (said, says) == ("whole", "tokens divided over tp")


def test_code_between_blocks_that_knows_tokens_keeps_them_whole_and_the_table_says_so(ranks: RankPool) -> None:
    (_, said), _ = ranks.run(kept, "qwen3_omni_moe_thinker", True, timeout_s=60, world=2)
    assert said.startswith("tokens whole on each tp rank: on a tiny model, it does not run: IndexError")


def gradients(divide: bool, skip: bool) -> dict[str, Tensor]:
    """Of two samples, few of whose rows are read."""
    model = build_omni_model(foundation=factories.qwen3()).train()
    assert not skip or model.runner.skip_unread_rows()["Qwen3MLP"] == 1
    laid_out({}, {"foundation": {"sequence_parallel": divide}}, {"tp_size": 2}, model=model)
    samples = [text(37, 0), text(11, 1)]
    samples[0].loss_mask[:] = np.isin(np.arange(37), (5, 6, 20, 36))
    ot.accumulate_gradients(model, step_planner(model)([Pack.from_samples(samples)]))
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def test_rows_that_nobody_reads_are_left_out_of_divided_tokens_too(ranks: RankPool) -> None:
    (expected, _), (found, _) = (ranks.run(gradients, on, on, timeout_s=60, world=2) for on in (False, True))
    assert found.keys() == expected.keys()
    errors = [float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items()]
    assert max(errors) < 5e-6


def transposed() -> tuple[float, float]:
    """<scatter(x), y> and <x, gather(y)>, added up over ranks."""
    state = ot.init_parallel_state(tp_size=2)
    group, counts = state.tp_mesh.get_group(), [3, 1]
    generator = torch.Generator().manual_seed(state.rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.randn(counts[state.rank], 5, generator=generator, dtype=torch.float64)
    forward = (scatter_rows(x, counts, group) * y).sum()
    forward.backward()
    sums = torch.stack([forward.detach(), (x.detach() * gather_rows(y, counts, group)).sum()])
    torch.distributed.all_reduce(sums)
    assert torch.equal(x.grad, gather_rows(y, counts, group))
    return float(sums[0]), float(sums[1])


def test_scattering_rows_is_the_transpose_of_gathering_them(ranks: RankPool) -> None:
    for scattered, gathered in ranks.run(transposed, timeout_s=60, world=2):
        assert scattered == pytest.approx(gathered, rel=1e-12)
