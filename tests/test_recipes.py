"""Every shipped recipe trains, and shows its data, with tiny models and data in place of those that it names."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from omnitrain.models.hf.load import foundation_class, model_class
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.recipe.tree import list_recipes
from omnitrain.report.data.pack_view import ItemView
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.preview import data_stats, preview
from omnitrain.train.verbs.verify import verify_recipe
from tests.data.render.test_several_encoders import DINO
from tests.families import FAMILIES
from tests.models.decoders.test_decoders import AUDIO_TOKENIZERS, IMAGE_TOKENIZERS
from tests.models.encoders.test_waveforms import TOWERS as SPEECH_TOWERS
from tests.models.test_janus import hf_processor, janus
from tests.test_recipes_of_published_models import MODELS
from tests.tiny import EXTRACTOR, FOUNDATION, SIGLIP, WHISPER, tiny_row, tiny_tokenizer, write_parquet
from tests.tiny_processors import llava, qwen3_vl

SMALL = ["train.steps=2", "train.cpu_threads=1", "data.workers=0", "data.pack_tokens=200", "data.packing_buffer=4"]
SMALL += ["train.report=false"]  # its page is tested in tests/report
STAGES = ("vision_language_1_align", "vision_language_2_pretrain", "vision_language_3_sft")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the models and data of the recipes: name -> path."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)

    def saved(name: str, config: dict, *beside: object) -> str:
        built = AutoConfig.for_model(**config)
        parts = ("siglip_vision_model", "whisper", "emu3_vqgan", "dinov2", "wav2vec2", "mimi")
        is_part = config["model_type"] in parts
        model = (model_class if is_part else foundation_class)(built)(built)
        for part in (model, *beside):
            part.save_pretrained(folder / name)
        return str(folder / name)

    def rows(name: str, task: str) -> str:
        return str(write_parquet(folder / f"{name}.parquet", [tiny_row(task, i) for i in range(8)]))

    text = {k: v for k, v in FOUNDATION.items() if k not in ("model_type", "tie_word_embeddings")}
    vision = SIGLIP | {"model_type": "clip_vision_model", "patch_size": 4}
    whole = {"text_config": text | {"model_type": "llama", "vocab_size": 272}, "vision_config": vision}
    qwen = FAMILIES["qwen2_5_vl"]().to_dict()
    square = {"height": 8, "width": 8}
    patches = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 256})
    return {
        "qwen3": saved("qwen3", FOUNDATION, tiny_tokenizer()),
        "deep": saved("deep", FOUNDATION | {"num_hidden_layers": 4}, tiny_tokenizer()),
        "llama": saved("llama", text | {"model_type": "llama"}, tiny_tokenizer()),
        "qwen3_moe": saved("qwen3_moe", FAMILIES["qwen3_moe"]().to_dict() | {"vocab_size": 264}, tiny_tokenizer()),
        "siglip": saved("siglip", SIGLIP, SiglipImageProcessorPil(size=square)),
        "whisper": saved("whisper", WHISPER, WhisperFeatureExtractor(feature_size=16, **EXTRACTOR)),
        "qwen2_5_vl": saved("qwen2_5_vl", qwen, patches),
        "llava": saved("llava", whole | {"model_type": "llava", "image_token_index": 2}, llava()[0]),
        "texts": rows("texts", "text"),
        "images": rows("images", "image_to_text"),
        "speech": rows("speech", "speech_to_text"),
        "drawings": rows("drawings", "text_to_image"),
        "films": rows("films", "text_to_film"),
        "dinov2": saved("dinov2", DINO, BitImageProcessorPil(size={"shortest_edge": 8}, crop_size=square)),
        "emu3_vq": saved("emu3_vq", IMAGE_TOKENIZERS["emu3"]),
        "wav2vec2": saved("wav2vec2", SPEECH_TOWERS["wav2vec2 large"], Wav2Vec2FeatureExtractor()),
        "mimi": saved("mimi", AUDIO_TOKENIZERS["mimi"]),
        "qwen3_vl_whole": saved("qwen3_vl_whole", whole_qwen3_vl("qwen3_vl")),
        "qwen3_vl_moe_whole": saved("qwen3_vl_moe_whole", whole_qwen3_vl("qwen3_vl_moe")),
        "clips": rows("clips", "video_to_text"),
        "janus": saved("janus", janus().config.to_dict(), hf_processor(janus())),
        "spoken": rows("spoken", "image_to_speech"),
        "edits": rows("edits", "image_to_image"),
    }


def whole_qwen3_vl(family: str) -> dict:
    """A config with the special tokens and patches of the tiny processor."""
    config = FAMILIES[family]().to_dict()
    config["text_config"]["vocab_size"] = 264
    config["vision_config"] |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = ("image", "video", "vision_start", "vision_end")
    return config | {f"{name}_token_id": number for number, name in enumerate(tokens, start=2)}


def look_at(recipe: Recipe) -> None:
    """A pack has all that its samples have, and the packs that a run fills have as many tokens as expected."""
    (pack,) = preview(recipe, packs=1).packs
    items = [piece for sample in pack.samples for piece in sample.pieces if isinstance(piece, ItemView)]
    media = {(sample.start, item.part) for sample in pack.samples for item in sample.pieces if item in items}
    assert len(media) == len(pack.samples) and all(item.part is not None for item in items)  # each row has one medium
    assert 0 < pack.predicted["text"] < pack.num_tokens <= pack.capacity
    stats = data_stats(recipe, rows=4)
    assert not stats.rejected and all(data_set.epochs > 0 for data_set in stats.data_sets)
    assert stats.packing.tokens_per_step == pytest.approx(stats.packing.fill * pack.capacity * stats.packs_per_step)


def run(name: str, output_dir: Path, *overrides: str) -> set[str]:
    """Train two steps; returns the parts of the model whose weights moved (times of frames: only by weight decay)."""
    recipe = Recipe.load(name, [*SMALL, f"output_dir={output_dir}", *overrides])
    look_at(recipe)
    trainer = Trainer(recipe)
    before = {key: value.clone() for key, value in trainer.model.named_parameters()}
    trainer.fit()
    trained = ((key, value) for key, value in trainer.model.named_parameters() if ".time_projector." not in key)
    moved = {key for key, value in trained if not torch.equal(value, before[key])}
    return {".".join(key.split(".")[:2]) if "encoder" in key else key.split(".")[0] for key in moved}


@pytest.mark.second
def test_stages_train_the_projector_then_the_language_model_then_everything(
    tiny: dict[str, str], tmp_path: Path
) -> None:
    data = f"data.train=[{{path: {tiny['images']}}}]"
    tower = f"model.encoders.image_encoder.tower={tiny['siglip']}"
    aligned = run(STAGES[0], tmp_path / "1", data, f"model.foundation={tiny['qwen3']}", tower)
    assert aligned == {"image_encoder.projector"}
    pretrained = run(STAGES[1], tmp_path / "2", data, f"model.checkpoint={tmp_path / '1'}")
    assert pretrained == {"image_encoder.projector", "foundation"}
    tuned = run(STAGES[2], tmp_path / "3", data, f"model.checkpoint={tmp_path / '2'}")
    assert tuned == {"image_encoder.projector", "image_encoder.tower", "foundation"}


def test_a_folder_of_images_and_a_json_file(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A square."}]
    rows = [{"image": f"{index}.png", "conversations": turns} for index in range(8)]
    (tmp_path / "images").mkdir()
    for row in rows:
        Image.new("RGB", (40, 30), "red").save(tmp_path / "images" / row["image"])
    (tmp_path / "train.json").write_text(json.dumps(rows))
    own = [f"data.train.0.path={tmp_path / 'train.json'}", f"data.train.0.media_folder={tmp_path / 'images'}"]
    moved = run("own_images", tmp_path / "run", *own, "train.packs_per_step=1")
    assert moved == {"foundation", "image_encoder.projector", "image_encoder.tower"}


def test_whisper_and_llama(tiny: dict[str, str], tmp_path: Path) -> None:
    parts = (f"model.foundation={tiny['llama']}", f"model.encoders.audio_encoder.tower={tiny['whisper']}")
    moved = run("speech_language", tmp_path, *parts, f"data.train=[{{path: {tiny['speech']}}}]")
    assert moved == {"foundation", "audio_encoder.projector"}


def test_two_towers_read_each_image_or_one_where_a_data_set_says_so(tiny: dict[str, str], tmp_path: Path) -> None:
    towers = {"semantic_encoder": "siglip", "spatial_encoder": "dinov2"}
    parts = [f"model.encoders.{name}.tower={tiny[tower]}" for name, tower in towers.items()]
    parts += [f"model.foundation={tiny['qwen3']}", *(f"data.train.{n}.path={tiny['images']}" for n in (0, 1))]
    (pack,) = preview(Recipe.load("two_towers", [*SMALL, *parts]), packs=1).packs
    items = [[piece.component for piece in one.pieces if isinstance(piece, ItemView)] for one in pack.samples]
    assert set(map(tuple, items)) == {("semantic_encoder", "spatial_encoder"), ("semantic_encoder",)}
    moved = run("two_towers", tmp_path, *parts)
    assert moved == {"foundation", "semantic_encoder.projector", "spatial_encoder.projector"}


@pytest.mark.second
def test_a_language_model_learns_to_write_images_and_is_evaluated_with_guidance(
    tiny: dict[str, str], tmp_path: Path
) -> None:
    decoder = f"model.decoders.image_decoder={{tokenizer: {tiny['emu3_vq']}, image_sizes: [8x8, 8x16]}}"
    data = [f"data.{part}=[{{path: {tiny['drawings']}}}]" for part in ("train", "heldout")]
    parts = (f"model.foundation={tiny['qwen3']}", decoder, *data, "evaluation.max_new_tokens=18")
    assert run("text_to_image", tmp_path, *parts) == {"foundation", "image_decoder"}
    assert json.loads((tmp_path / "eval.json").read_text())["losses"]["heads"]["image_decoder"]["tokens"] == 8 * 17


@pytest.mark.second
@pytest.mark.parametrize("flow", ["{width: 16, depth: 1, num_steps: 2}", "{kind: in_context, num_steps: 2}"])
def test_a_language_model_learns_to_write_latents_and_is_evaluated_with_guidance(
    tiny: dict[str, str], tmp_path: Path, flow: str
) -> None:
    decoder = [f"model.decoders.image_decoder.{one}" for one in ("image_size=8", f"flow={flow}")]
    data = [f"data.{part}=[{{path: {tiny['drawings']}}}]" for part in ("train", "heldout")]
    parts = (f"model.foundation={tiny['qwen3']}", *decoder, *data, "evaluation.max_new_tokens=6")
    assert run("text_to_latents", tmp_path, *parts) == {"foundation", "image_decoder"}
    assert json.loads((tmp_path / "eval.json").read_text())["losses"]["heads"]["image_decoder"]["tokens"] == 8 * 4


PATCHES = "{config: {model_type: omnitrain_patches, patch_size: 4}}"


def overrides_of_films(tiny: dict[str, str], *, latents: bool) -> list[str]:
    """Films of two frames, in codes or as latents."""
    decoder = f"{{tokenizer: {PATCHES if latents else tiny['emu3_vq']}, image_size: 8, num_frames: 2, fps: 4}}"
    parts = [f"model.foundation={tiny['qwen3']}", f"model.decoders.film_decoder={decoder}"]
    if latents:
        parts += ["model.decoders.film_decoder.flow={kind: in_context, num_steps: 2}"]
        parts += ["evaluation.sampling.film_decoder.temperature=0"]
    return [*parts, *(f"data.{part}=[{{path: {tiny['films']}}}]" for part in ("train", "heldout"))]


@pytest.mark.parametrize("latents", [False, pytest.param(True, marks=pytest.mark.second)])
def test_a_language_model_learns_to_write_films_and_is_evaluated_with_guidance(
    tiny: dict[str, str], tmp_path: Path, latents: bool
) -> None:
    of_film = 2 * (4 if latents else 16)
    parts = overrides_of_films(tiny, latents=latents)
    assert run("text_to_film", tmp_path, *parts, f"evaluation.max_new_tokens={of_film + 2}") == {
        "foundation",
        "film_decoder",
    }
    heads = json.loads((tmp_path / "eval.json").read_text())["losses"]["heads"]
    assert heads["film_decoder"]["tokens"] == 8 * of_film


@pytest.mark.slow
@pytest.mark.parametrize("latents", [False, True])
def test_a_language_model_that_writes_films_is_verified(ranks: RankPool, tiny: dict[str, str], latents: bool) -> None:
    recipe = Recipe.load("text_to_film", [*SMALL, *overrides_of_films(tiny, latents=latents)])
    report = verify_recipe(recipe, ["dp2", "tp2", "sp2", "pp2.accum2"], nproc=2, num_samples=8, pool=ranks)
    assert report.ok, [row.reason for row in report.rows]


OMNI = {"llama_omni": ("llama", "wav2vec2"), "qwen3_moe_omni": ("qwen3_moe", "whisper")}


def overrides_of_omni(tiny: dict[str, str], name: str) -> list[str]:
    """Tiny parts for Janus, or for one of the recipes that read and write images and sound."""
    names, parts, more = ["images", "drawings"], {"foundation": name}, [*SMALL]
    if name in OMNI:
        foundation, sound = OMNI[name]
        parts = {"foundation": foundation, "encoders.audio_encoder.tower": sound}
        parts |= {"encoders.image_encoder.tower": "siglip", "decoders.image_decoder.tokenizer": "emu3_vq"}
        parts |= {"decoders.audio_decoder.tokenizer": "mimi"}
        names = ["images", "speech", "drawings", "spoken"]
        more += ["model.decoders.image_decoder.image_size=8", "model.decoders.audio_decoder.num_codebooks=1"]
        more += ["data.pack_tokens=400", "parallel={}"]
    data = [f"data.train.{number}.path={tiny[rows]}" for number, rows in enumerate(names)]
    return [*more, *data, *(f"model.{key}={tiny[part]}" for key, part in parts.items())]


def overrides_of_bagel(tiny: dict[str, str]) -> list[str]:
    """Tiny parts for the recipe with a semantic and a pixel encoder; patches of pixels stand for latents of a VAE."""
    patches = "{config: {model_type: omnitrain_patches, patch_size: 2}}"
    size = "{size: {height: 8, width: 8}}"
    pixels = f"{{tower: {patches}, projector: {{kind: pixel_shuffle}}, processor: {size}}}"
    flow = "{kind: in_context, patch_size: 2, num_steps: 2}"
    return [
        *SMALL,
        f"model.foundation={tiny['qwen3']}",
        f"model.encoders.semantic_encoder.tower={tiny['siglip']}",
        f"model.encoders.pixel_encoder={pixels}",
        f"model.decoders.image_decoder={{tokenizer: {patches}, image_size: 8, flow: {flow}}}",
        *(f"data.train.{n}.path={tiny[rows]}" for n, rows in enumerate(("images", "edits", "drawings"))),
        "model.freeze=[]",
        "parallel={}",
        "train.packs_per_step=4",
    ]


@pytest.mark.second
def test_images_are_read_by_their_meaning_and_pixels_and_written_in_context(
    tiny: dict[str, str], tmp_path: Path
) -> None:
    recipe = Recipe.load("bagel_like", [*overrides_of_bagel(tiny), f"output_dir={tmp_path}"])
    packs = preview(recipe, packs=3).packs
    items = [
        tuple(piece.component for piece in one.pieces if isinstance(piece, ItemView))
        for pack in packs
        for one in pack.samples
    ]
    assert set(items) == {
        ("semantic_encoder",),
        ("pixel_encoder", "semantic_encoder", "image_decoder"),
        ("image_decoder",),
    }
    assert Trainer(recipe).fit().step == 2
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(line["heads"]) == {"text", "image_decoder"}


@pytest.mark.slow
def test_a_model_with_two_image_encoders_and_denoising_in_context_is_verified(
    ranks: RankPool, tiny: dict[str, str]
) -> None:
    """``python -m pytest -m slow tests/test_recipes.py``."""
    recipe = Recipe.load("bagel_like", overrides_of_bagel(tiny))
    report = verify_recipe(
        recipe, ["dp2", "tp2", "pp2.accum2", "semantic_encoder1+dp1"], nproc=2, num_samples=8, pool=ranks
    )
    assert report.ok, [row.reason for row in report.rows]


@pytest.mark.second
@pytest.mark.parametrize("name", [*OMNI, "janus"])
def test_a_model_that_writes_media_is_trained(tiny: dict[str, str], tmp_path: Path, name: str) -> None:
    overrides = [*overrides_of_omni(tiny, name), f"output_dir={tmp_path}", "train.packs_per_step=8"]
    assert Trainer(Recipe.load(name, overrides)).fit().step == 2
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(line["heads"]) == {"text", "image_decoder", *["audio_decoder"] * (name in OMNI)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OMNI, "janus"])
def test_a_model_that_writes_media_is_verified(ranks: RankPool, tiny: dict[str, str], name: str) -> None:
    """``python -m pytest -m slow tests/test_recipes.py``."""
    layouts = ["dp2", "tp2", "pp2.accum2", "vision1+dp1", *["dp2.ep2"] * (name == "qwen3_moe_omni")]
    recipe = Recipe.load(name, overrides_of_omni(tiny, name))
    report = verify_recipe(recipe, layouts, nproc=2, num_samples=8, pool=ranks)
    assert report.ok, [row.reason for row in report.rows]


def test_the_tower_of_a_whole_model_serves_another_language_model(tiny: dict[str, str], tmp_path: Path) -> None:
    parts = (f"model.foundation={tiny['llama']}", f"model.encoders.image_encoder.tower={tiny['qwen2_5_vl']}")
    moved = run("qwen_tower", tmp_path, *parts, f"data.train=[{{path: {tiny['images']}}}]")
    assert moved == {"image_encoder.projector"}


def test_a_whole_model_is_fine_tuned_behind_its_frozen_tower(tiny: dict[str, str], tmp_path: Path) -> None:
    own = (f"model.foundation={tiny['llava']}", "data.processor_arguments={}")
    assert run("finetune_vlm", tmp_path, *own, f"data.train=[{{path: {tiny['images']}}}]") == {"foundation"}


@pytest.fixture
def qwen3_vl_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor that a folder of a Qwen3-VL would have: transformers loads it only where torchvision is."""
    made = qwen3_vl()[0]
    monkeypatch.setattr("omnitrain.data.chat.text_tokenizer.AutoProcessor.from_pretrained", lambda path: made)
    monkeypatch.setattr(type(made), "save_pretrained", lambda self, folder: self.tokenizer.save_pretrained(folder))


