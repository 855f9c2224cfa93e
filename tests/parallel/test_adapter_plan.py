"""LoRA in plans: on many ranks, and what plans are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.models.adapters.lora import adapters_of, add_lora, find_adapters, train_rows
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.parallel.adapter_plan import adapters_for, lora_problems
from omnitrain.parallel.expert.apply import expert_layers
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.tiny_model import tiny_model_of
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Lora
from tests.parallel import factories
from tests.parallel.expert.test_experts import samples_of, text_samples
from tests.parallel.laid_out import laid_out, total
from tests.parallel.tensor.test_sequence_parallel import BIASED
from tests.parallel.verify.test_verify import QWEN_GLOBS, check, hf_samples

LORA = Lora(targets=["o_proj", "experts.*"], rank=3)
CUT = {  # family: targets, and how it is cut if it does not say so itself
    "deepseek_v3": (["mlp.**", "self_attn.*"], None),  # shared experts
    "glm4v": (["layers.**"], None),  # fused matrices
    "gpt_oss": (["*_proj", "experts.*"], BIASED),
    "qwen3_vl": (["*_proj", "blocks.**"], QWEN_GLOBS),  # a tower, too
}


def with_lora(layout: str, lora: Lora = LORA) -> ParallelPlan:
    plan = parse_layout(layout).plan()
    return plan.model_copy(update={"default": plan.default.model_copy(update={"lora": lora})})


def divided_tokens(plan: ParallelPlan) -> ParallelPlan:
    return plan.model_copy(update={"components": {FOUNDATION: ComponentPlan(sequence_parallel=True)}})


def hidden_with_and_without_adapters() -> list[torch.Tensor]:
    """Of the same pack: of the model as it is, and with new adapters beside all that takes some."""
    found = []
    for lora in (None, Lora(targets=["*_proj", "experts.*"], rank=3)):
        model = laid_out({"lora": lora}, state={"tp_size": 2}, model=build_omni_model(foundation=factories.qwen3_moe()))
        hidden = model(Pack.from_samples(samples_of(factories.qwen3_moe()))).hidden
        assert hidden is not None
        found.append(hidden)
    return found


def test_adapters_train_under_expert_parallelism_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, "qwen3_moe_with_adapters", text_samples(), ["dp2.ep2.recompute"])


def test_a_plan_with_lora_trains_its_adapters_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, "qwen3_moe", text_samples(), [with_lora("dp2.ep2")])


@pytest.mark.second
def test_adapters_train_under_tensor_parallelism_as_in_one_process(ranks: RankPool) -> None:
    """Beside matrices cut by columns and by rows, and beside experts whose tokens are shared."""
    layouts = ["tp2.dp2.ep2.recompute", divided_tokens(parse_layout("tp2").plan())]
    check(ranks, "qwen3_moe_with_adapters", text_samples(), layouts)


def test_new_adapters_change_no_bit_on_tensor_parallel_ranks(ranks: RankPool) -> None:
    for bare, adapted in ranks.run(hidden_with_and_without_adapters, timeout_s=60, world=2):
        assert bare.abs().max() > 0 and torch.equal(bare, adapted)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_adapters_train_on_every_tensor_parallel_layout_as_in_one_process(ranks: RankPool, name: str) -> None:
    targets, globs = CUT[name]
    lora = Lora(targets=targets, rank=3)
    plans = [with_lora(layout, lora) for layout in ("tp2", "tp2.dp2.accum2.recompute", "tp2.sp2")]
    plans = [plan.model_copy(update={"tp_plan": globs}) for plan in (*plans, divided_tokens(plans[0]))]
    check(ranks, name, hf_samples(name), plans)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe_with_adapters", "gpt_oss", "qwen3_vl_moe"])
def test_adapters_train_on_every_layout_as_in_one_process(ranks: RankPool, name: str) -> None:
    layouts = ["dp4.ep2.accum2.recompute", "hsdp2x2.ep2", "dp2.sp2.ep4"]
    plans = layouts if name == "qwen3_moe_with_adapters" else [with_lora(layout) for layout in layouts]
    check(ranks, name, text_samples(), plans)


def trained_and_dtypes() -> tuple[set[str], set[str], set[str]]:
    """Dtypes of adapters and their gradients, those of the base, and how both lie."""
    plan = {"dp_shard": 2, "ep": 2, "lora": LORA, "precision": {"param": "bfloat16", "compute": "bfloat16"}}
    model = laid_out(plan, state={"ep_size": 2}, model=build_omni_model(foundation=factories.qwen3_moe()))
    total(model(Pack.from_samples(samples_of(factories.qwen3_moe())))).backward()
    thin = {p for name, p in model.named_parameters() if name in model.adapter_names}
    experts = model.foundation.model.layers[0].mlp.experts
    return (
        {str(tensor.dtype) for p in thin for tensor in (p, p.grad)},
        {str(p.dtype) for p in model.parameters() if p not in thin and not p.requires_grad},
        {str(getattr(experts, name).placements) for name in ("down_proj", "down_proj_lora_A", "down_proj_lora_B")},
    )


def test_adapters_are_fp32_beside_a_bf16_base_and_lie_as_it_does(ranks: RankPool) -> None:
    adapters, base, placements = ranks.run(trained_and_dtypes, timeout_s=60, world=2)[0]
    assert (adapters, base) == ({"torch.float32"}, {"torch.bfloat16"})
    assert len(placements) == 1


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            ParallelPlan(default=ComponentPlan(lora=Lora(targets=["experts.gate"]))),
            "default.lora.targets: `experts.gate` matches no name; did you mean `experts.gate_up_proj`?",
        ),
        (
            ParallelPlan(components={FOUNDATION: ComponentPlan(lora=Lora(targets=["q_prj"]))}),
            "components.foundation.lora.targets: `q_prj` matches no name; did you mean `q_proj`?",
        ),
    ],
)
def test_targets_of_a_plan_that_match_nothing_are_refused_with_the_nearest(plan: ParallelPlan, said: str) -> None:
    found, problems = adapters_for(build_omni_model(foundation=factories.qwen3_moe()), plan)
    assert (found, problems) == ({}, [said])


def test_a_decoder_takes_no_adapters_by_name_and_none_from_the_default() -> None:
    model = factories.any_to_any()
    default = ParallelPlan(default=ComponentPlan(lora=Lora(targets=["q_proj"])))
    found, problems = adapters_for(model, default)
    assert found.keys() == {"foundation", "image_encoder", "audio_encoder"} and problems == []
    own = ParallelPlan(components={"image_decoder": ComponentPlan(lora=Lora(targets=["q_proj"]))})
    (problem,) = adapters_for(model, own)[1]
    assert problem.startswith("components.image_decoder.lora: decoders cannot have adapters")


def test_frozen_components_take_no_adapters_from_the_default() -> None:
    plan = ParallelPlan(
        default=ComponentPlan(lora=Lora(targets=["q_proj"])), components={"image_encoder": ComponentPlan(freeze=True)}
    )
    assert adapters_for(factories.any_to_any(), plan)[0].keys() == {"foundation", "audio_encoder"}
    with pytest.raises(ValueError, match="`lora` already freezes all but the adapters: remove one"):
        ComponentPlan(freeze=True, lora=LORA)


def test_a_model_that_is_cut_to_be_verified_has_its_adapters() -> None:
    model = factories.qwen3_moe_with_adapters()
    tiny = tiny_model_of(model.to("meta"), 1)
    assert tiny is not None
    cut = tiny()
    assert isinstance(cut, OmniModel) and cut.adapter_names == model.adapter_names
    assert {name for name, parameter in cut.named_parameters() if parameter.requires_grad} == model.adapter_names


def test_layouts_that_adapters_cannot_be_on_are_refused_in_a_line(ranks: RankPool) -> None:
    plan = ParallelPlan(default=ComponentPlan(ulysses=2), components={FOUNDATION: ComponentPlan(async_ulysses=True)})
    factory = "tests.parallel.factories:qwen3_moe_with_adapters"
    (row,) = verify(factory, text_samples(), [plan], pool=ranks, timeout_s=60).rows
    assert row.status == "refused" and row.reason == (
        "1 problem in the parallel plan:\n"
        "  default.lora: async_ulysses does not support adapters; use only one of the two"
    )


def test_experts_backends_without_adapters_are_refused_with_those_that_have_them() -> None:
    model = factories.qwen3_moe_with_adapters()
    use_omnitrain_experts(model, "grouped_mm")
    (problem,) = lora_problems(adapters_of(model), expert_layers(model), ParallelPlan())
    assert (
        problem == "default.lora: experts backend grouped_mm does not support adapters; use the backend auto or torch"
    )


def problems_of(lora: Lora, new_tokens: tuple[int, ...] = (), **plan: object) -> list[str]:
    model = build_omni_model(foundation=factories.qwen3_moe())
    model.added_tokens = new_tokens
    planned = ParallelPlan(default=ComponentPlan(lora=lora, **plan))
    adapters, problems = adapters_for(model, planned)
    assert problems == []
    return list(lora_problems(adapters, expert_layers(model), planned))


def test_all_linear_layers_but_the_head_and_no_experts_are_the_default() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe())
    adapters = adapters_for(model, ParallelPlan(default=ComponentPlan(lora=Lora())))[0][FOUNDATION]
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert adapters.linears == tuple(sorted(set(linears) - {"foundation.lm_head"})) and adapters.experts == ()
    assert problems_of(Lora(dropout=0.1)) == []


def test_dropout_where_adapters_have_none_and_new_rows_in_bf16_are_refused() -> None:
    (of_experts,) = problems_of(Lora(targets=["experts.*"], dropout=0.1))
    assert of_experts.startswith("default.lora.dropout: found 0.1, but fused experts have no dropout")
    (of_ranks,) = problems_of(Lora(dropout=0.1), tp=2)
    assert of_ranks.startswith("default.lora.dropout: found 0.1 with tp 2, whose ranks would draw other numbers")
    (of_dtype,) = problems_of(Lora(), (5, 7), precision={"param": "bfloat16"})
    assert of_dtype.startswith("default.precision.param: found bfloat16, but rows of new tokens train (ids 5, 7)")
    assert problems_of(Lora(), (5, 7), precision={"compute": "bfloat16"}) == []


def test_components_of_one_hf_model_have_one_dropout_in_one_file() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe())
    first = find_adapters(model, FOUNDATION, Lora(dropout=0.1))
    present = {FOUNDATION: first, "image_encoder": replace(first, dropout=0.2)}  # a tower inside of it
    (problem,) = adapters_for(model, ParallelPlan(), present)[1]
    assert "dropout 0.2" in problem and "peft has one `rslora` and one `dropout` for both: use the same" in problem


def test_dropout_of_adapters_is_drawn_by_micro_batch_and_block() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe())
    assert not model.draws
    add_lora(model, adapters_for(model, ParallelPlan(default=ComponentPlan(lora=Lora(dropout=0.1))))[0])
    assert model.draws


def test_whether_a_model_draws_is_known_before_anything_else_was_asked() -> None:
    model = build_omni_model(foundation=factories.qwen3_with_dropout())
    assert "runner" not in vars(model) and model.draws


def test_rows_of_new_tokens_have_one_hook_that_leaves_their_gradients_alone() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe())
    model.added_tokens = (5, 6, 9)
    add_lora(model, adapters_for(model, ParallelPlan(default=ComponentPlan(lora=Lora())))[0])
    train_rows(model)
    weight = model.foundation.get_input_embeddings().weight
    assert len(weight._post_accumulate_grad_hooks) == 1
    weight.sum().backward()
    assert weight.grad.any(-1).nonzero().flatten().tolist() == [5, 6, 9] and weight.grad[5:7].eq(1).all()
