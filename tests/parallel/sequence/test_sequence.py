"""The tokens of a sequence on several ranks: losses and gradients are those of the whole sequence on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from tests.parallel import factories
from tests.parallel.laid_out import laid_out, samples
from tests.tiny import tiny_processor, tiny_samples

FAMILIES = (
    "any_to_any",
    "qwen3_vl",
    "gemma3",
    "internvl",
    "deepseek_v3",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "qwen2_5_vl",
    "qwen3_5",
    "glm4v",
    "llama4",
    "llava_onevision",
)
LAYOUTS = ["dp2.sp2.accum2.recompute", "sp4", "sp2.cp2.accum2.recompute", "cp2", "hsdp2x1.sp2.accum2", "hsdp1x2.sp2"]


def samples_of(name: str) -> list[Sample]:
    """Text alone, each modality, several together."""
    if name == "any_to_any":
        return samples()
    foundation = getattr(factories, name)()
    if isinstance(foundation, ot.OmniModel):
        tasks = ("text", "image_to_text", "video_to_text", "images_to_text")
        return tiny_samples(tiny_processor(foundation), len(tasks), tasks)
    native = build_omni_model(foundation=foundation).runner.native
    return [probe.sample for probe in probe_samples(foundation, native)]


def check(ranks: RankPool, name: str, layouts: list[str]) -> None:
    report = verify(f"tests.parallel.factories:{name}", samples_of(name), layouts, pool=ranks, timeout_s=240)
    assert {row.status for row in report.rows} == {"equal"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_to_share_a_sequence_trains_a_family_as_one_process_does(ranks: RankPool, name: str) -> None:
    check(ranks, name, LAYOUTS)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("any_to_any", "sp2.accum2.recompute", id="heads that predict", marks=pytest.mark.second),
        pytest.param("gemma3", "sp2.recompute", id="blocks of image tokens", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "sp2", id="linear attention", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "cp2", id="deepstack on a ring"),
        pytest.param("llava_onevision", "sp2", id="images as a list, videos as a tensor", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_sequence_train_as_one_process_does(ranks: RankPool, name: str, layout: str) -> None:
    check(ranks, name, [layout])


def errors(model: ot.OmniModel, state: ot.parallel.ParallelState, pack: Pack) -> tuple[float, float]:
    """Of loss and gradients over all losses, relative to those of the whole pack on one rank."""
    (whole, expected), (own, got) = (
        _losses_and_gradients(model, EncodedPack(pack, sequence_slice=own))
        for own in (None, slice_of(state, pack.num_tokens, torch.device("cpu")))
    )
    for tensor in (own, *got.values()):
        dist.all_reduce(tensor)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    error = float(torch.stack([(got[name] - gradient).abs().max() for name, gradient in expected.items()]).max())
    return abs(float(own - whole)) / max(abs(float(whole)), 1e-30), error / max(scale, 1e-30)


def _losses_and_gradients(model: ot.OmniModel, encoded: EncodedPack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = torch.stack([term.sum for term in model(encoded).losses.values()]).sum()
    total.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return total.detach(), gradients


def errors_of_packs(name: str, packs: Sequence[Sequence[Sample]], degrees: dict[str, int]) -> list[tuple[float, float]]:
    model = getattr(factories, name)()
    model = (model if isinstance(model, ot.OmniModel) else build_omni_model(foundation=model)).train()
    state = ot.init_parallel_state(**degrees)
    return [errors(model, state, Pack.from_samples(together)) for together in packs]


def text(length: int, index: int = 0) -> Sample:
    ids = np.random.default_rng(length).integers(5, 60, length)
    return Sample(
        str(index), "text", ids, np.arange(length) > 0, np.arange(length), index=index, token_inputs={}, spans=()
    )


@pytest.mark.parametrize(
    ("world", "degrees", "lengths"),
    [
        pytest.param(2, {"ulysses_size": 2}, (*range(1, 18), 33, 64, 97), id="sp2"),
        pytest.param(2, {"ulysses_size": 2}, range(18, 97), id="sp2, longer", marks=pytest.mark.slow),
        pytest.param(
            4, {"cp_size": 2, "ulysses_size": 2}, (*range(1, 7), 31, 97), id="sp2.cp2", marks=pytest.mark.second
        ),
    ],
)
def test_rows_of_every_length_are_shared_exactly(
    ranks: RankPool, world: int, degrees: dict[str, int], lengths: Sequence[int]
) -> None:
    """Of one token, of fewer than ranks, of lengths that nothing divides; two samples where there is room for them."""
    packs = [[text(n)] if n < 7 else [text(n // 3, 0), text(n - n // 3, 1)] for n in lengths]
    results = ranks.run(errors_of_packs, "qwen3", packs, degrees, timeout_s=120, world=world)
    assert len(results[0]) == len(packs)
    assert all(error < 1e-5 for pair in results[0] for error in pair)


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3_vl", id="deepstack"), pytest.param("gemma3", id="one block", marks=pytest.mark.second)],
)
def test_a_cut_may_go_through_an_image_anywhere(ranks: RankPool, name: str) -> None:
    sample = next(sample for sample in samples_of(name) if len(sample.spans) == 1)
    size = len(sample)
    around = [[], *([before, *behind] for before in range(2, size) for behind in ([], [size + 1], [size + 2]))]
    packs = {}  # in a pack, shorter samples come first; the cut is in its middle
    for lengths in around:
        cut = (size + sum(lengths) + 1) // 2 - sum(length for length in lengths if length < size)
        packs[cut] = [*(like(sample, length, index=100 + length) for length in lengths), sample]
    inside = sample.spans[0].positions.tolist()
    assert set(inside) <= packs.keys()
    near = [packs[cut] for cut in (*inside, inside[-1] + 1) if cut in packs]
    results = ranks.run(errors_of_packs, name, near, {"ulysses_size": 2}, timeout_s=120, world=2)
    assert all(error < 1e-5 for pair in results[0] for error in pair)


def like(sample: Sample, length: int, index: int) -> Sample:
    """Text that can share a pack with ``sample``."""
    positions = np.broadcast_to(np.arange(length), (*sample.position_ids.shape[:-1], length)).copy()
    token_inputs = {name: np.zeros(length, dtype=values.dtype) for name, values in sample.token_inputs.items()}
    return replace(text(length, index), position_ids=positions, token_inputs=token_inputs)


@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"ulysses_size": 4}, id="sp4"), pytest.param({"cp_size": 2}, id="cp2", marks=pytest.mark.second)],
)
def test_linear_attention_is_divided_by_heads(ranks: RankPool, degrees: dict[str, int]) -> None:
    """Of which four ranks have one each; in the other family there are two, and each rank computes them all."""
    packs, world = [[text(5, 0), text(23, 1)], [text(3, 2)]], max(2, *degrees.values())
    for name in ("grouped_linear_heads", "qwen3_next"):
        results = ranks.run(errors_of_packs, name, packs, degrees, timeout_s=120, world=world)
        assert all(error < 1e-5 for pair in results[0] for error in pair)


def encoded_by(table: Sequence[Sequence[Sample]]) -> tuple[list[int], int]:
    """Cost of the images that each rank encodes, and that of all images."""
    model = laid_out(state={"ulysses_size": 2})
    drawn = table[ot.get_parallel_state().dp_rank]
    plan = step_planner(model)([Pack.from_samples(drawn)]).plan
    return plan.loads("image_encoder")[0].tolist(), int(plan.cost[plan.slot < len(plan.topology.media)].sum())


def test_ranks_that_share_a_sequence_share_its_images_and_encode_each_once(ranks: RankPool) -> None:
    image = samples("image_to_text")[0]
    two, one = [replace(image, index=index) for index in (0, 1)], [image]
    results = ranks.run(encoded_by, [two, one], timeout_s=60)
    (loads, _), *others = results
    assert all(other == results[0] for other in others)
    assert loads[0] == loads[1] == max(loads) > 0 and sorted(loads[2:]) == [0, loads[0]]


def test_heads_that_the_ranks_do_not_divide_are_refused_with_the_degrees_that_do(ranks: RankPool) -> None:
    report = verify("tests.parallel.factories:qwen3", [text(9)], ["sp3"], nproc=3, pool=ranks)
    (row,) = report.rows
    assert row.status == "refused" and "3 ranks cannot share 4 heads equally; 1, 2, 4 can" in row.reason
