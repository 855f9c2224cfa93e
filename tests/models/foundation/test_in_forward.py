"""Samples that the model's own forward reads, with all inputs of its HF processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.foundation.in_forward import beyond_text, outermost_unreached
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.models.omni.summary import component_rows
from tests.in_forward import FAMILIES, ROWS, arguments, omni, plain_step, row, samples

MODULES = {
    "qwen2_audio": ("model.audio_tower", "model.multi_modal_projector"),
    "phi4_multimodal": ("model.embed_tokens_extend",),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_transformers_on_the_processors_own_output(family: str) -> None:
    model, processor = omni(family)
    make, processor_of = FAMILIES[family]
    plain, batch = make().train(), samples(family, processor)
    given = [arguments(processor_of(), one) for one in ROWS[family]]
    expected, total = plain_step(plain, given, batch), 0.0
    for sample in batch:
        loss = model.train()(Pack.from_samples([sample])).losses["text"].sum
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, rel=1e-6)
    ours, reached = dict(model.foundation.named_parameters()), 0
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert ours[name].grad is None, name
        else:
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
            reached += any(name.startswith(module) for module in MODULES[family]) and bool(parameter.grad.any())
    assert reached > 20  # parameters of towers
    assert model.runner.contract.beyond_text == MODULES[family]


def test_the_check_and_the_table_say_it() -> None:
    model, _ = omni("qwen2_audio")
    (finding,) = [found for found in model.runner.contract.findings if found.check == "modality audio"]
    assert finding.outcome == "fallback"
    assert finding.fact.startswith("read by the model's own forward, one sample per pack: its forward takes input_")
    assert model.runner.contract.packs  # texts share rows
    (foundation,) = component_rows(model)
    assert "audio: in its own forward, one sample per pack" in foundation.ops


def test_a_tower_is_frozen_by_its_module_and_no_component_is_made_up() -> None:
    model, processor = omni("qwen2_audio")
    with pytest.raises(
        UserError, match=r"forward reads this modality.*its modules: foundation.model.audio_tower, foundation"
    ):
        freeze(model, ["audio_encoder"])
    freeze(model, ["foundation.model.audio_tower"])
    audio, text = samples("qwen2_audio", processor)[:2]
    for sample in (audio, text):
        model.zero_grad()
        model.train()(Pack.from_samples([sample])).losses["text"].sum.backward()
        gradients = {name: p.grad for name, p in model.foundation.named_parameters()}
        assert all(grad is None for name, grad in gradients.items() if "audio_tower" in name)
        projector = gradients["model.multi_modal_projector.linear.weight"]
        assert (projector is not None) is (sample is audio)


def test_greedy_answers_are_those_of_transformers() -> None:
    model, processor = omni("qwen2_audio")
    make, processor_of = FAMILIES["qwen2_audio"]
    plain, rows = make().eval(), ROWS["qwen2_audio"]
    answers = generate(model, processor, [processor.prompt(one, i) for i, one in enumerate(rows)], max_new_tokens=5)
    for one, answer in zip(rows, answers, strict=True):
        given = arguments(processor_of(), one, is_prompt=True)
        made = plain.generate(**given, max_new_tokens=5, do_sample=False, eos_token_id=processor.end_token)
        assert [token for _, token in answer.tokens] == made[0, given["input_ids"].size(1) :].tolist()


def test_a_prompt_whose_tokens_each_have_inputs_is_refused_in_words() -> None:
    model, processor = omni("qwen2_audio")
    prompt = processor.prompt(row("a+what?", "A"))
    inputs = prompt.forward_inputs | {"cross_attention_mask": prompt.forward_inputs["attention_mask"][..., None]}
    with pytest.raises(UserError, match="with 'cross_attention_mask' for each token of it"):
        generate(model, processor, [replace(prompt, forward_inputs=inputs)], max_new_tokens=2)


def test_hf_samples_with_such_media_are_read_whole_and_unread_ones_refused() -> None:
    model, _ = omni("phi4_multimodal")
    given = arguments(FAMILIES["phi4_multimodal"][1](), row("i+?", "yes"))
    labels = given["input_ids"].clone()
    labels[:, :-3] = -100
    (sample,) = to_samples(model.runner.native, [given | {"labels": labels}])
    assert sample.forward_inputs.keys() == given.keys() - {"input_ids", "num_img_tokens"}
    with pytest.raises(UserError, match=r"pixels would not reach the model"):
        to_samples(model.runner.native, [given | {"labels": labels, "pixels": torch.ones(2, 2)}])


def test_a_model_that_changes_the_number_of_tokens_is_refused_in_words() -> None:
    model, processor = omni("qwen2_audio")
    sample = processor.sample(row("a+what?", "A"))
    ids = sample.input_ids.copy()
    ids[ids == 4] = 20
    ids[5] = 4  # one placeholder, which the model itself expands
    with pytest.raises(UserError, match=r"gave \d+ hidden states for 84 tokens; the HF processor must insert"):
        model(Pack.from_samples([replace(sample, input_ids=ids)]))


def test_layers_that_only_media_call_are_told_by_what_other_layers_lack() -> None:
    reached = ["layers.0.mlp", "layers.0.self_attn.q", "head"]
    unreached = ["layers.1.mlp", "layers.1.cross_attn.q", "tower.a", "tower.layers.0.b", "gate"]
    outermost = outermost_unreached(reached, unreached)
    assert outermost == ("layers.*.cross_attn", "tower", "gate")
    names = ("layers.0.mlp", "layers.0.self_attn.q", "layers.3.mlp", "layers.3.cross_attn.q", "tower.a", "gate", "head")
    assert beyond_text(names, outermost) == {"layers.3.mlp", "layers.3.cross_attn.q", "tower.a", "gate"}
