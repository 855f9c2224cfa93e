from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.discovery import discover
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.reference import Alone, Noise, reference
from omnitrain.parallel.verify.run import Outcome
from omnitrain.parallel.verify.verify import VerifyReport, _compared, verify
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from tests.parallel import factories
from tests.tiny import TASKS, tiny_processor, tiny_samples

ROOT = Path(__file__).parents[3]
DATA_PARALLEL = ["dp2", "dp4", "hsdp2x2", "replicate2", "dp2.accum2.recompute"]
TENSOR_FAMILIES = (
    "qwen3",
    "qwen3_vl",
    "gemma3",
    "internvl",
    "deepseek_v3",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "qwen3_5",
)
FAMILIES = ("qwen3_vl", "gemma3", "internvl", "deepseek_v3", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


QWEN_GLOBS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
    "embed_tokens": "embedding_rowwise",
    "visual.blocks.*.mlp.linear_fc1": "colwise",
    "visual.blocks.*.mlp.linear_fc2": "rowwise",
    "visual.blocks.*.attn.qkv": "colwise_gather_output",
    "visual.blocks.*.attn.proj": "rowwise_split_input",
}


def cut_by_globs(layout: str) -> ParallelPlan:
    """A layout of a model that comes without a tensor parallel plan; its tower is cut, too."""
    return parse_layout(layout).plan().model_copy(update={"tp_plan": QWEN_GLOBS})


def check(ranks: RankPool, name: str, samples: list, layouts: Sequence[str | ParallelPlan]) -> None:
    report = verify(f"tests.parallel.factories:{name}", samples, layouts, pool=ranks, timeout_s=120)
    assert report.ok and {row.status for row in report.rows} == {"equal"}, str(report)
    assert all(row.collectives > 0 for row in report.rows)


def hf_samples(name: str) -> list[dict[str, torch.Tensor]]:
    """HF-style samples: text alone, each modality, several together."""
    model = getattr(factories, name)()
    probes = probe_samples(model, discover(model))
    labels = [torch.from_numpy(p.sample.input_ids).where(torch.from_numpy(p.sample.loss_mask), -100) for p in probes]
    return [probe.arguments | {"labels": label} for probe, label in zip(probes, labels, strict=True)]


ANY_TO_ANY = (
    ["dp4.accum2.recompute"],
    pytest.param(["dp2.offload", "hsdp2x2", "replicate2", "dp2.accum2"], marks=pytest.mark.slow),
)


@pytest.mark.parametrize("layouts", ANY_TO_ANY)
def test_data_parallel_layouts_train_the_any_to_any_model_as_one_process_does(
    ranks: RankPool, layouts: list[str]
) -> None:
    samples = tiny_samples(tiny_processor(factories.any_to_any()), 9)  # more than one rank has no image, no sound, ...
    check(ranks, "any_to_any", samples, layouts)


def test_ranks_without_targets_keep_step_with_a_frozen_decoder(ranks: RankPool) -> None:
    """Its head is in the backward of ranks with targets, on the way to what trains: there its weights are gathered."""
    every = tiny_samples(tiny_processor(factories.any_to_any()), len(TASKS))
    apart = [every[TASKS.index(task)] for task in ("text", "image_to_speech", "text_to_image")]
    frozen = (["image_decoder"], ["audio_decoder", "image_decoder", "image_encoder"])
    plans = [
        ParallelPlan(default=ComponentPlan(dp_shard=2), components={name: ComponentPlan(freeze=True) for name in names})
        for names in frozen
    ]
    check(ranks, "any_to_any", apart, plans)


@pytest.mark.second
def test_ranks_with_text_alone_take_part_in_a_deepstack_tower(ranks: RankPool) -> None:
    check(ranks, "qwen3_vl", hf_samples("qwen3_vl")[2:4], ["dp2.recompute"])  # a text; an image


def test_ranks_without_images_keep_step_with_a_model_that_returns_its_image_rows(ranks: RankPool) -> None:
    # Rows among the outputs have hooks of the foundation's unit.
    check(ranks, "gemma3", hf_samples("gemma3")[2:4], ["dp2"])