def qwen3_vl_overrides(tiny: dict[str, str], name: str) -> list[str]:
    data = [f"data.train=[{{path: {tiny['clips' if name == 'long_video' else 'images']}}}]"]
    model = "qwen3_vl_moe_whole" if name == "qwen3_vl_moe" else "qwen3_vl_whole"
    own = ["data.processor_arguments={}"] if name != "long_video" else ["data.fps=null", "data.max_pixels=null"]
    layout = ["parallel={}"] if name in ("qwen3_vl_moe", "long_video") else []  # ranks have no such processor
    return [f"model.foundation={tiny[model]}", "train.packs_per_step=2", *layout, *own, *data]


@pytest.mark.usefixtures("qwen3_vl_processor")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl_lora",
        pytest.param("qwen3_vl", marks=pytest.mark.second),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.second),
    ],
)
def test_a_whole_qwen3_vl_is_fine_tuned(tiny: dict[str, str], tmp_path: Path, name: str) -> None:
    assert run(name, tmp_path, *qwen3_vl_overrides(tiny, name)) == {"foundation"}


@pytest.mark.second
@pytest.mark.usefixtures("qwen3_vl_processor")
def test_qwen3_vl_learns_from_films(tiny: dict[str, str], tmp_path: Path) -> None:
    recipe = Recipe.load("long_video", [*SMALL, *qwen3_vl_overrides(tiny, "long_video"), f"output_dir={tmp_path}"])
    (pack,) = preview(recipe, packs=1).packs
    shown = [
        piece.part.modality for one in pack.samples for piece in one.pieces if isinstance(piece, ItemView) if piece.part
    ]
    assert set(shown) == {"video"}
    assert Trainer(recipe).fit().step == 2


