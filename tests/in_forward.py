"""Models that read media in their own forward alone, their processors, rows, and what transformers makes of these."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, PreTrainedModel, ProcessorMixin
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import Phi4MultimodalFeatureExtractor
from transformers.models.phi4_multimodal.processing_phi4_multimodal import Phi4MultimodalProcessor

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.media import MediaFile, decode_audio
from omnitrain.data.sources.rows import Row
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from tests.models.shrunk import small_configs
from tests.tiny import part, png, wav
from tests.tiny_processors import byte_tokenizer, chatml, processor_class, qwen2_audio


class Crops:
    """Images as two crops of 16 x 16 pixels, one of them the whole: what Phi-4's processor makes with torchvision."""

    model_input_names = ("image_pixel_values", "image_sizes", "image_attention_mask")

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        every = [image for group in images for image in group] if isinstance(images[0], list) else list(images)
        pixels = [np.asarray(image.convert("RGB").resize((16, 16)), dtype=np.float32) / 255 for image in every]
        crops = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)[:, None].repeat(1, 2, 1, 1, 1)
        data = {
            "image_pixel_values": crops,
            "image_sizes": torch.full((len(every), 2), 448),
            "image_attention_mask": torch.ones(len(every), 2, 4, 4, dtype=torch.long),
            "num_img_tokens": [13] * len(every),  # two rows of 2 + 1, a mark, and the same of the whole
        }
        return BatchFeature(data)


def phi4_processor() -> ProcessorMixin:
    """Images and sound."""
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|image|>", "<|audio|>"]
    named = {"image_token": special[3], "audio_token": special[4]}
    tokenizer = byte_tokenizer(special, eos_token="<|end|>", **named)
    shown = chatml(image="<|image|>", audio="<|audio|>").replace("<|im_start|>", "<|").replace("<|im_end|>", "<|end|>")
    template = shown.replace("{{ m.role }}\n", "{{ m.role }}|>").replace("<|assistant\n", "<|assistant|>")
    listener = Phi4MultimodalFeatureExtractor(feature_size=64)
    return processor_class(Phi4MultimodalProcessor)(Crops(), listener, tokenizer, chat_template=template)


def qwen2_audio_model() -> PreTrainedModel:
    """Sound; a tower beside the language model."""
    config = next(small_configs("qwen2_audio"))
    config.audio_token_id = 4
    config.audio_config.num_mel_bins, config.audio_config.max_source_positions = 8, 100
    return _peaked(config)


def phi4_model() -> PreTrainedModel:
    """Images and sound; towers among the layers of the language model."""
    config = next(small_configs("phi4_multimodal"))
    config.vision_config.image_token_id, config.audio_config.audio_token_id = 3, 4
    config.pad_token_id = 0
    config.audio_config.nemo_final_size = config.audio_config.input_size // config.audio_config.time_reduction
    return _peaked(config)


def _peaked(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], ProcessorMixin]]] = {
    "qwen2_audio": (qwen2_audio_model, lambda: qwen2_audio()[0]),
    "phi4_multimodal": (phi4_model, phi4_processor),
}


def row(*turns: str) -> Row:
    """Users and assistants in turn; of users, ``i`` and ``a`` alone stand for media."""
    kinds = {"i": "image", "a": "audio"}
    messages, media = [], {"image": [], "audio": [], "video": []}
    for number, turn in enumerate(turns):
        parts = []
        for text in turn.split("+"):
            kind = kinds.get(text) if number % 2 == 0 else None
            parts.append(part(kind) if kind else part("text", text))
            if kind:
                seed = sum(map(len, media.values()))
                media[kind].append(png(seed, 9) if kind == "image" else wav(seed, 0.3 + 0.2 * seed))
        messages.append({"role": "user" if number % 2 == 0 else "assistant", "content": parts})
    return Row("r", "s", messages, media, {})


ROWS = {
    "qwen2_audio": (row("a+what?", "A"), row("hi", "B c"), row("a+a+and\n\n", "\nC", "more", "d")),
    "phi4_multimodal": (row("a+what?", "A"), row("hi", "B c"), row("i+a+and", "C", "i", "d"), row("i+?", "yes")),
}


def omni(family: str) -> tuple[OmniModel, OmniProcessor]:
    """The model of a family and its processor."""
    make, processor = FAMILIES[family]
    model = build_omni_model(foundation=make())
    return model, OmniProcessor(TemplateRenderer(processor(), model.native_inputs), {}, {})


def samples(family: str, processor: OmniProcessor) -> list[Sample]:
    """Of :data:`ROWS`."""
    made = [processor.sample(one, index) for index, one in enumerate(ROWS[family])]
    assert all(isinstance(one, Sample) for one in made), made
    return made


def arguments(processor: ProcessorMixin, conversation: Row, *, is_prompt: bool = False) -> dict[str, Tensor]:
    """What transformers makes of a conversation in one call."""
    images = iter([Image.open(io.BytesIO(data)) for data in conversation.media["image"]])
    clips = iter([decode_audio(MediaFile.of(data)).resampled(16_000).samples for data in conversation.media["audio"]])
    waiting = {"image": images, "audio": clips}

    def shown(p: dict[str, Any]) -> dict[str, Any]:
        kind = p["type"]
        return {"type": "text", "text": p["text"]} if kind == "text" else {"type": kind, kind: next(waiting[kind])}

    messages = conversation.question if is_prompt else conversation.messages
    messages = [{"role": m["role"], "content": [shown(p) for p in m["content"]]} for m in messages]
    options = {"return_tensors": "pt", "add_special_tokens": False}
    made = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=is_prompt, processor_kwargs=options
    )
    return dict(made)


def plain_loss(model: PreTrainedModel, given: dict[str, Tensor], sample: Sample) -> Tensor:
    """The summed loss of a sample's tokens by plain transformers."""
    np.testing.assert_array_equal(given["input_ids"][0].numpy(), sample.input_ids)
    labels = given["input_ids"][0].where(torch.from_numpy(sample.loss_mask), -100)[1:]
    logits = model(**given, use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def plain_step(model: PreTrainedModel, given: Sequence[dict[str, Tensor]], batch: Sequence[Sample]) -> float:
    """Loss of all samples; gradients are added up in the model."""
    losses = [plain_loss(model, one, sample) for one, sample in zip(given, batch, strict=True)]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses)