def test_tensor_parallel_ranks_train_the_any_to_any_model_as_one_process_does(ranks: RankPool) -> None:
    samples = tiny_samples(tiny_processor(factories.any_to_any()), 5)
    check(ranks, "any_to_any", samples, ["tp2.accum2.recompute"])


def test_a_tower_under_tensor_parallelism_counts_once(ranks: RankPool) -> None:
    check(ranks, "qwen3_vl", hf_samples("qwen3_vl")[2:5], [cut_by_globs("tp2")])  # a text, an image, a video


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR_FAMILIES)
def test_every_tensor_parallel_layout_trains_a_family_as_one_process_does(ranks: RankPool, name: str) -> None:
    layouts: list[str | ParallelPlan] = ["tp2", "tp2.dp2.accum2.recompute", "tp2.hsdp2x1", "tp2.dp2.offload", "tp2.sp2"]
    if name == "qwen3_vl":
        layouts = [cut_by_globs(str(layout)) for layout in layouts]
    check(ranks, name, hf_samples(name), layouts)


@pytest.mark.slow
def test_four_tensor_parallel_ranks_train_as_one_process_where_they_divide_the_heads(ranks: RankPool) -> None:
    for name in ("deepseek_v3", "qwen3_of_four_heads"):
        check(ranks, name, hf_samples(name), ["tp4"])
    report = verify("tests.parallel.factories:qwen3", hf_samples("qwen3"), ["tp4"], pool=ranks)
    assert not report.ok and "does not divide the 2 key-value heads" in report.rows[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_data_parallel_layout_trains_a_family_as_one_process_does(ranks: RankPool, name: str) -> None:
    check(ranks, name, hf_samples(name), [*DATA_PARALLEL, "dp2.accum3", "dp2.offload"])


def test_a_layout_that_does_not_fit_is_refused_with_the_reason(ranks: RankPool) -> None:
    samples = tiny_samples(tiny_processor(factories.any_to_any()), 2)
    report = verify("tests.parallel.factories:any_to_any", samples, ["pp4", "dp8"], pool=ranks)
    assert [row.status for row in report.rows] == ["refused", "refused"] and not report.ok
    assert (
        "found 4" in report.rows[0].reason and "needs 8 ranks, but nproc is 4; use --nproc 8" in report.rows[1].reason
    )
    assert "nan" not in str(report) and str(report).count("│ refused │ -    │ -         │ -     │ -       │ -") == 2


def test_a_gradient_that_is_divided_by_the_ranks_is_found(ranks: RankPool) -> None:
    samples = tiny_samples(tiny_processor(factories.any_to_any()), 4)
    report = verify("tests.parallel.factories:averaging", samples, ["dp2"], pool=ranks, timeout_s=120)
    (row,) = report.rows
    assert row.status == "different" and not report.ok
    assert 0.49 < row.grad_error < 0.51 and "the gradient of" in row.reason


@pytest.mark.parametrize("factory", ["tests.parallel.factories:nothing", "no.such.module:model"])
def test_a_factory_that_is_not_there_is_named(factory: str) -> None:
    with pytest.raises(UserError, match="no model factory"):
        verify(factory, [], ["dp2"])


def test_media_that_the_model_does_not_read_are_refused() -> None:
    samples = [{**hf_samples("qwen3_vl")[0], "input_features": torch.zeros(1, 8, 4)}]
    with pytest.raises(
        UserError, match=r"sample 0: input_features would not reach the model; [a-z ]+ passes \['image_grid_thw'"
    ):
        verify("tests.parallel.factories:qwen3_vl", samples, ["dp2"])


@pytest.mark.parametrize(("samples", "layouts", "message"), [([], ["dp2"], "no samples"), ([{}], [], "no layout")])
def test_nothing_to_verify_is_no_proof(samples: list, layouts: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        verify("tests.parallel.factories:any_to_any", samples, layouts)


def test_samples_without_a_token_to_predict_prove_nothing(ranks: RankPool) -> None:
    ignored = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, -100])}
    with pytest.raises(UserError, match="none of the samples has a token to predict"):
        verify("tests.parallel.factories:qwen3", [ignored], ["dp2"])
    frozen = ParallelPlan(default=ComponentPlan(freeze=True, dp_shard=2))
    for factory, layout in ((factories.qwen3, frozen), (all_frozen, "dp2")):
        (row,) = verify(factory, hf_samples("qwen3")[:2], [layout], pool=ranks).rows
        assert row.status == "refused" and "nothing can be compared" in row.reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layouts": "dp2"}, "layouts: found a str; expected a list"),
        ({"layouts": ParallelPlan()}, "layouts: found a ParallelPlan; expected a list"),
        ({"layouts": [2]}, "layouts: found a int at index 0"),
        ({"samples": {"input_ids": [1]}}, "samples: found a dict; expected a list"),
        ({"samples": [None]}, "samples: found a NoneType at index 0"),
        ({"samples": [{"input_ids": [], "labels": []}]}, "sample 0 has no tokens"),
        ({"nproc": "2"}, "nproc: found '2'; expected a number of ranks"),
        ({"nproc": 0}, "nproc: found 0"),
        ({"tolerance": 0.0}, "tolerance: found 0.0; expected a relative error above 0"),
        ({"tolerance": float("nan")}, "tolerance: found nan"),
        ({"model_factory": 3}, "model_factory: found a int; expected a function"),
        ({"model_factory": dict}, "the model factory returned a dict; expected a transformers model"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_named(changed: dict[str, Any], message: str) -> None:
    arguments = {"model_factory": "tests.parallel.factories:qwen3", "samples": [], "layouts": ["dp2"]}
    with pytest.raises(UserError, match=message):
        verify(**arguments | changed)


def test_a_model_in_the_place_of_its_factory_is_refused() -> None:
    with pytest.raises(UserError, match="found a OmniModel; expected a function that builds the model"):
        verify(factories.any_to_any(), [], ["dp2"])


def test_a_word_that_no_layout_has_is_named() -> None:
    with pytest.raises(UserError, match="`zp2`"):
        verify("tests.parallel.factories:any_to_any", [], ["zp2"])


def test_a_factory_that_no_other_process_can_have_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"cannot be sent to other processes .* expected a function at the top level of a module"
    ):
        verify(lambda: factories.any_to_any(), [], ["dp2"])


