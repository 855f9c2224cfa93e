import pickle
import sys
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.discovery.discover import discover
from omnitrain.models.discovery.features import MediaFeatures, check_rows
from omnitrain.models.discovery.interface import override
from omnitrain.models.hf.load import foundation_class
from tests.families import AUDIO_FAMILIES, FAMILIES, VISION_FAMILIES
from tests.models.discovery.samples import built, gradients, media_sample

VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", *AUDIO_FAMILIES)
ALL = [
    *((family, "image") for family in (*VISION_FAMILIES, *AUDIO_FAMILIES)),
    *((family, "video") for family in VIDEO_FAMILIES),
    *((family, "audio") for family in AUDIO_FAMILIES),
]
QUICK = [("qwen3_vl", "image"), ("glm4v", "video"), ("gemma3", "image"), ("llava_next", "image")]
QUICK += [("paligemma", "image"), ("qwen2_5_omni_thinker", "audio"), ("qwen2_5_omni_thinker", "video")]
CASES = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("family", "modality"), CASES)
def test_rows_put_in_give_plain_transformers_logits_and_gradients_bitwise(family: str, modality: str) -> None:
    sample = media_sample(family, modality)
    model, interface = sample.model, sample.found.interfaces[modality]
    plain = sample.plain()
    expected = gradients(model, plain)
    logits = sample.injected(interface.encode(model, sample.features))
    assert torch.equal(logits, plain)
    got = gradients(model, logits)
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize(("family", "modality"), CASES)
def test_one_call_per_item_and_any_order_give_the_rows_of_one_joint_call(family: str, modality: str) -> None:
    sample = media_sample(family, modality)
    model, interface = sample.model, sample.found.interfaces[modality]
    assert interface.items_are_independent
    with torch.no_grad():
        joint = sample.injected(interface.encode(model, sample.features))
        second, first = (interface.encode(model, interface.probe_items(2)[item]) for item in (1, 0))
        backwards = MediaFeatures.cat([second, first])
        order = torch.arange(len(backwards.main)).roll(-len(second.main))
        apart = sample.injected(replace(backwards.at(order), counts=(*first.counts, *second.counts)))
    torch.testing.assert_close(apart, joint, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "modality"), CASES)
def test_positions_equal_what_the_model_computes_by_itself(family: str, modality: str) -> None:
    sample = media_sample(family, modality)
    caught = []
    decoder = sample.model.get_decoder()
    handle = decoder.register_forward_pre_hook(lambda m, a, kw: caught.append(kw["position_ids"]), with_kwargs=True)
    try:
        with torch.no_grad():
            sample.plain()
    finally:
        handle.remove()
    own = caught[0] if caught[0] is not None else torch.arange(sample.ids.size)[None]
    assert torch.equal(sample.positions, own)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"])
def test_every_side_feature_changes_the_logits(family: str) -> None:
    sample = media_sample(family, "image")
    interface = sample.found.interfaces["image"]
    assert interface.side == ("deepstack_features.0", "deepstack_features.1")
    with torch.no_grad():
        rows = interface.encode(sample.model, sample.features)
        logits = sample.injected(rows)
        for name in interface.side:
            tensors = [
                torch.zeros_like(t) if n == name else t
                for n, t in zip(interface.layout.names, rows.tensors(), strict=True)
            ]
            assert not torch.equal(sample.injected(rows.with_tensors(tensors, rows.counts)), logits)


def _prefixes(family: str) -> dict[str, set[str]]:
    _, found = built(family)
    return {name: {".".join(p.split(".")[:2]) for p in names} for name, names in found.components.items()}


def test_projectors_and_bare_parameters_belong_to_the_tower() -> None:
    towers = {"model.vision_tower", "model.multi_modal_projector"}
    assert _prefixes("gemma3")["image_encoder"] == towers
    assert _prefixes("llava_next")["image_encoder"] == towers | {"model.image_newline"}
    assert _prefixes("llava_next")["foundation"] >= {"model.language_model", "lm_head.weight"}