@pytest.mark.second
def test_a_run_that_may_be_stopped_keeps_its_newest_and_its_best_checkpoint_and_goes_on(
    tiny: dict[str, str], tmp_path: Path
) -> None:
    data = [f"data.{kind}=[{{path: {tiny['images']}}}]" for kind in ("train", "heldout")]
    parts = [f"model.foundation={tiny['llava']}", *data]
    often = [
        "train.save.every=1",
        "train.save.background=false",
        "evaluation={loss_every: 1, max_new_tokens: 1}",
        "train.packs_per_step=2",
    ]
    overrides = [*SMALL, *parts, *often, f"output_dir={tmp_path / 'run'}"]
    look_at(Recipe.load("preemptible", overrides))
    for steps in (2, 4):
        Trainer(Recipe.load("preemptible", [*overrides, f"train.steps={steps}"]), resume="auto").fit()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["heldout"]["loss"] for line in lines}
    kept = {int(folder.name[5:]) for folder in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {3, 4, min(losses, key=lambda step: (losses[step], step))} and len(losses) == 4


def test_a_language_model_is_fine_tuned_for_epochs_and_scored_on_the_way(tiny: dict[str, str], tmp_path: Path) -> None:
    data = [f"data.{kind}=[{{path: {tiny['texts']}}}]" for kind in ("train", "heldout")]
    small = [override for override in SMALL if "train.steps" not in override]
    fast = ["train.samples_per_step=4", "evaluation.every=2", "evaluation.max_new_tokens=1", "data.pack_tokens=140"]
    overrides = [*small, *data, *fast, f"model.foundation={tiny['qwen3']}", f"output_dir={tmp_path / 'run'}"]
    summary = Trainer(Recipe.load("finetune_text", overrides)).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == pytest.approx(3, rel=0.2) and summary.step == lines[-1]["step"]
    assert [line["step"] for line in lines if "scores" in line] == [*range(2, summary.step, 2)] != []


def test_a_language_model_is_pretrained_on_pages_that_are_longer_than_a_pack(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A page\n\n" + "It is longer than a pack. " * 20)
    often = ["train.epochs=null", f"data.heldout.0.path={tmp_path}/page.md", "evaluation.loss_every=2"]
    recipe = Recipe.load("pretrain_text", [*SMALL, *often, f"output_dir={tmp_path / 'run'}"])
    (pack,) = preview(recipe, packs=1).packs
    assert pack.fill > 0.9 and sum(pack.predicted.values()) == pack.num_tokens  # every token is trained
    summary = Trainer(recipe).fit()
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1:])
    assert (summary.step, *line["sources"]) == (2, "pages") and line["heldout"]["sources"]["page"]["text"]["loss"] > 0
    assert (tmp_path / "run" / "rejected.jsonl").read_text() == ""  # held-out pages have a loss, and ask nothing