@pytest.mark.slow
def test_a_factory_of_a_notebook_is_verified_as_it_is() -> None:
    """A program without a file, whose factory draws its weights and shares a config with the next call."""
    program = """
        from transformers import Qwen3ForCausalLM

        import omnitrain as ot
        from tests.families import FAMILIES
        from tests.parallel.verify.test_verify import hf_samples

        config = FAMILIES["qwen3"]()

        def factory():
            return Qwen3ForCausalLM(config)

        print(*(row.status for row in ot.verify(factory, hf_samples("qwen3"), ["dp2"], nproc=2).rows))
    """
    ended = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(program), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "equal\n", ended.stderr


def drawn_anew() -> PreTrainedModel:
    model = factories.qwen3()
    model.lm_head.weight.data.mul_(random.random())
    return model


def all_frozen() -> PreTrainedModel:
    return factories.qwen3().requires_grad_(False)


def test_a_factory_whose_models_are_not_the_same_is_refused(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"builds a different model each time \(foundation.lm_head.weight differs\)"):
        verify(drawn_anew, hf_samples("qwen3")[:2], ["dp2"], pool=ranks)


def rounding(neighbour: float = 0.0) -> Noise:
    zero = dict.fromkeys("ab", 0.0)
    return Noise(zero, zero, frozenset({"b"}), lambda: dict.fromkeys("ab", neighbour))


def outcome(a: float, b: float, movement: float | None = None) -> Outcome:
    tensors = {"a": torch.tensor([1.0, a]), "b": torch.tensor([b])}
    moved = tensors if movement is None else tensors | {"b": torch.tensor([movement])}
    return Outcome(1.0, tensors, {"a": torch.ones(2), "b": torch.ones(1)}, moved, 0.0, 0)


