"""Tiny models, rows and recipes that the tests share: every modality, random weights, no files but those made here."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import yaml
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pillow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import ChatFormat

CHAT = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "end": "<|end|>", "separator": ""}
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|audio|>", "<|video|>"]

FOUNDATION = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "vision_use_head": False,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 0,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 25,
}
JANUS_VQ = {
    "model_type": "janus_vqgan",
    "embed_dim": 4,
    "num_embeddings": 16,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "latent_channels": 32,
    "num_patches": 4,
}
MEL_VQ = {"model_type": "omnitrain_mel_vq", "codebook_size": 32}
EXTRACTOR = {"sampling_rate": 16000, "hop_length": 320, "n_fft": 640, "chunk_length": 1}

MODEL = {
    "foundation": FOUNDATION,
    "encoders": {
        "image_encoder": {"tower": {"config": SIGLIP}, "projector": {"kind": "pixel_shuffle"}},
        "audio_encoder": {
            "tower": {"config": WHISPER},
            "projector": {"kind": "pixel_shuffle"},
            "processor": EXTRACTOR,
        },
    },
    "decoders": {
        "image_decoder": {"tokenizer": {"config": JANUS_VQ}, "image_size": 8},
        "audio_decoder": {"tokenizer": {"config": MEL_VQ}, "max_tokens": 12},
    },
}
TASKS = (
    "text",
    "image_to_text",
    "speech_to_text",
    "video_to_text",
    "images_to_text",
    "text_to_image",
    "image_to_speech",
)


def tiny_model(seed: int = 0, **changes: Any) -> OmniModel:
    """A model of all modalities; weights redrawn wide, so that attention is peaked and positions matter.

    A process builds it once, and copies it: that takes a third of the time. It is built where files are read.
    """
    try:
        described = json.dumps(changes)
    except TypeError:
        return _built(seed, changes)
    if "/" in described:
        return _built(seed, changes)
    model, state = _built_once(seed, described, torch.get_default_device(), torch.get_default_dtype())
    torch.set_rng_state(state)
    return copy.deepcopy(model)


@cache
def _built_once(seed: int, changes: str, device: torch.device, dtype: torch.dtype) -> tuple[OmniModel, torch.Tensor]:
    """A model that nothing runs or changes, and the state of the random numbers after its build."""
    return _built(seed, json.loads(changes)), torch.get_rng_state()


def _built(seed: int, changes: dict[str, Any]) -> OmniModel:
    torch.manual_seed(seed)
    model = build_omni_model(**(MODEL | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim >= 2:
                parameter.normal_(std=0.3 if "embed" in name else parameter.size(-1) ** -0.5)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the special tokens, 264 in all."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def tiny_processor(model: OmniModel) -> OmniProcessor:
    """The processor of :func:`tiny_model`."""
    return OmniProcessor(ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT)), *model.media_adapters())


def png(seed: int, side: int = 8) -> bytes:
    """A random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return _saved(Pillow.fromarray(pixels), format="PNG")


