"""Tiny HF processors of several families: transformers' own classes around a byte tokenizer, small sizes.

transformers' video processors need torchvision; :class:`TinyVideoProcessor` makes the same patches with numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin, WhisperFeatureExtractor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from omnitrain.data.render.native import NativeInputs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}SHOW{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def chatml(**shown: str) -> str:
    """A ChatML template that shows each modality by the given text."""
    tests = "".join(f"{{% if c.type == '{m}' %}}{text}{{% endif %}}" for m, text in shown.items())
    return CHATML.replace("SHOW", tests + "{% if c.type == 'text' %}{{ c.text }}{% endif %}")


def byte_tokenizer(special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """Bytes, merged line breaks, and special tokens; ``named`` become attributes (``image_token``)."""
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]  # as real vocabularies merge them across the ends of media and turns
    for a, b in merges:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    known = {name: token for name, token in named.items() if name in ("bos_token", "eos_token")}
    extra = {name: token for name, token in named.items() if name not in known}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **known)


class TinyVideoProcessor:
    """Patches of frames for ``size`` in {"patches", "frames"}: Qwen's flattened patches, or whole small frames."""

    patch_size, temporal_patch_size, merge_size = 2, 2, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, kind: str = "patches") -> None:
        self.kind = kind

    def __call__(self, videos: Any, video_metadata: Any = None, **_: Any) -> BatchFeature:
        clips = [clip for group in videos for clip in group] if isinstance(videos[0], list) else list(videos)
        given = video_metadata[0] if video_metadata else [None] * len(clips)
        default = [{"total_num_frames": len(clip), "frames_indices": list(range(len(clip)))} for clip in clips]
        data: dict[str, Any] = {
            "video_metadata": [VideoMetadata(**(g or d)) for g, d in zip(given, default, strict=True)]
        }
        if self.kind == "frames":
            pixels = [clip[:, :8, :8].transpose(0, 3, 1, 2).astype(np.float32) / 255 for clip in clips]
            return BatchFeature({"pixel_values_videos": np.stack(pixels)} | data)
        patches, grids = zip(*(self._patches(clip) for clip in clips), strict=True)
        data |= {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)}
        return BatchFeature(data)

    def _patches(self, clip: np.ndarray) -> tuple[np.ndarray, list[int]]:
        clip = np.concatenate([clip, clip[-1:].repeat(-len(clip) % 2, axis=0)])
        side, merge = self.patch_size, self.merge_size
        t, h, w = len(clip) // 2, clip.shape[1] // (side * merge), clip.shape[2] // (side * merge)
        clip = clip[:, : h * side * merge, : w * side * merge].astype(np.float32) / 255
        blocks = clip.reshape(t, 2, h, merge, side, w, merge, side, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return blocks.reshape(t * h * w * merge**2, -1), [t, h * merge, w * merge]


def processor_class(base: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The class of processors, without its check that all parts are transformers' own."""

    def skip(self: ProcessorMixin, name: str, argument: Any) -> None: ...

    made = type(base.__name__, (base,), {"check_argument_for_proper_class": skip})
    made.__module__ = base.__module__
    return made


def _of(base: type[ProcessorMixin], *args: Any, **kwargs: Any) -> ProcessorMixin:
    return processor_class(base)(*args, **kwargs)


def _qwen_images(**options: Any) -> Qwen2VLImageProcessorPil:
    size = {"shortest_edge": 16, "longest_edge": 400}
    return Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, temporal_patch_size=2, size=size, **options)


_QWEN = ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_QWEN_SHOWN = {m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in ("image", "video")}
_OMNI = [
    *("<|im_end|>", "<|im_start|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
]
_OMNI_SHOWN = {m: f"<|vision_bos|><|{m.upper()}|><|vision_eos|>" for m in ("image", "video")} | {
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"
}


def qwen2_vl() -> tuple[ProcessorMixin, NativeInputs]:
    """Images and videos."""
    tokenizer = byte_tokenizer(_QWEN, eos_token="<|im_end|>")
    made = _of(Qwen2VLProcessor, _qwen_images(), tokenizer, TinyVideoProcessor(), chat_template=chatml(**_QWEN_SHOWN))
    return made, NativeInputs({"image": 2, "video": 3}, ("mm_token_type_ids",))


def qwen3_vl() -> tuple[ProcessorMixin, NativeInputs]:
    """Images, and videos with times between their frames."""
    tokenizer = byte_tokenizer(_QWEN, eos_token="<|im_end|>")
    shown = _QWEN_SHOWN | {"video": "<|video_pad|>"}
    made = _of(Qwen3VLProcessor, _qwen_images(), tokenizer, TinyVideoProcessor(), chat_template=chatml(**shown))
    return made, NativeInputs({"image": 2, "video": 3}, ("mm_token_type_ids",))


def glm4v() -> tuple[ProcessorMixin, NativeInputs]:
    """Images, and videos whose rows are image tokens with times between their frames."""
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"]
    special += [f"<|{edge}_of_{kind}|>" for edge in ("begin", "end") for kind in ("image", "video")]
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
        "{% else %}<|begin_of_{{ c.type }}|><|{{ c.type }}|><|end_of_{{ c.type }}|>{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = byte_tokenizer(special, eos_token="<|endoftext|>")
    made = _of(Glm4vProcessor, _qwen_images(), tokenizer, TinyVideoProcessor(), chat_template=template)
    return made, NativeInputs({"image": 3, "video": 3}, ("mm_token_type_ids",))


def qwen2_5_omni() -> tuple[ProcessorMixin, NativeInputs]:
    """Images, videos and sound; videos with their sound."""
    return _omni(Qwen2_5OmniProcessor)


def qwen3_omni() -> tuple[ProcessorMixin, NativeInputs]:
    """Images, videos and sound; videos with their sound."""
    return _omni(Qwen3OmniMoeProcessor)


def _omni(base: type[ProcessorMixin]) -> tuple[ProcessorMixin, NativeInputs]:
    named = {f"{m}_token": f"<|{m.upper()}|>" for m in ("image", "video", "audio")}
    named |= {f"{kind}_{e}_token": f"<|{kind}_{e}|>" for kind in ("vision", "audio") for e in ("bos", "eos")}
    tokenizer = byte_tokenizer(_OMNI, eos_token="<|im_end|>", **named)
    listener = WhisperFeatureExtractor(feature_size=8, hop_length=160, chunk_length=4)
    made = _of(
        base,
        image_processor=_qwen_images(),
        video_processor=TinyVideoProcessor(),
        feature_extractor=listener,
        tokenizer=tokenizer,
        chat_template=chatml(**_OMNI_SHOWN),
    )
    return made, NativeInputs({"image": 2, "video": 3, "audio": 4})


def qwen2_audio() -> tuple[ProcessorMixin, NativeInputs]:
    """Sound, numbered in the text; clips longer than the extractor's window are cut by it."""
    tokenizer = byte_tokenizer(_OMNI, eos_token="<|im_end|>")
    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=2), tokenizer), NativeInputs(
        {"audio": 4}
    )


