"""A frozen language model as a teacher: losses read its hidden states, on any ranks the same as in one process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import call_component, idle_prompt, with_all_inputs
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.parallel.resolve.plans import resolve_without_ranks
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import facts_of
from omnitrain.parallel.verify.tiny_model import needed_memory, num_parameters, tiny_model_of
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.train.build_from_recipe import build_from_recipe, use_own_functions
from omnitrain.train.verbs.check import check_recipe
from tests import tiny
from tests.in_forward import omni, qwen2_audio_model, row
from tests.parallel.sections.test_ahead import encoded_in_steps
from tests.tiny import FOUNDATION, TASKS, tiny_model, tiny_processor, tiny_recipe, tiny_samples, tiny_tokenizer
from tests.train.test_ranks import assert_same_run, fit

TEACHER = FOUNDATION | {"hidden_size": 48, "num_hidden_layers": 3}
EXPERTS = {key: value for key, value in FOUNDATION.items() if key != "head_dim"} | tiny.EXPERTS
AHEAD = "parallel.sections.teachers={components: [big], ranks: 1, ahead: 1}"


def distilled(logits: torch.Tensor, labels: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
    """Cross entropy with what a head over the teacher's hidden states predicts."""
    head = torch.randn(logits.size(1), big.size(1), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(logits, (big @ head.t()).softmax(-1), reduction="none")


def of_another(logits: torch.Tensor, labels: torch.Tensor, bigg: torch.Tensor) -> torch.Tensor:
    return distilled(logits, labels, bigg)


def largest(logits: torch.Tensor, labels: torch.Tensor, *, big: torch.Tensor) -> torch.Tensor:
    return big.amax(-1)


def plain(logits: torch.Tensor, labels: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return weight * F.cross_entropy(logits, labels, reduction="none")


def taught(teacher: Mapping[str, Any] = TEACHER) -> OmniModel:
    model = tiny_model(encoders={}, decoders={}, teachers={"big": dict(teacher)})
    model.runner.loss_function = distilled
    return model


def texts(number: int = 6) -> list[Sample]:
    return tiny_samples(tiny_processor(taught()), number, ["text"])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a student; its teacher is beside it, in ``big``."""
    folder = tmp_path_factory.mktemp("teachers")
    config = AutoConfig.for_model(**TEACHER)
    torch.manual_seed(0)
    foundation_class(config)(config).save_pretrained(folder / "big")
    tiny_tokenizer().save_pretrained(folder / "big")
    return tiny_recipe(folder, rows=14, evaluated=True, text_only=True, packs_per_step=4)


def with_teacher(recipe: Path, **functions: str) -> list[str]:
    """``functions``: names of functions here, ``text`` of the loss, others of metrics."""
    own = {name: f"{name}: '{__name__}:{function}'" for name, function in functions.items()}
    losses, metrics = own.pop("text", ""), ", ".join(own.values())
    return [
        f"model.teachers={{big: {recipe.parent / 'big'}}}",
        f"train.losses={{{losses}}}",
        f"train.metrics={{{metrics}}}",
    ]


def test_decisions_of_a_teachers_routers_are_not_recorded_with_those_of_the_model() -> None:
    experts = FOUNDATION | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}
    experts |= {"num_experts_per_tok": 2, "decoder_sparse_step": 1}
    model = tiny_model(encoders={}, decoders={}, teachers={"big": experts}, foundation=experts)
    model.runner.loss_function = distilled
    pack, recording = Pack.from_samples(texts()), Recording()
    with recording.recorded(model, pack.info.ids, pack.info.lengths):
        model(pack)
    assert recording.decisions and {key[0].partition(".")[0] for key in recording.decisions} == {"foundation"}


def test_a_loss_reads_the_last_hidden_state_of_each_predicting_token() -> None:
    model, pack, read = taught(), Pack.from_samples(texts()), []

    def loss(logits: torch.Tensor, labels: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
        read.append(big)
        return distilled(logits, labels, big)

    model.runner.loss_function = loss
    model.train()(pack).loss.backward()
    alone = [
        model.get_submodule("big").model.model(input_ids=ids[None]).last_hidden_state[0]
        for ids in pack.input_ids[0].split(pack.info.lengths)
    ]
    torch.testing.assert_close(torch.cat(read), torch.cat(alone)[pack.text_rows], rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.get_submodule("big").parameters())
    assert not model.get_submodule("big").model.training


def test_only_hidden_states_of_trained_tokens_travel() -> None:
    model = taught()
    pack = with_all_inputs(Pack.from_samples(texts()), (), model.teachers)
    features, _ = call_component(model, "big", {"big": pack.inputs["big"].groups})
    trained = len(pack.text_labels)
    assert sum(tensor.nbytes for tensor in features.tensors()) == trained * TEACHER["hidden_size"] * 4
    assert sum(item.num_tokens for item in facts_of(pack).items["big"]) == trained < pack.num_tokens


@pytest.mark.parametrize("head", ["inside", "plain"])
def test_a_pack_without_trained_text_calls_no_function(head: Literal["inside", "plain"]) -> None:
    model = taught()
    model.runner.contract = replace(model.runner.contract, head=head)
    model.runner.token_metrics = {"size": largest}
    term = model(Pack.from_samples([idle_prompt(model)])).losses["text"]
    assert (term.count, term.sum.item(), term.metrics["size"].tolist()) == (0, 0.0, [])
    assert term.sum.requires_grad


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["dp2.world.accum2", "sp2.accum2", "big2+dp2", "big1+cp2.recompute"], marks=pytest.mark.slow),
        ["dp2", "big1.ahead.window2.slots1+dp2.accum3"],
    ],
    ids=lambda layouts: layouts[-1],
)
def test_a_student_learns_as_in_one_process(sections: RankPool, layouts: list[str]) -> None:
    report = verify(taught, texts(12), layouts, nproc=4, timeout_s=120, pool=sections)
    assert [row.status for row in report.rows] == ["equal"] * len(layouts), str(report)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_experts_of_a_teacher_are_spread_over_its_section(sections: RankPool) -> None:
    section = {"components": ["big"], "ranks": 2}
    plan = ParallelPlan(components={"big": {"ep": 2}}, sections={"teachers": section})
    (row,) = verify(partial(taught, EXPERTS), texts(), [plan], nproc=4, timeout_s=120, pool=sections).rows
    assert row.status == "equal", row


@pytest.mark.second
def test_a_run_with_a_teacher_ahead_is_that_of_one_process_after_ctrl_c(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    """It stops after the second of four steps. The ranks go on from a checkpoint, which has no teacher; the section
    encodes again what it had encoded ahead.
    """
    functions = [*with_teacher(recipe, text="distilled", size="largest"), "data.workers=1", "data.pack_tokens=64"]
    functions.append("evaluation={loss_every: 4, max_new_tokens: 1}")
    fit(recipe, [*functions, f"output_dir={tmp_path / 'one'}"])
    ahead = [*functions, AHEAD, f"output_dir={tmp_path / 'run'}"]
    *main, section = ranks.run(encoded_in_steps, recipe, ahead, 2, timeout_s=120, world=3)
    assert main == [[], []]
    assert section == [{False, True}, {True}, {False, True}, {False}]  # the last one encodes for held-out losses
    assert_same_run(tmp_path / "run", tmp_path / "one")
    stage = [*functions, f"model={{checkpoint: {tmp_path / 'one'}, teachers: {{big: {recipe.parent / 'big'}}}}}"]
    assert check_recipe(Recipe.load(str(recipe), stage)) == []


def test_a_student_that_is_too_large_is_verified_with_a_small_teacher() -> None:
    config = FOUNDATION | {"num_hidden_layers": 8, "vocab_size": 4000}
    model = tiny_model(encoders={}, decoders={}, foundation=config, teachers={"big": config | {"hidden_size": 48}})
    make = tiny_model_of(model, ranks=2, memory=needed_memory(num_parameters(model), ranks=2) - 1)
    assert make is not None
    made = make()
    teacher = made.get_submodule("big")
    assert teacher.width == 48 and num_parameters(teacher) < num_parameters(model.get_submodule("big")) / 4
    assert made(Pack.from_samples([make.sample(sample) for sample in texts()])).loss.isfinite()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("of_another", r"train.losses.text: found a parameter 'bigg' .*: did you mean `big`"),
        ("plain", r"model.teachers.big: no function of .* has a parameter 'big' .* remove the teacher"),
    ],
)
def test_a_loss_that_does_not_read_the_teacher_is_refused(recipe: Path, function: str, message: str) -> None:
    (problem,) = check_recipe(Recipe.load(str(recipe), with_teacher(recipe, text=function)))[:1]
    assert re.search(message, problem)


def test_a_metric_may_be_all_that_reads_a_teacher(recipe: Path) -> None:
    assert check_recipe(Recipe.load(str(recipe), with_teacher(recipe, text="plain", size="largest"))) == []


def test_a_pack_has_no_limit_of_the_media_of_a_teacher(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"data.pack_elements: .*, but the teacher big reads no media; remove it there"):
        Recipe.load(str(recipe), [*with_teacher(recipe, text="distilled"), "data.pack_elements.big=9"])


@pytest.mark.parametrize("name", ["runner", "config", "teachers"])
def test_a_teacher_may_not_have_the_name_of_an_attribute_of_the_model(name: str) -> None:
    with pytest.raises(UserError, match=rf"'{name}': the model has an attribute of this name; choose another"):
        tiny_model(encoders={}, decoders={}, teachers={name: dict(TEACHER)})


def test_a_function_that_needs_a_teacher_is_refused_without_one(recipe: Path) -> None:
    given = Recipe.load(str(recipe), with_teacher(recipe, text="distilled")[1:])
    with pytest.raises(UserError, match=r"train.losses.text: found a parameter 'big' .*; expected none"):
        use_own_functions(build_from_recipe(given, "meta")[0], given.train)


def test_a_teacher_with_other_tokens_is_refused(recipe: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    overrides = [*with_teacher(recipe, text="distilled"), f"model.tokenizer={tmp_path / 'tokenizer'}"]
    with pytest.raises(UserError, match=r"model.teachers.big: .* where '<\|tool\|>' is 264; .* it is missing; use a"):
        build_from_recipe(Recipe.load(str(recipe), overrides), "meta")


def test_a_teacher_does_not_read_media() -> None:
    model = tiny_model(teachers={"big": TEACHER})
    pack = Pack.from_samples(tiny_samples(tiny_processor(model), 2, ["text", "image_to_text"]))
    with pytest.raises(UserError, match="reads text alone, but sample image_to_text/1 has media of image_encoder"):
        model(pack)


def test_check_names_rows_with_media_that_a_teacher_would_read(recipe: Path, tmp_path: Path) -> None:
    with_media = tiny_recipe(tmp_path, rows=len(TASKS))
    problems = check_recipe(Recipe.load(str(with_media), with_teacher(recipe, text="distilled")))
    assert len(problems) == len(TASKS) - 1  # all but `text`
    assert "sample image_to_text/1 has media of image_encoder; train on text" in problems[0]


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"big": {"lora": {"targets": ["**"]}}}, r"components.big.lora: a teacher does not train; remove it"),
        ({"big": {"freeze": True}}, r"components.big.freeze: found true, but a teacher never trains; remove it"),
        ({"big": {"freeze": False}}, r"components.big.freeze: found false, but the component is frozen"),
        ({"big": {"pp": 2}}, r"components.big.pp: found 2, but"),
        ({"big": {"cp": 2}}, r"components.big.cp: found 2, but"),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_what_a_teacher_cannot_do_is_refused(
    components: Mapping[str, Mapping[str, Any]], message: str, *, apart: bool
) -> None:
    sections = {"teachers": {"components": ["big"], "ranks": 2}} if apart else {}
    plan = ParallelPlan(components=components, sections=sections)
    with pytest.raises(UserError, match=message):
        resolve_without_ranks(taught(), plan, mixed_precision=False, num_ranks=2 + 2 * apart)


@pytest.mark.parametrize(
    ("components", "sections", "message"),
    [
        ({"big": {"tp": 2}}, [], r"components.big.tp: found 2, but the foundation has 1; use 1, or give big a section"),
        ({"big": {"ulysses": 2}}, [], r"components.big.ulysses: found 2, but no ranks share a sequence of the foundat"),
        (
            {"foundation": {"pp": 2}},
            ["big", "image_encoder"],
            r"found image_encoder beside the teacher big, but",
        ),
    ],
)
def test_degrees_of_a_teacher_are_those_of_its_ranks(
    components: Mapping[str, Mapping[str, Any]], sections: list[str], message: str
) -> None:
    model = tiny_model(decoders={}, teachers={"big": TEACHER})
    given = {"apart": {"components": sections, "ranks": 2}} if sections else {}
    with pytest.raises(UserError, match=message):
        plan = ParallelPlan(components=components, sections=given)
        resolve_without_ranks(model, plan, mixed_precision=False, num_ranks=4 if sections else 2)


def test_the_default_adapters_are_not_for_teachers() -> None:
    plan = ParallelPlan(default={"lora": {"targets": ["**"]}})
    _, plans = resolve_without_ranks(taught(), plan, mixed_precision=False, num_ranks=1)
    assert {name: bool(own.lora) for name, own in plans.items()} == {"foundation": True, "big": False}


def listening() -> OmniModel:
    """A foundation that reads sound in its own forward, with a teacher."""
    foundation = qwen2_audio_model()
    teacher = TEACHER | {"vocab_size": foundation.config.text_config.vocab_size}
    return build_omni_model(foundation=foundation, teachers={"big": teacher})


def test_a_section_needs_no_gradients_of_zeros_of_the_foundation(sections: RankPool) -> None:
    """Ranks of ``main`` ask each other which parameters a sample has read; those of a section have none of them."""
    processor = omni("qwen2_audio")[1]
    given = [processor.sample(row(*turns), index) for index, turns in enumerate([("hi", "B c"), ("you", "D")])]
    (found,) = verify(listening, given, ["big1+dp1"], nproc=2, timeout_s=120, pool=sections).rows
    assert found.status == "equal", found
