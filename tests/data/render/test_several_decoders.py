"""Two decoders of one modality: the data set names the one that writes, after its own start token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from omnitrain.data.packing.pack import Pack
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.errors import UserError
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import ChatFormat, Recipe
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.trainer import Trainer
from tests.data.render.test_processor import shown
from tests.models.decoders.test_decoders import IMAGE_TOKENIZERS
from tests.parallel.laid_out import total
from tests.tiny import CHAT, MODEL, tiny_model, tiny_recipe, tiny_row, tiny_tokenizer, write_parquet
from tests.train.test_ranks import assert_same_run, fit

DECODERS = {
    "picture": MODEL["decoders"]["image_decoder"],
    "thumbnail": {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_size": 4},
}
STARTS = {"starts": {"thumbnail": "<|video|>"}}


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model(seed=3, encoders={}, decoders=DECODERS)


@pytest.fixture(scope="module")
def processor(model: OmniModel) -> OmniProcessor:
    return OmniProcessor(ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT, **STARTS)), *model.media_adapters())


def test_an_answer_is_written_by_the_decoder_that_its_data_set_names(processor: OmniProcessor) -> None:
    row = tiny_row("text_to_image", 0)
    for name, start, num_codes in (("picture", "<|image|>", 16), ("thumbnail", "<|video|>", 4)):
        sample = processor.sample(replace(row, decoders=[name]))
        assert shown(processor, sample) == (
            f"<|user|>what is it <|end|><|assistant|>[{start}]{num_codes * '.'}[<|end|>]"
        )
        assert [span.component for span in sample.spans] == [name]
    with pytest.raises(UserError, match=r"`decoders` .*found nothing; expected one of picture, thumbnail for image"):
        processor.sample(row)
    with pytest.raises(UserError, match=r"found sketch; expected one of picture, thumbnail for image"):
        processor.sample(replace(row, decoders=["sketch"]))


def test_each_image_of_an_answer_is_written_by_the_decoder_that_its_part_names(processor: OmniProcessor) -> None:
    row = tiny_row("text_to_image", 0)
    parts = [{"type": "image", "decoders": [name]} for name in ("thumbnail", "picture")]
    media = row.media | {"image": 2 * row.media["image"]}
    messages = [row.messages[0], {"role": "assistant", "content": parts}]
    sample = processor.sample(replace(row, messages=messages, media=media, decoders=["picture"]))
    assert [(span.component, span.item.num_tokens) for span in sample.spans] == [("thumbnail", 4), ("picture", 16)]
    with pytest.raises(UserError, match=r"`decoders` of the part: found sketch; expected one of picture, thumbnail"):
        parts[0]["decoders"] = ["sketch"]
        processor.sample(replace(row, messages=messages, media=media))


def test_a_pack_of_both_has_the_losses_of_each_alone(model: OmniModel, processor: OmniProcessor) -> None:
    names = ["picture", "thumbnail", "thumbnail", "picture"]
    rows = [replace(tiny_row("text_to_image", seed), decoders=[name]) for seed, name in enumerate(names)]
    samples = [processor.sample(row, index) for index, row in enumerate(rows)]
    with torch.no_grad():
        together = model(Pack.from_samples(samples))
        alone = [total(model(Pack.from_samples([sample]))) for sample in samples]
    assert together.losses.keys() == {"text", "picture", "thumbnail"}
    assert total(together).item() == pytest.approx(torch.stack(alone).sum().item(), rel=1e-5)


def test_a_start_token_says_which_decoder_writes(model: OmniModel, processor: OmniProcessor) -> None:
    prompt = processor.prompt(tiny_row("text_to_image", 1))
    (free,) = generate(model, processor, [prompt], max_new_tokens=1)
    drawn, other = free.tokens[0][1], 263
    for name, side in (("picture", 8), ("thumbnail", 4)):
        starts = {"image": drawn if name == "picture" else other, "thumbnail": drawn if name == "thumbnail" else other}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "start_tokens", starts)
            (answer,) = generate(model, processor, [prompt], max_new_tokens=20)
        assert [mode for mode, _ in answer.tokens[:3]] == ["text", name, name]
        assert isinstance(answer.parts[0], Image.Image) and answer.parts[0].size == (side, side)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside it ``one``, its run in one process."""
    folder = tmp_path_factory.mktemp("two")
    path = tiny_recipe(folder, text_only=True, packs_per_step=2)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["decoders"] = DECODERS
    tree["data"]["chat"] |= STARTS
    tree["data"]["train"] = [
        {
            "path": str(write_parquet(folder / f"{name}.parquet", [tiny_row("text_to_image", i) for i in range(6)])),
            "name": name,
            "decoders": [name],
        }
        for name in DECODERS
    ]
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    fit(path, [f"output_dir={folder / 'one'}"])
    return path


def test_both_train_and_a_saved_model_knows_their_start_tokens(recipe: Path) -> None:
    lines = [json.loads(line) for line in (recipe.parent / "one" / "metrics.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line["heads"]} == {"text", "picture", "thumbnail"}
    _, processor = load_checkpoint(recipe.parent / "one")
    assert {processor.start_of("image", name) for name in DECODERS} == {5, 7}


def test_two_decoders_without_a_choice_are_refused_before_training(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"expected one of picture, thumbnail for image"):
        Trainer(Recipe.load(str(recipe), ["data.train.1.decoders=null"])).fit()
    with pytest.raises(UserError, match=r"picture and thumbnail write image after the same start token"):
        Trainer(Recipe.load(str(recipe), ["data.chat.starts={}"]))
    with pytest.raises(UserError, match=r"data\.train\.0\.decoders: unknown name 'picturs'; did you mean `picture`"):
        Trainer(Recipe.load(str(recipe), ["data.train.0.decoders=[picturs, picture]"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["train.seed=0", "parallel.default.ulysses=2", "parallel.components.foundation.pp=2"]
)
def test_ranks_train_both_as_one_process(ranks: RankPool, recipe: Path, tmp_path: Path, layout: str) -> None:
    ranks.run(fit, recipe, [layout, f"output_dir={tmp_path / 'many'}"], timeout_s=120, world=2)
    assert_same_run(tmp_path / "many", recipe.parent / "one")