@pytest.mark.second
def test_a_mixture_of_shards_texts_and_parquet_changes_its_weights_at_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--folder", str(tmp_path / "data")])
    runpy.run_path("tasks/mixture/make_data.py", run_name="__main__")
    for text in (tmp_path / "data" / "texts").iterdir():
        text.write_text(text.read_text()[:100])  # a small part of a pack
    files = ("captions-{00..03}.tar", "texts", "questions.parquet")
    where = [f"data.train.{i}.path={tmp_path}/data/{name}" for i, name in enumerate(files)]
    stages = ["data.stages.0.from_step=4", "data.stages.1.from_step=8"]
    short = ["train.steps=14", "train.log_every=1", f"output_dir={tmp_path / 'run'}"]
    recipe = Recipe.load("data_mixture", [*SMALL, *where, *stages, *short])
    assert [one.rows for one in data_stats(recipe, rows=10).data_sets] == [1500, 100, 3000]
    Trainer(recipe).fit()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    seen = [{"questions" if "image" in name else name for name in line["sources"]} for line in lines]
    first, second, third = (set().union(*seen[start:stop]) for start, stop in ((0, 4), (4, 8), (11, 14)))
    assert first == {"captions", "texts"} and second == {*first, "questions"}
    assert "captions" not in third and "questions" in third  # what waited for a pack is used up


