"""Models whose decoders write latents or films, and the layouts in which they train: a covering array."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import ChatFormat
from tests.covering import covering
from tests.data.render.test_several_encoders import DINO
from tests.models.decoders.test_decoders import IMAGE_TOKENIZERS
from tests.models.decoders.test_sizes import SIZES, drawing
from tests.tiny import (
    CHAT,
    EXPERTS,
    FOUNDATION,
    JANUS_VQ,
    MODEL,
    tiny_model,
    tiny_processor,
    tiny_row,
    tiny_samples,
    tiny_tokenizer,
)

PATCHES = {"model_type": "omnitrain_patches", "patch_size": 4}
FLOW: dict[str, Any] = {
    "tokenizer": {"config": PATCHES},
    "image_size": 8,
    "flow": {"width": 32, "depth": 2, "num_steps": 4},
}
CONTEXT = {"tokenizer": {"config": PATCHES}, "image_size": 8, "flow": {"kind": "in_context", "num_steps": 3}}
FILM = {"tokenizer": {"config": JANUS_VQ | {"num_patches": 2}}, "image_size": 4, "num_frames": 2}
DECODERS = {"flow head": FLOW, "in context": CONTEXT, "film": FILM, "film in context": CONTEXT | {"num_frames": 2}}
BOTH = "codes and latents"  # two decoders of images; the other decoder is as in context
DRAWN = ((8, 16), (8, 8), (12, 8))  # width and height
PLACES = ("", "group", "world")
MEMORY = ("", "recompute")
LAYOUTS = ("dp2", "tp2", "sp2", "cp2", "pp2.accum2", "dp2.ep2", "vision1+dp2")
TASKS = ("image_to_text", "image_to_speech", "text")


class Case(NamedTuple):
    """A case: a decoder of images or films, and one of sound in codes, under a layout; an empty field is unset.

    Attributes:
        decoder: how it writes.
        layout: of all components.
        place: the rank that encodes an item.
        memory: of all components.
    """

    decoder: str
    layout: str
    place: str
    memory: str

    @property
    def words(self) -> str:
        return ".".join(filter(None, (self.layout, self.place, self.memory)))


POSSIBLE = [Case(*values) for values in product(DECODERS, LAYOUTS, PLACES, MEMORY)]
TABLE = list(covering(POSSIBLE))
TABLE_OF_BOTH = list(covering([case._replace(decoder=BOTH) for case in POSSIBLE if case.decoder == "in context"]))
DEFAULT = list(covering(TABLE, lambda case: set(enumerate(case))))


def build(decoder: str, with_experts: bool = False) -> OmniModel:
    """A decoder of images or films, one of sound in codes, and an encoder of images; or two of each for images."""
    encoders = {"image_encoder": MODEL["encoders"]["image_encoder"]}
    decoders = {"image_decoder": DECODERS.get(decoder, CONTEXT), "audio_decoder": MODEL["decoders"]["audio_decoder"]}
    if decoder == BOTH:
        encoders |= {"pixel_encoder": {"tower": {"config": DINO}, "projector": {"kind": "linear"}}}
        decoders |= {"image_codes": {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_sizes": SIZES}}
    return tiny_model(foundation=FOUNDATION | (EXPERTS if with_experts else {}), encoders=encoders, decoders=decoders)


def factory(case: Case) -> partial[OmniModel]:
    """Build the model of a case; only expert parallelism needs experts."""
    return partial(build, case.decoder, "ep" in case.layout)


def samples(model: OmniModel, count: int = 5) -> list[Sample]:
    """Samples that write images or films, and sound, and read images; those in codes have three sizes."""
    if "image_codes" not in model.decoders:
        return tiny_samples(tiny_processor(model), count, (written(model), *TASKS, written(model)))
    chat = ChatFormat(**CHAT, starts={"image_codes": "<|video|>"})
    processor = OmniProcessor(ChatRenderer(tiny_tokenizer(), chat), *model.media_adapters())
    rows = [
        replace(tiny_row(task, seed), decoders=["image_decoder", "audio_decoder"])
        for seed, task in enumerate(("text_to_image", *TASKS))
    ]
    rows += [replace(drawing(*size, seed), decoders=["image_codes"]) for seed, size in enumerate(DRAWN)]
    return [processor.sample(row, index) for index, row in enumerate(rows)]


def written(model: OmniModel) -> str:
    """The task of the decoder."""
    return "text_to_film" if model.image_decoder.num_frames else "text_to_image"