def wav(seed: int, seconds: float = 0.3, rate: int = 8000) -> bytes:
    """A random tone."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    stream = io.BytesIO()
    soundfile.write(stream, 0.5 * np.sin(2 * np.pi * generator.uniform(200, 2000) * time), rate, format="WAV")
    return stream.getvalue()


def webp(seed: int, frames: int = 3) -> bytes:
    """A random video."""
    images = [Pillow.open(io.BytesIO(png(1000 * seed + i))) for i in range(frames)]
    return _saved(images[0], format="WEBP", save_all=True, append_images=images[1:], lossless=True, duration=500)


def _saved(image: Pillow.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, **options)
    return stream.getvalue()


def part(kind: str, text: str | None = None) -> dict[str, Any]:
    """One content part."""
    return {"type": kind, "text": text}


def tiny_row(task: str, seed: int) -> Row:
    """A row of ``task`` (one of TASKS, ``image_to_image`` or ``text_to_film``); texts differ in length by ``seed``."""
    ask, say = part("text", "what is it " + "x" * (seed % 5)), part("text", f"{seed % 10}" * (1 + seed % 3))
    content = {
        "text": ([ask], [say]),
        "image_to_text": ([part("image"), ask], [say]),
        "speech_to_text": ([part("audio"), ask], [say]),
        "video_to_text": ([part("video"), ask], [say]),
        "images_to_text": ([part("image"), part("image"), ask], [say]),
        "text_to_image": ([ask], [part("image")]),
        "image_to_image": ([part("image"), ask], [part("image")]),
        "image_to_speech": ([part("image"), ask], [part("audio")]),
        "text_to_film": ([ask], [part("video")]),
    }[task]
    parts = [p["type"] for p in (*content[0], *content[1])]
    media = {
        "image": [png(10 * seed + i) for i in range(parts.count("image"))],
        "audio": [wav(seed, 0.2 + 0.05 * (seed % 4)) for _ in range(parts.count("audio"))],
        "video": [webp(seed, 2 + seed % 2) for _ in range(parts.count("video"))],
    }
    messages = [{"role": "user", "content": content[0]}, {"role": "assistant", "content": content[1]}]
    return Row(id=f"{task}/{seed}", source=task, messages=messages, media=media, extra={})


def tiny_samples(processor: OmniProcessor, count: int = 14, tasks: Sequence[str] = TASKS) -> list[Sample]:
    """Samples of these tasks in turn."""
    made = [processor.sample(tiny_row(tasks[i % len(tasks)], seed=i), index=i) for i in range(count)]
    rejected = [sample for sample in made if isinstance(sample, Rejected)]
    assert not rejected, rejected
    return [sample for sample in made if isinstance(sample, Sample)]


def write_parquet(path: Path, rows: list[Row]) -> Path:
    """Rows as a parquet file with HF features."""
    records = [
        {"id": r.id, "task": r.source, "messages": r.messages}
        | {f"{m}s": [{"bytes": data, "path": None} for data in r.media[m]] for m in ("image", "audio", "video")}
        for r in rows
    ]
    content = List({"type": Value("string"), "text": Value("string")})
    file = List({"bytes": Value("binary"), "path": Value("string")})
    features = Features(
        {
            "id": Value("string"),
            "task": Value("string"),
            "messages": List({"role": Value("string"), "content": content}),
            "images": List(Image(decode=False)),
            "audios": file,
            "videos": file,
        }
    )
    Dataset.from_list(records, features=features).to_parquet(str(path))
    return path


def tiny_recipe(
    folder: Path, rows: int = 28, *, evaluated: bool = False, text_only: bool = False, **train: Any
) -> Path:
    """A recipe file over a parquet file of all tasks, both in ``folder``.

    ``evaluated``: on the same rows; ``text_only``: a language model and the first task, a quarter of the time.
    """
    tasks = TASKS[:1] if text_only else TASKS
    model = {} if text_only else {part: MODEL[part] for part in ("encoders", "decoders")}
    data = write_parquet(folder / "train.parquet", [tiny_row(tasks[i % len(tasks)], i) for i in range(rows)])
    tiny_tokenizer().save_pretrained(str(folder / "tokenizer"))
    source = {"path": str(data), "sample_seconds": None}  # without the process that would prepare rows with media
    recipe = {
        "output_dir": str(folder / "run"),
        "model": {"foundation": {"config": FOUNDATION}, **model, "tokenizer": str(folder / "tokenizer")},
        "data": {
            "train": [source],
            **({"heldout": [source]} if evaluated else {}),
            "chat": CHAT,
            "pack_tokens": 160,
            "packing_buffer": 8,
            "workers": 0,
        },
        "train": {
            "steps": 4,
            "cpu_threads": 1,
            "log_every": 1,
            "report": False,
            "optimizer": {"warmup_steps": 1},
            **train,
            "save": {"background": False, **train.get("save", {})},  # the process that writes takes 2 s to start
        },
        **({"evaluation": {"max_new_tokens": 1}} if evaluated else {}),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def tiny_moe_recipe(folder: Path, *, evaluated: bool = False) -> Path:
    """The same over text alone, two packs per step, of a language model with eight experts per layer."""
    path = tiny_recipe(folder, evaluated=evaluated, packs_per_step=2)
    recipe = yaml.safe_load(path.read_text())
    config = {key: value for key, value in FOUNDATION.items() if key != "head_dim"} | EXPERTS
    recipe["model"] = {"foundation": {"config": config}, "tokenizer": recipe["model"]["tokenizer"]}
    write_parquet(Path(recipe["data"]["train"][0]["path"]), [tiny_row("text", seed) for seed in range(28)])
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
