"""Two encoders of one modality: both read each image, or those that the data set names, on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor, parts_of_items
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import ChatFormat, Recipe
from omnitrain.train.trainer import Trainer
from tests.data.render.test_processor import shown
from tests.parallel.laid_out import total
from tests.tiny import CHAT, MODEL, SIGLIP, tiny_model, tiny_processor, tiny_recipe, tiny_row, tiny_tokenizer
from tests.tiny_processors import chatml
from tests.train.test_ranks import assert_same_run, fit

DINO = {"model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
DINO |= {"patch_size": 4, "mlp_ratio": 2}
ENCODERS = {
    "semantic": {"tower": {"config": SIGLIP}, "projector": {"kind": "pixel_shuffle"}},  # 4 features
    "pixels": {"tower": {"config": DINO}, "projector": {"kind": "linear"}},  # 4 patches
    "audio_encoder": MODEL["encoders"]["audio_encoder"],
}
IMAGE = "<|image|>" + 4 * "."


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model(encoders=ENCODERS, decoders={})


def by_template(model: OmniModel) -> OmniProcessor:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chatml(image="<img>")
    renderer = ot.data.TemplateRenderer(tokenizer, NativeInputs({}), starts=ChatFormat(**CHAT))
    return OmniProcessor(renderer, *model.media_adapters())


def components(sample: Sample) -> list[str]:
    return [span.component for span in sample.spans]


def test_each_image_is_an_item_of_both_or_of_those_that_its_data_set_names(model: OmniModel) -> None:
    processor, row = tiny_processor(model), tiny_row("images_to_text", 0)
    sample = processor.sample(row)
    assert shown(processor, sample) == (f"<|user|>{4 * IMAGE}what is it <|end|><|assistant|>[0][<|end|>]")
    assert components(sample) == ["pixels", "semantic"] * 2
    for name in ("pixels", "semantic"):
        alone = processor.sample(replace(row, encoders=(name, "audio_encoder")))
        assert components(alone) == [name] * 2 and len(alone) == len(sample) - 2 * 5
    parts = parts_of_items(components(sample), row, processor)
    assert [(part.modality, part.position) for part in parts] == [("image", 0)] * 2 + [("image", 1)] * 2


def test_a_chat_template_writes_both(model: OmniModel) -> None:
    sample, by_chat = (one.sample(tiny_row("image_to_text", 0)) for one in (by_template(model), tiny_processor(model)))
    assert components(sample) == ["pixels", "semantic"]
    first, second = sample.spans
    assert second.start == first.start + first.item.num_tokens + 1
    starts = sample.input_ids[[first.start - 1, second.start - 1]]
    assert starts.tolist() == [tiny_processor(model).start_tokens["image"]] * 2
    for found, expected in zip(sample.spans, by_chat.spans, strict=True):
        assert all((found.item.features[name] == value).all() for name, value in expected.item.features.items())


def test_a_data_set_that_names_no_encoder_of_its_media_is_refused(model: OmniModel) -> None:
    row: Row = replace(tiny_row("image_to_text", 0), encoders=("audio_encoder",))
    expected = r"`encoders` of the data set: found audio_encoder; expected some of pixels, semantic for image"
    with pytest.raises(UserError, match=expected):
        tiny_processor(model).sample(row)


def test_a_part_names_its_encoders_before_its_data_set_does(model: OmniModel) -> None:
    processor, row = tiny_processor(model), tiny_row("images_to_text", 0)

    def naming(*names: Any, **others: Any) -> Row:
        parts = [dict(one) for one in row.messages[0]["content"]]
        for part, encoders in zip((one for one in parts if one["type"] == "image"), names, strict=True):
            part |= {"encoders": encoders, **others}
        return replace(row, messages=[row.messages[0] | {"content": parts}, *row.messages[1:]], encoders=("pixels",))

    mixed = naming(["semantic"], None)
    assert components(processor.sample(mixed)) == ["semantic", "pixels"]
    shown = parts_of_items(["semantic", "pixels"], mixed, processor)
    assert [part.position for part in shown if part is not None] == [0, 1]
    assert components(processor.sample(naming(["pixels", "semantic"], ["semantic"]))) == [
        "pixels",
        "semantic",
        "semantic",
    ]
    expected = r"`encoders` of the part: found audio_encoder; expected some of pixels, semantic for image"
    with pytest.raises(UserError, match=expected):
        processor.sample(naming(["audio_encoder"], None))
    with pytest.raises(UserError, match=r"`encoders` of a part of image: found 'pixels'; expected a list of names"):
        processor.sample(naming("pixels", None))
    with pytest.raises(UserError, match=r"`decoders` of a part of image that the model reads: expected `encoders`"):
        processor.sample(naming(None, None, decoders=["pixels"]))


def test_a_pack_of_samples_that_different_encoders_read_has_the_losses_of_each_alone(model: OmniModel) -> None:
    processor = tiny_processor(model)
    choices: Sequence[tuple[str, ...] | None] = (None, ("pixels",), ("semantic",), None)
    rows = [replace(tiny_row("image_to_text", seed), encoders=names) for seed, names in enumerate(choices)]
    samples = [processor.sample(row, index) for index, row in enumerate([*rows, tiny_row("text", 9)])]
    with torch.no_grad():
        together = total(model(Pack.from_samples(samples)))
        alone = [total(model(Pack.from_samples([sample]))) for sample in samples]
    assert together.item() == pytest.approx(torch.stack(alone).sum().item(), rel=1e-5)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside it ``one``, its run in one process."""
    path = tiny_recipe(tmp_path_factory.mktemp("two"), packs_per_step=2)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["encoders"] = ENCODERS
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    fit(path, [f"output_dir={path.parent / 'one'}"])
    return path