def llava() -> tuple[ProcessorMixin, NativeInputs]:
    """Images of one size; the template ends answers with ``</s>`` and the tokenizer's own start is added."""
    tokenizer = byte_tokenizer(["<s>", "</s>", "<image>"], bos_token="<s>", eos_token="</s>")
    images = LlavaImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    made = LlavaProcessor(images, tokenizer, patch_size=4, chat_template=VICUNA)
    return made, NativeInputs({"image": 2})


def gemma3() -> tuple[ProcessorMixin, NativeInputs]:
    """Images of one size between line breaks that merge with the text around them; the template trims texts."""
    special = ["<bos>", "<end_of_turn>", "<start_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    named = {"boi_token": special[3], "image_token": special[4], "eoi_token": special[5]}
    tokenizer = byte_tokenizer(special, bos_token="<bos>", eos_token="<end_of_turn>", **named)
    images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    made = Gemma3Processor(images, tokenizer, chat_template=GEMMA, image_seq_length=4)
    return made, NativeInputs({"image": 4}, ("token_type_ids",))


def internvl() -> tuple[ProcessorMixin, NativeInputs]:
    """Images in tiles, videos in frames with their numbers, both by image tokens."""
    special = ["<|im_end|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    named = dict(zip(("start_image_token", "end_image_token", "context_image_token"), special[2:5], strict=True))
    tokenizer = byte_tokenizer(special, eos_token="<|im_end|>", video_token="<video>", **named)
    images = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, max_patches=4)
    shown = chatml(image="<IMG_CONTEXT>\n", video="<video>\n")
    video = TinyVideoProcessor("frames")
    made = _of(InternVLProcessor, images, tokenizer, video, image_seq_length=2, chat_template=shown)
    return made, NativeInputs({"image": 4, "video": 4})


def _grid_rows(modality: str, features: dict[str, np.ndarray]) -> int:
    return int(features[f"{modality}_grid_thw"].prod()) // 4


def _four_rows(modality: str, features: dict[str, np.ndarray]) -> int:
    return 4


def _two_rows_a_tile(modality: str, features: dict[str, np.ndarray]) -> int:
    return 2 * len(features["pixel_values"])


FAMILIES: dict[str, Callable[[], tuple[ProcessorMixin, NativeInputs]]] = {
    made.__name__: made
    for made in (
        *(qwen2_vl, qwen3_vl, glm4v, qwen2_5_omni, qwen3_omni),
        *(qwen2_audio, llava, gemma3, internvl),
    )
}

# Family -> rows that its model makes of an item.
ROWS: dict[str, Callable[[str, dict[str, np.ndarray]], int]] = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "glm4v"), _grid_rows),
    **dict.fromkeys(("llava", "gemma3"), _four_rows),
    "internvl": _two_rows_a_tile,
}