def steps_on_a_rank(name: str, overrides: list[str]) -> int:
    return Trainer(Recipe.load(name, [*SMALL, *overrides])).fit().step


def run_on_ranks(ranks: RankPool, world: int, name: str, overrides: list[str]) -> list[int]:
    """Train two steps; returns the steps of each rank."""
    look_at(Recipe.load(name, [*SMALL, *overrides]))
    return ranks.run(steps_on_a_rank, name, overrides, timeout_s=120, world=world)


@pytest.mark.second
def test_experts_and_rows_lie_on_several_ranks(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [f"model.foundation={tiny['qwen3_moe']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    layout = [
        "train.packs_per_step=2",
        "parallel.default.ulysses=2",
        "parallel.default.ep=2",
        "parallel.default.experts.chunks=2",
    ]
    overrides = [*parts, *layout, f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "long_experts", overrides) == [2] * 2
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1:])
    assert all(layer["load"] >= 1 and layer["bytes"] > 0 for layer in line["experts"].values())


@pytest.mark.second
def test_rows_and_calls_of_the_tower_lie_on_several_ranks(
    ranks: RankPool, tiny: dict[str, str], tmp_path: Path
) -> None:
    parts = [f"model.foundation={tiny['llama']}", f"model.encoders.image_encoder.tower={tiny['qwen2_5_vl']}"]
    layout = ["parallel.default.ulysses=2", "parallel.components.image_encoder.ulysses=2"]
    overrides = [*parts, *layout, f"data.train=[{{path: {tiny['images']}}}]", f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "long_documents", overrides) == [2] * 2


