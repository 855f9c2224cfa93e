"""Distillation: the divergence from teachers as losses, on any ranks those of full logits in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.teacher import Teacher
from omnitrain.ops.loss.divergence import METRICS, Divergence
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import Recipe
from omnitrain.recipe.component_configs import TeacherConfig
from omnitrain.train.verbs.check import check_recipe
from tests.ops.loss.test_divergence import by_torch, relative_error
from tests.parallel.sections.test_teachers import EXPERTS, TEACHER, texts
from tests.tiny import FOUNDATION, tiny_model, tiny_recipe, tiny_tokenizer
from tests.train.test_ranks import assert_same_run, fit

JSD = {"divergence": "jsd", "temperature": 2.0}
TOP = {"divergence": "reverse_kl", "top_k": 7}


def teacher(how: Mapping[str, Any], seed: int, **config: Any) -> Teacher:
    """Sure of what it predicts, as its weights are wide."""
    torch.manual_seed(seed)
    made = Teacher(TeacherConfig(model=TEACHER | config, **how))
    for parameter in made.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=parameter.size(-1) ** -0.5)
    return made


def student(foundation: Mapping[str, Any] = FOUNDATION) -> OmniModel:
    """With two teachers, one with more padding classes and one with fewer, and a third one that nothing reads."""
    teachers = {
        "big": teacher(JSD, 1, vocab_size=300),
        "wise": teacher(TOP, 2, vocab_size=272, tie_word_embeddings=False),
    }
    return tiny_model(encoders={}, decoders={}, foundation=dict(foundation), teachers=teachers)


PADDED = FOUNDATION | {"vocab_size": 280}


def test_the_losses_of_two_teachers_are_those_of_full_logits() -> None:
    model, pack = student(PADDED).train(), Pack.from_samples(texts())
    output = model(pack)
    output.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = pack.input_ids[0].split(pack.info.lengths)

    def logits(of: Any) -> torch.Tensor:
        return torch.cat([of(input_ids=ids[None]).logits[0] for ids in alone])[pack.text_rows]

    total = torch.nn.functional.cross_entropy(logits(model.foundation), pack.text_labels)
    for name, how, shared in (("big", Divergence("jsd", 2.0), 280), ("wise", Divergence("reverse_kl", top_k=7), 272)):
        theirs = logits(model.get_submodule(name).model)[:, :shared].detach()
        rows = by_torch(logits(model.foundation)[:, :shared], theirs, how)
        total = total + rows.mean()
        assert relative_error(output.losses[name].rows, rows.detach()) <= 1e-5
        assert output.losses[name].count == len(rows) and set(output.losses[name].metrics) == set(METRICS)
    total.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and not any(name.startswith(("big", "wise")) for name in found)
    assert max(relative_error(found[name], expected[name]) for name in found) <= 1e-5


def test_a_teacher_of_some_sources_compares_their_samples_alone() -> None:
    given = {"big": teacher(JSD | {"sources": ["own"]}, 1)}
    model = tiny_model(encoders={}, decoders={}, teachers=given).train()
    samples = [replace(sample, source=source) for sample, source in zip(texts(3), ("own", "other", "own"), strict=True)]
    first, second, third = (len(Pack.from_samples([sample]).text_rows) for sample in samples)
    found, alone = (model(Pack.from_samples(some)) for some in (samples, samples[::2]))
    assert found.losses["text"].count == first + second + third and found.losses["big"].count == first + third
    torch.testing.assert_close(found.losses["big"].rows, alone.losses["big"].rows, rtol=1e-5, atol=1e-6)
    assert found.read["big"].tolist() == [
        row for row in found.read["text"].tolist() if _source_at(samples, row) == "own"
    ]
    assert model(Pack.from_samples(samples[1:2])).losses.keys() == {"text"}


def _source_at(samples: list[Sample], token: int) -> str:
    return next(s.source for s, end in zip(samples, accumulate(map(len, samples)), strict=True) if token < end)


def test_a_pack_without_trained_text_has_no_divergence() -> None:
    model = student()
    assert model(Pack.from_samples([idle_prompt(model)])).losses.keys() == {"text"}


def test_output_layers_of_teachers_are_of_the_foundations_component_and_are_not_saved(tmp_path: Path) -> None:
    model = student(PADDED)
    assert {"big.head.weight", "wise.head.weight"} <= model.components["foundation"].keys()
    assert not any("head" in name.split(".") for name in model.components["big"])
    assert [len(model.get_submodule(name).head.weight) for name in ("big", "wise")] == [280, 280]
    model.save_pretrained(tmp_path)
    assert {name.partition(".")[0] for name in OmniModel.from_pretrained(str(tmp_path)).state_dict()} == {"foundation"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layouts",
    [
        ["dp2.world.accum2", "tp2", "big1.ahead.window2.slots1+tp2.accum2"],
        pytest.param(["sp2.accum2", "cp2.recompute", "big2+dp2", "hsdp2x2", "tp2.accum2"], marks=pytest.mark.slow),
    ],
    ids=lambda layouts: layouts[-1],
)
def test_a_layout_does_not_change_what_a_student_learns(sections: RankPool, layouts: list[str]) -> None:
    report = verify(partial(student, PADDED), texts(12), layouts, nproc=4, timeout_s=120, pool=sections)
    assert [row.status for row in report.rows] == ["equal"] * len(layouts), str(report)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_student_of_experts_learns_with_ep(sections: RankPool) -> None:
    experts = {key: value for key, value in (PADDED | EXPERTS).items() if key != "head_dim"}
    report = verify(partial(student, experts), texts(12), ["dp2.ep2"], nproc=2, timeout_s=120, pool=sections)
    assert [row.status for row in report.rows] == ["equal"], str(report)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a student; its teacher is beside it, in ``big``."""
    folder = tmp_path_factory.mktemp("distilled")
    config = AutoConfig.for_model(**TEACHER)
    torch.manual_seed(0)
    foundation_class(config)(config).save_pretrained(folder / "big")
    tiny_tokenizer().save_pretrained(folder / "big")
    return tiny_recipe(folder, rows=14, evaluated=True, text_only=True, packs_per_step=4)


