"""Samples for the model's own forward on some ranks, while others have only text."""

from __future__ import annotations

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.foundation.in_forward import ForwardReader
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fsdp.units import find_units
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from tests.in_forward import omni, phi4_model, qwen2_audio_model, row
from tests.parallel import factories
from tests.parallel.laid_out import gradients, laid_out


def batch(family: str, *turns: tuple[str, ...]) -> list[Sample]:
    """Ranks take turns, so every second sample is one rank's."""
    processor = omni(family)[1]
    return [processor.sample(row(*own), index) for index, own in enumerate(turns)]


@pytest.mark.second
def test_a_text_only_rank_gives_the_gradients_of_one_process(ranks: RankPool) -> None:
    samples = batch("qwen2_audio", ("a+what?", "A"), ("hi", "B c"), ("a+a+and", "C"), ("you", "D"))
    report = verify(qwen2_audio_model, samples, ["dp2", "tp2", "sp2"], nproc=2, pool=ranks)
    data, tensor, sequence = report.rows
    assert (data.status, tensor.status) == ("equal", "equal"), report
    assert sequence.status == "refused"
    assert (
        "the forward of Qwen2AudioForConditionalGeneration reads its media, and needs the whole pack" in sequence.reason
    )


@pytest.mark.slow
def test_ranks_with_media_of_several_kinds_give_the_gradients_of_one_process(ranks: RankPool) -> None:
    samples = batch("phi4_multimodal", ("i+what?", "A"), ("a+what?", "B"), ("i+a+and", "C"), ("you", "D"))
    report = verify(phi4_model, samples, ["dp2.recompute", "dp2.bf16", "dp2.bf16_param"], nproc=2, pool=ranks)
    assert {row.status for row in report.rows} == {"equal"}, report


@pytest.mark.slow
def test_texts_of_a_model_that_reads_media_in_its_own_forward_train_in_stages(ranks: RankPool) -> None:
    """What only media reach has gradients of zeros, but not on a stage that does not hold it."""
    samples = batch("phi4_multimodal", ("you", "D"), ("and me", "E f"))
    (found,) = verify(phi4_model, samples, ["pp2.accum2"], nproc=2, pool=ranks).rows
    assert found.status == "equal", found


def test_towers_are_gathered_with_the_foundation() -> None:
    model, _ = omni("qwen2_audio")
    units = find_units(model)
    assert units.keys() == {"foundation"}
    assert units["foundation"].all == (
        "foundation.model.language_model.layers.0",
        "foundation.model.language_model.layers.1",
        "foundation",
    )


def zeros_beside_cut_matrices(norms: str) -> dict[str, torch.Tensor]:
    """Gradients of a cut model, in layers of which text reaches all; ``norms``: all but these, by what a check said."""
    model = build_omni_model(foundation=factories.qwen3()).train()
    if norms:
        model.runner.in_forward = ForwardReader(model.foundation, ("image",), (norms,))
    laid_out(model=model, state={"tp_size": 2})
    before = Pack.from_samples([probe.sample for probe in probe_samples(model.foundation, model.runner.native)])
    model(before).losses["text"].sum.backward()
    return gradients(model)


def test_zeros_for_a_matrix_that_ranks_share_are_cut_as_it_is(ranks: RankPool) -> None:
    found, expected = (
        ranks.run(zeros_beside_cut_matrices, norms, world=2, timeout_s=120)[0]
        for norms in ("model.layers.*.self_attn.q_norm", "")
    )
    assert found.keys() == expected.keys() and all(found[name].any() for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


def gradients_of_turns(family: str, *turns: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Names of parameters with a gradient after a step, of a rank with every second sample and in one process."""
    samples = batch(family, *turns)
    plain = omni(family)[0].train()
    for sample in samples:
        plain(Pack.from_samples([sample])).losses["text"].sum.backward()
    model = laid_out(model=omni(family)[0].train())
    own = [Pack.from_samples([sample]) for sample in samples[torch.distributed.get_rank() :: 2]]
    accumulate_gradients(model, step_planner(model)(own))
    found = [{n for n, p in every.named_parameters() if p.grad is not None} for every in (model, plain)]
    return found[0], found[1]


@pytest.mark.parametrize("first", ["hi", "a+what?"])
def test_what_no_sample_of_any_rank_reaches_has_no_gradient(ranks: RankPool, first: str) -> None:
    """Zeros in place of no gradient would let AdamW decay a tower in steps without its media."""
    turns = (first, "B c"), ("you", "D")
    for found, expected in ranks.run(gradients_of_turns, "phi4_multimodal", *turns, world=2, timeout_s=120):
        assert found == expected
        assert any(".audio_embed." in name for name in found) is (first != "hi")
        assert not any(".image_embed." in name for name in found)


def in_half_precision(kind: str) -> tuple[float, bool]:
    """Loss and whether the tower got a gradient, of a rank that computes in bf16."""
    model = laid_out(model=omni("qwen2_audio")[0].train(), enable_mixed_precision=True)
    turns = {"audio": ("a+what?", "A"), "text": ("hi", "B")}
    own = kind if torch.distributed.get_rank() == 0 else "text"
    output = model(Pack.from_samples(batch("qwen2_audio", turns[own])))
    output.losses["text"].sum.backward()
    tower = [grad for name, grad in gradients(model).items() if "audio_tower" in name]
    return float(output.losses["text"].sum), any(bool(grad.any()) for grad in tower)


def test_what_a_processor_gives_in_fp32_meets_weights_in_bf16(ranks: RankPool) -> None:
    found = ranks.run(in_half_precision, "audio", world=2, timeout_s=120)
    assert [reached for _, reached in found] == [True, True]
    assert all(0 < loss < 100 for loss, _ in found)