def test_image_and_video_through_one_tower_are_one_component_and_audio_another() -> None:
    found = _prefixes("qwen2_5_omni_thinker")
    assert list(found) == ["foundation", "image_encoder", "audio_encoder"]
    assert found["image_encoder"] == {"model.visual"} and found["audio_encoder"] == {"model.audio_tower"}
    _, omni = built("qwen2_5_omni_thinker")
    assert {m: p.component for m, p in omni.interfaces.items()} == {
        "image": "image_encoder",
        "video": "image_encoder",
        "audio": "audio_encoder",
    }


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "qwen3_vl" else pytest.mark.slow) for f in FAMILIES]
)
def test_every_parameter_is_in_exactly_one_component(family: str) -> None:
    model, found = built(family)
    names = [name for part in found.components.values() for name in part]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert found.refused == {}


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen2_5_omni_thinker"])
def test_a_model_without_weights_is_described_like_one_with_weights(family: str) -> None:
    _, found = built(family)
    config = FAMILIES[family]()
    with torch.device("meta"):
        empty = foundation_class(config)(config)
    described = discover(empty)
    assert described.components == found.components and described.token_ids == found.token_ids
    assert {m: p.layout for m, p in described.interfaces.items()} == {m: p.layout for m, p in found.interfaces.items()}


def test_discovery_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[discover.__module__], "_DISCOVERED", {})  # of other tests
    config = FAMILIES["qwen3_vl"]()
    model = foundation_class(config)(config).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    discover(model)
    assert model.training and model.model.rope_deltas is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_of_one_class_config_and_tree_of_modules_are_discovered_once_in_a_process() -> None:
    def model(**values: int) -> PreTrainedModel:
        config = FAMILIES["qwen3_vl"]()
        config.text_config.update(values)
        return foundation_class(config)(config)

    found, other, adapted = discover(model()), model(), model()
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    assert discover(other) is found
    for differs in (model(num_hidden_layers=1), model().double(), adapted):
        assert discover(differs) is not found
    assert "lm_head.0.weight" in discover(adapted).components["foundation"]


@pytest.mark.parametrize("surplus", [1, -1])
def test_a_row_too_many_or_too_few_names_the_sample_and_both_numbers(surplus: int) -> None:
    with pytest.raises(UserError, match=rf"sample web:17: 4 audio placeholders, {4 + surplus} features"):
        check_rows("audio", [6, 4], [6, 4 + surplus], ["web:3", "web:17"])


def test_a_modality_that_the_model_lacks_is_named() -> None:
    sample = media_sample("gemma3", "image")
    rows = sample.found.interfaces["image"].encode(sample.model, sample.features)
    with (
        pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration has no audio input; it reads \['image'\]"),
        override(sample.model, sample.found.interfaces, {"audio": rows}),
    ):
        pass


def test_the_override_is_gone_afterwards_even_after_an_error() -> None:
    sample = media_sample("gemma3", "image")
    rows = sample.found.interfaces["image"].encode(sample.model, sample.features)
    with pytest.raises(KeyError), override(sample.model, sample.found.interfaces, {"image": rows}):
        raise KeyError
    assert not any("get_image_features" in vars(module) for module in sample.model.modules())


def test_ports_and_positions_pickle_for_data_workers() -> None:
    sample = media_sample("qwen3_vl", "image")
    interface, positions = pickle.loads(pickle.dumps((sample.found.interfaces["image"], sample.found.positions)))
    assert torch.equal(interface.encode(sample.model, sample.features).main.detach(), _main(sample))
    extras = sample.found.extras(sample.ids)
    assert (positions(sample.ids, sample.features, extras) == sample.positions[:, 0].numpy()).all()


def _main(sample) -> torch.Tensor:
    return sample.found.interfaces["image"].encode(sample.model, sample.features).main.detach()