def taught(recipe: Path, **how: Any) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in {"path": recipe.parent / "big", **how}.items())
    return f"model.teachers={{big: {{{given}}}}}"


@pytest.mark.ranks
def test_a_recipe_reads_the_output_layer_from_the_teachers_files_on_any_ranks(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    overrides = [taught(recipe, divergence="forward_kl", weight=0.5), "train.loss_weights={text: 0.5}"]
    overrides += ["evaluation={loss_every: 4, max_new_tokens: 1}", "data.pack_tokens=64"]
    one = fit(recipe, [*overrides, f"output_dir={tmp_path / 'one'}"])
    layout = [*overrides, "parallel.components.foundation.tp=2", f"output_dir={tmp_path / 'run'}"]
    ranks.run(fit, recipe, layout, timeout_s=120, world=2)
    assert_same_run(tmp_path / "run", tmp_path / "one")
    line = json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    heads = line["heads"]
    assert line["loss"] == pytest.approx(0.5 * heads["text"]["loss"] + 0.5 * heads["big"]["loss"], rel=1e-5)
    assert set(METRICS) <= line["metrics"].keys() and 0 <= line["metrics"]["agreement"]["big"] <= 1
    assert one.step == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.teachers.big.divergence=null", "model.teachers.big.weight: .* there is no `divergence`"),
        ("model.freeze=[big]", "model.freeze: 'big' is of a teacher, which never trains; remove it"),
        ("train.loss_weights={big: 2}", "train.loss_weights.big: unknown name"),
        ("model.teachers.big.sources=[trian]", "model.teachers.big.sources: unknown data set 'trian'; .*train"),
    ],
)
def test_keys_without_effect_are_refused(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        raise UserError(
            *check_recipe(Recipe.load(str(recipe), [taught(recipe, divergence="forward_kl", weight=0.5), override]))
        )


def test_a_model_that_changes_its_logits_has_no_divergence() -> None:
    config = FOUNDATION | {"model_type": "gemma2", "final_logit_softcapping": 30.0, "vocab_size": 264}
    model = build_omni_model(foundation=dict(FOUNDATION), teachers={"big": Teacher(TeacherConfig(model=config, **JSD))})
    with pytest.raises(UserError, match=r"model.teachers.big: .* changes the logits of its output layer"):
        assert model.runner


def test_teachers_are_compared_in_one_order_on_all_ranks() -> None:
    """Ranks that share classes sum in each divergence; the order of names in a set differs between processes."""
    model, names, seen = tiny_model(encoders={}, decoders={}), [f"teacher_{n}" for n in (3, 1, 7, 0, 5, 2, 6, 4)], []
    pack = Pack.from_samples(texts(1))

    def compare(name: str) -> Any:
        return SimpleNamespace(divergence=lambda *_: seen.append(name) or LossTerm(torch.zeros(()), 0, torch.zeros(0)))

    model.runner.compared = {name: compare(name) for name in names}
    states = (pack.text_rows, torch.zeros(len(pack.text_rows), 8))
    model.runner.text_loss(EncodedPack(pack, teachers=dict.fromkeys(sorted(names), states)))
    assert seen == names
