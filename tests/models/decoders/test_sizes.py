"""A decoder of images of several sizes: their codes in one pack, what it writes, and what it refuses."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.data.packing.sample import Sample
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import to_tensors
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Sampling
from tests.models.decoders.test_decoders import IMAGE_TOKENIZERS, decoder
from tests.parallel.laid_out import equals_one_sample_at_a_time
from tests.tiny import part, tiny_model, tiny_processor, tiny_recipe, write_parquet
from tests.train.test_ranks import assert_same_run, fit

SIZES = ["8x8", "12x8", "8x16"]
EMU3 = {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_sizes": SIZES}
CODES = 16  # of the tokenizer; those of the sizes follow
LENGTHS = [1 + 16, 1 + 24, 1 + 32]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def drawing(width: int, height: int, seed: int = 0) -> Row:
    stream = io.BytesIO()
    picture(width, height, seed).save(stream, format="PNG")
    messages = [
        {"role": "user", "content": [part("text", f"draw {seed}")]},
        {"role": "assistant", "content": [part("image")]},
    ]
    return Row(f"{seed}", "drawings", messages, {"image": [stream.getvalue()], "audio": [], "video": []}, {})


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model(seed=3, encoders={}, decoders={"image_decoder": EMU3})


def test_each_image_gets_the_size_of_the_most_similar_shape_and_then_area() -> None:
    adapter = decoder(IMAGE_TOKENIZERS["emu3"], image_sizes=["8x8", "16x16", "24x16"]).adapter()
    for size, which in {(9, 9): 0, (15, 16): 1, (100, 100): 1, (30, 20): 2, (13, 9): 2, (2, 1): 2, (1, 2): 0}.items():
        features, num_tokens = adapter.prepare("image", picture(*size))
        assert features["size"].tolist() == [which], size
        width, height = [(8, 8), (16, 16), (24, 16)][which]
        assert features["pixel_values"].shape == (3 * width * height,) and num_tokens == 1 + width * height // 4


def test_images_of_three_sizes_have_the_codes_that_each_has_alone(model: OmniModel) -> None:
    own = model.image_decoder
    prepared = [
        own.adapter().prepare("image", picture(*size, seed))
        for seed, size in enumerate([(8, 16), (8, 8), (12, 8), (8, 16), (8, 8)])
    ]
    features = {name: np.concatenate([one[name] for one, _ in prepared]) for name in prepared[0][0]}
    counts = tuple(count for _, count in prepared)
    assert counts == tuple(LENGTHS[size] for size in (2, 0, 1, 2, 0))
    _, labels = own.lm_encode(to_tensors(features), counts)
    alone = [own.lm_encode(to_tensors(one), (count,))[1] for one, count in prepared]
    assert torch.equal(labels, torch.cat(alone)) and own.head.out_features == CODES + 3
    for codes, size in zip(alone, ((8, 16), (8, 8), (12, 8), (8, 16), (8, 8)), strict=True):
        assert codes[0] == CODES + SIZES.index("{}x{}".format(*size)) and codes[1:].max() < CODES
        assert own.is_complete(codes.tolist()) and not own.is_complete(codes[:-1].tolist())
        assert own.lm_generate(codes.tolist()).size == size


def test_losses_and_gradients_of_a_pack_of_three_sizes_are_those_of_one_sample_at_a_time(model: OmniModel) -> None:
    processor = tiny_processor(model)
    rows = [drawing(*size, seed) for seed, size in enumerate([(8, 16), (8, 8), (12, 8)])]
    samples = [processor.sample(row, index) for index, row in enumerate(rows)]
    assert "image_decoder.head.weight" in equals_one_sample_at_a_time(model, samples)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_writes_the_sizes_that_are_asked_for_and_one_of_its_own_otherwise(
    model: OmniModel, temperature: float
) -> None:
    processor = tiny_processor(model)
    prompt = processor.prompt(drawing(8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "start_tokens", {"image": _likeliest(model, prompt)})
        written = {}
        for size in [*SIZES, None]:
            sampling = {"image_decoder": Sampling(temperature=temperature, size=size)}
            (answer,) = generate(model, processor, [prompt], max_new_tokens=40, sampling=sampling)
            images = [one for one in answer.parts if isinstance(one, Image.Image)]
            written[size] = "{}x{}".format(*images[0].size)
            item = [token for mode, token in answer.tokens if mode == "image_decoder"]
            assert item[0] >= CODES and max(item[1 : LENGTHS[item[0] - CODES]]) < CODES
    assert [written[size] for size in SIZES] == SIZES and written[None] in SIZES


def _likeliest(model: OmniModel, prompt: Sample) -> int:
    """The text token with which a greedy answer begins."""
    (answer,) = generate(model, tiny_processor(model), [prompt], max_new_tokens=1)
    return answer.tokens[0][1]


def test_impossible_sizes_are_refused_in_words(model: OmniModel) -> None:
    emu3, janus, chameleon = (IMAGE_TOKENIZERS[name] for name in ("emu3", "janus", "chameleon"))
    with pytest.raises(UserError, match=r"size '9x9': the model writes images of 8x8, 12x8, 8x16; use one of them"):
        model.image_decoder.next_classes([], "9x9")
    with pytest.raises(UserError, match="size '8x8': TokenDecoder writes one size alone; leave it out"):
        decoder(emu3, image_size=8).next_classes([], "8x8")
    with pytest.raises(UserError, match=r"image_sizes: found 7x8; expected sides that are multiples of 2"):
        decoder(emu3, image_sizes=["7x8", "8x8"])
    with pytest.raises(UserError, match="JanusVQVAE decodes images of one shape alone; use `image_size`"):
        decoder(janus, image_sizes=SIZES)
    with pytest.raises(UserError, match="ChameleonVQVAE has no `decode`"):
        decoder(chameleon, image_sizes=SIZES)
    with pytest.raises(UserError, match="image_sizes"):
        decoder(emu3, image_sizes=["8 x 8"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run with images of three sizes, beside it ``one``, the run in one process."""
    folder = tmp_path_factory.mktemp("sizes")
    path = tiny_recipe(folder, text_only=True, evaluated=True, packs_per_step=2)
    recipe = yaml.safe_load(path.read_text())
    recipe["model"]["decoders"] = {"image_decoder": EMU3}
    recipe["evaluation"] |= {"max_new_tokens": 40, "sampling": {"image_decoder": {"size": "8x16"}}}
    sizes = [(8, 16), (8, 8), (12, 8)]
    write_parquet(folder / "train.parquet", [drawing(*sizes[seed % 3], seed) for seed in range(12)])
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    fit(path, [f"output_dir={folder / 'one'}"])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["train.seed=0", "parallel.default.ulysses=2", "parallel.components.foundation.pp=2"]
)
def test_ranks_train_several_sizes_as_one_process(ranks: RankPool, run: Path, tmp_path: Path, layout: str) -> None:
    ranks.run(fit, run, [layout, f"output_dir={tmp_path / 'many'}"], timeout_s=120, world=2)
    assert_same_run(tmp_path / "many", run.parent / "one")


@pytest.mark.second
def test_generate_takes_a_size_and_refuses_another(run: Path, tmp_path: Path) -> None:
    command = ["generate", str(run.parent / "one"), "--prompt", "draw 1", "--output", str(tmp_path)]
    refused = CliRunner().invoke(app, [*command, "--size", "320x192"])
    assert refused.exit_code == 2 and "the model writes images of 8x8, 12x8, 8x16" in refused.output
    done = CliRunner().invoke(app, [*command, "--size", "12x8", "--max-new-tokens", "60"])
    assert done.exit_code == 0, done.output