@pytest.mark.second
def test_stages_of_a_pipeline_train_interleaved(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [f"model.foundation={tiny['deep']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    layout = ["parallel.components.foundation.pp=2", "train.packs_per_step=3"]
    overrides = [*parts, *layout, f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "pipeline", overrides) == [2] * 2


@pytest.mark.second
def test_all_pipeline_ranks_encode_the_images_of_a_step(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [f"model.foundation={tiny['deep']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    layout = ["parallel.components.foundation.pp=2", "train.packs_per_step=3"]
    overrides = [*parts, *layout, f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "separate_encoder", overrides) == [2] * 2


@pytest.mark.second
def test_a_tower_trains_on_a_rank_of_its_own(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [f"model.foundation={tiny['qwen3']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    overrides = [*parts, "train.packs_per_step=4", f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "vision_section", overrides) == [2] * 2


@pytest.mark.second
def test_two_towers_share_a_rank_of_their_own(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [
        f"model.encoders.{name}_encoder.tower={tiny[of]}" for name, of in (("image", "siglip"), ("audio", "whisper"))
    ]
    parts += [f"model.foundation={tiny['qwen3']}", "model.encoders.image_encoder.projector.factor=2"]
    parts += [f"data.train=[{{path: {tiny['images']}}}, {{path: {tiny['speech']}}}]", "train.packs_per_step=4"]
    overrides = [*parts, f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 3, "media_section", overrides) == [2] * 3
    rows = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["encoders"]
    assert all(rows[name]["busy"] > 0 for name in ("image_encoder", "audio_encoder"))


@pytest.mark.second
def test_a_frozen_tower_is_ahead_of_its_projector(ranks: RankPool, tiny: dict[str, str], tmp_path: Path) -> None:
    parts = [f"model.foundation={tiny['qwen3']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    overrides = [*parts, "train.packs_per_step=4", "data.workers=1", f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "tower_section", overrides) == [2] * 2
    rows = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["encoders"]
    assert rows["image_encoder.tower"]["moved"] == rows["image_encoder.tower"]["items"] > 0


@pytest.mark.second
def test_a_decoder_computes_its_losses_on_a_rank_of_its_own(
    ranks: RankPool, tiny: dict[str, str], tmp_path: Path
) -> None:
    decoder = [f"model.decoders.image_decoder.{one}" for one in ("image_size=8", "flow={width: 16, depth: 1}")]
    parts = [f"model.foundation={tiny['qwen3']}", *decoder, f"data.train=[{{path: {tiny['drawings']}}}]"]
    overrides = [*parts, "train.packs_per_step=4", f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "decoder_section", overrides) == [2] * 2
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["heads"]["image_decoder"]["loss"] > 0 and line["encoders"]["image_decoder"]["busy"] > 0


@pytest.mark.second
@pytest.mark.parametrize(("name", "teacher"), [("teacher_section", "deep"), ("distill_moe", "qwen3_moe")])
def test_a_student_learns_from_a_teacher_on_ranks_of_its_own(
    ranks: RankPool, tiny: dict[str, str], tmp_path: Path, name: str, teacher: str
) -> None:
    parts = [f"model.foundation={tiny['qwen3']}", f"model.teachers.big.path={tiny[teacher]}"]
    own = 1 if name == "teacher_section" else 2  # ranks of each section
    layout = [f"parallel.sections.teachers.ranks={own}", "train.packs_per_step=4", "data.workers=1"]
    layout += ["parallel.components.big.ep=2"] * (own - 1)
    layout += ["data.chat.end=<|end|>"]  # a token of both
    overrides = [*parts, *layout, f"data.train=[{{path: {tiny['texts']}}}]", f"output_dir={tmp_path / 'run'}"]
    assert ranks.run(steps_on_a_rank, name, overrides, timeout_s=120, world=2 * own) == [2] * 2 * own
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["encoders"]["big"]["moved"] > 0 and 0 <= line["metrics"]["agreement"]["big"] <= 1


@pytest.mark.second
def test_forwards_and_backwards_of_stages_with_experts_run_in_turn(
    ranks: RankPool, tiny: dict[str, str], tmp_path: Path
) -> None:
    parts = [f"model.foundation={tiny['qwen3_moe']}", f"model.encoders.image_encoder.tower={tiny['siglip']}"]
    parts += ["model.encoders.image_encoder.projector.factor=2", f"data.train=[{{path: {tiny['images']}}}]"]
    foundation = "parallel.components.foundation"
    layout = [
        f"{foundation}.ep=2",
        f"{foundation}.pp=1",
        f"{foundation}.schedule.chunks=null",
        "train.packs_per_step=4",
    ]
    overrides = [*parts, *layout, f"output_dir={tmp_path / 'run'}"]
    assert run_on_ranks(ranks, 2, "overlapped_experts", overrides) == [2] * 2


def test_the_quickstart_shows_its_data() -> None:
    (pack,) = preview("quickstart", packs=1).packs
    components = {piece.component for sample in pack.samples for piece in sample.pieces if isinstance(piece, ItemView)}
    assert components == {"image_encoder", "audio_encoder", "image_decoder", "audio_decoder"} and pack.fill > 0.95
    stats = data_stats("quickstart", rows=100)
    assert stats.packing.fill > 0.95 and len(stats.sources) == 8 and not stats.rejected


def test_every_shipped_recipe_is_run_here_or_by_make_quickstart() -> None:
    run_here = {*STAGES, "speech_language", "qwen_tower", "finetune_vlm", "long_experts", "long_documents", "pipeline"}
    run_here |= {"overlapped_experts", "separate_encoder", "vision_section", "media_section", "preemptible"}
    run_here |= {"finetune_text", "pretrain_text", "data_mixture", "teacher_section", "tower_section"}
    run_here |= {"text_to_image", "text_to_latents", "text_to_film", "two_towers", "bagel_like", "janus", *OMNI}
    run_here |= {"qwen3_vl", "qwen3_vl_lora", "qwen3_vl_moe", "long_video", "deepseek_v3", "own_images", *MODELS}
    run_here |= {"decoder_section", "distill_moe"}
    assert set(list_recipes()) == run_here | {"quickstart"}