def test_both_train_and_a_saved_model_reads_with_both(recipe: Path) -> None:
    saved = OmniModel.from_pretrained(recipe.parent / "one" / "checkpoints" / "step-00000004")
    processor = OmniProcessor.from_pretrained(
        recipe.parent / "one" / "checkpoints" / "step-00000004", *saved.media_adapters()
    )
    assert components(processor.sample(tiny_row("image_to_text", 0))) == ["pixels", "semantic"]
    fresh = Trainer(Recipe.load(str(recipe), [])).model.state_dict()
    moved = {name.split(".")[0] for name, weight in saved.state_dict().items() if not torch.equal(weight, fresh[name])}
    assert {"pixels", "semantic"} <= moved


def test_unknown_encoders_of_a_data_set_are_refused(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train\.0\.encoders: unknown name 'pixel'; did you mean `pixels`"):
        Trainer(Recipe.load(str(recipe), ["data.train.0.encoders=[pixel]"]))


def test_an_encoder_that_no_data_set_names_would_learn_nothing(recipe: Path) -> None:
    expected = r"model\.encoders\.semantic: no message of a user in data\.train with it among its `encoders` shows"
    with pytest.raises(UserError, match=expected):
        Trainer(Recipe.load(str(recipe), ["data.train.0.encoders=[pixels, audio_encoder]"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "parallel.default.place=world"),
        (2, "parallel.default.ulysses=2"),
        (3, 'parallel.sections={"pixels":{"components":["pixels"],"ranks":1}}'),
        (2, "parallel.components.foundation.pp=2"),
    ],
    ids=["dp2.world", "sp2", "section", "pp2"],
)
def test_ranks_train_both_as_one_process(
    ranks: RankPool, recipe: Path, tmp_path: Path, world: int, layout: str
) -> None:
    ranks.run(fit, recipe, [layout, f"output_dir={tmp_path / 'many'}"], timeout_s=120, world=world)
    assert_same_run(tmp_path / "many", recipe.parent / "one")