@pytest.mark.parametrize(
    ("got", "status"),
    [
        (outcome(0.5, -1e-9), "equal"),  # rounding has any sign
        (outcome(0.5, 1.9e-8), "equal"),
        (outcome(0.5, 2.1e-8), "different"),  # twenty times the reference's rounding
        (outcome(0.5 + 2e-5, 1e-9), "different"),
    ],
)
def test_a_gradient_that_is_zero_up_to_rounding_must_stay_so_and_widens_no_tolerance(got: Outcome, status: str) -> None:
    row = _compared("dp2", got, outcome(0.5, 1e-9), rounding(), tolerance=1e-5)
    assert row.status == status, row


@pytest.mark.parametrize(
    ("error", "neighbour", "status"),
    [
        (3e-5, 1e-6, "different"),
        (1.9e-5, 2e-5, "equal"),
        (2.1e-5, 2e-5, "different"),
        (0.9e-4, 0.09, "equal"),
        (1.1e-4, 0.09, "different"),
    ],
)
def test_an_error_that_rounding_of_the_weights_makes_in_one_process_is_no_difference(
    error: float, neighbour: float, status: str
) -> None:
    expected, got = outcome(0.5, 1e-9), outcome(0.5, 1e-9)
    got.gradients["a"][1] += error
    got = replace(got, weights=expected.weights, moved=expected.moved)
    row = _compared("dp2", got, expected, rounding(neighbour), tolerance=1e-5)
    assert row.status == status, row
    assert (f"by {neighbour:.1e} if every weight moves" in str(VerifyReport((row,), 3))) == (error > 1e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"loss": 1.0 + 2e-5}, "the loss is off by 2.0e-05"),
        ({"weights": {"a": torch.tensor([1.0, 1.0 + 2e-5]), "b": torch.ones(1)}}, "the weight after three steps of a"),
        ({"gradients": {"a": torch.tensor([1.0, 0.5])}}, "1 parameters have a gradient on one side only, such as b"),
    ],
)
def test_loss_weights_and_missing_gradients_are_compared_by_themselves(changed: dict[str, Any], reason: str) -> None:
    expected = outcome(0.5, 1e-9)
    row = _compared("dp2", replace(expected, **changed), expected, rounding(), tolerance=1e-5)
    assert row.status == "different" and reason in row.reason, row


@pytest.mark.parametrize(("movement", "status"), [(3.5e-7, "equal"), (3.7e-7, "different")])
def test_a_movement_below_the_digits_of_its_weight_is_no_difference(movement: float, status: str) -> None:
    """A weight of 1 moves by 1.2e-7 or not at all, three times."""
    row = _compared("dp2", outcome(0.5, 1e-9, movement), outcome(0.5, 1e-9, 0.0), rounding(), tolerance=1e-5)
    assert row.status == status, row


def test_a_gradient_that_is_not_a_number_differs_whatever_the_others_are() -> None:
    sound = {"a": torch.ones(1), "b": torch.ones(1)}
    broken = sound | {"b": torch.tensor([torch.nan])}
    expected, got = (Outcome(1.0, gradients, sound, sound, 0.0, 0) for gradients in (sound, broken))
    row = _compared("dp2", got, expected, replace(rounding(), empty=frozenset()), tolerance=1e-5)
    assert row.status == "different" and row.worst_parameter == "b"


def test_only_gradients_that_are_zero_in_exact_arithmetic_count_as_rounding() -> None:
    batch = tiny_samples(tiny_processor(factories.any_to_any()), 3)
    _, found = reference(Alone("tests.parallel.factories:any_to_any"), batch)
    assert found.empty == {"image_encoder.tower.encoder.layers.0.self_attn.k_proj.bias"}
    assert max(found.gradients[name] for name in found.gradients.keys() - found.empty) < 1e-6
    neighbours = found.neighbours()
    assert neighbours.keys() == found.gradients.keys()
    assert all((error > 0.1) == (name in found.empty) for name, error in neighbours.items())
