"""One image, then two, in the samples of a pack, as transformers' own image processors return them.

A family's sample goes through :func:`from_hf`, like any dict of a HF processor; the reference is the plain model's
forward of the same dict. The numbers of placeholders are those that its feature method returns for it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.discovery import Discovery, discover
from omnitrain.models.discovery.features import row_numbers
from omnitrain.models.discovery.interface import ModalityInterface
from omnitrain.models.discovery.placeholders import marks
from omnitrain.models.discovery.text_run import plain_ids
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from tests.models.every_family import smallest_that_runs

TOLERANCE = 1e-5
SIZES = {"equal sizes": ((1, 1), (1, 1)), "sizes of their own": ((1, 1), (2, 1))}


@dataclass(frozen=True)
class Tried:
    """What became of a family with two media in a sample.

    Attributes:
        refusal: why it is refused, or not tried; empty: neither.
        untried: whether transformers has no such input, or does not run it.
        error: relative difference of the loss from plain transformers'.
        effect: relative difference that another second medium makes in plain transformers.
    """

    refusal: str
    untried: bool = False
    error: float = 0.0
    effect: float = 1.0


def tried(family: str, modality: str, kind: str) -> Tried:
    """A pack of one sample with one medium and one sample with two, against plain transformers.

    Args:
        family: a name of :func:`every_family`.
        modality: what the media are.
        kind: ``probe``: inputs by the names of arguments; or a key of :data:`SIZES`: the family's image processor.
    """
    try:
        model, _, samples = samples_of(family, modality, kind)
        changed = samples_of(family, modality, kind, (2,))[2]
        one, two, other = (_plain_loss(model, sample) for sample in (*samples, *changed))
    except Exception as error:  # whatever a processor or a model raises for sizes that it does not take
        return Tried(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", untried=True)
    count = sum(int((sample["labels"][:, 1:] != -100).sum()) for sample in samples)
    try:
        ours = build_omni_model(foundation=copy.deepcopy(model)).eval()
        made = to_samples(ours.runner.native, samples)
        in_one = ours.runner.contract.packs and not any(sample.is_alone for sample in made)
        packs = [Pack.from_samples(some) for some in ([made] if in_one else [[sample] for sample in made])]
        with torch.no_grad():
            found = sum(float(ours(pack).losses["text"].sum) for pack in packs)
    except UserError as refusal:
        return Tried(str(refusal))
    expected = (one + two) / count
    return Tried("", False, abs(found / count - expected) / expected, abs(other - two) / two)


def samples_of(
    family: str, modality: str, kind: str, seconds: Sequence[int | None] = (None, 1)
) -> tuple[PreTrainedModel, Discovery, list[dict[str, Tensor]]]:
    """The family's model, and a sample for each of ``seconds``: the number of its second medium, if it has one.

    Raises:
        Exception: what the processor or the plain model raises.
    """
    model, native = _model(family)
    made = []
    for second in seconds:
        media = _arguments(model, native.interfaces[modality], kind, [0] if second is None else [0, second])
        made.append(_sample(model, native, modality, media))
    return model, native, made


def modalities_of(family: str) -> tuple[str, ...]:
    """The modalities that a family reads by an interface; none if no small model of it runs."""
    try:
        return tuple(_model(family)[1].interfaces)
    except (UserError, AssertionError):
        return ()


@lru_cache(maxsize=1)
def _model(family: str) -> tuple[PreTrainedModel, Discovery]:
    torch.manual_seed(0)
    model = smallest_that_runs(family)
    assert not isinstance(model, str), model
    init_peaked_(model)
    return model.eval(), discover(model)


# The arguments of media -----------------------------------------------------------------------------------------------


def _arguments(
    model: PreTrainedModel, interface: ModalityInterface, kind: str, numbers: Sequence[int]
) -> dict[str, Tensor]:
    """The media's arguments of one sample; those that the forward does not take are left out, as HF processors do."""
    if kind == "probe":
        made = interface.probe.make(numbers)
    else:
        processor = image_processor(model, interface)
        images = [_image(number, interface, SIZES[kind][min(number, 1)]) for number in numbers]
        made = dict(processor(images=[images], return_tensors="pt"))
    taken = inspect.signature(type(model).forward).parameters
    tensors = {name: torch.as_tensor(value) for name, value in made.items() if name in taken}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def image_processor(model: PreTrainedModel, interface: ModalityInterface) -> Any:
    """The image processor of a model's type, for images as small as its tower takes."""
    prefixes = [name for name in IMAGE_PROCESSOR_MAPPING_NAMES if model.config.model_type.startswith(name)]
    if not prefixes:
        raise LookupError(f"transformers names no image processor for {model.config.model_type}")
    names = IMAGE_PROCESSOR_MAPPING_NAMES[max(prefixes, key=len)]
    kind = get_image_processor_class_from_name(names.get("pil") or names.get("torchvision"))
    vision, default = interface.probe.vision, getattr(kind, "size", None) or {}
    area = (vision.patch * vision.unit) ** 2
    by_pixels = {"shortest_edge": 4 * area, "longest_edge": 16 * area}
    by_side = dict.fromkeys(default, vision.side)
    settings = {
        "size": by_pixels if set(default) == set(by_pixels) and default["longest_edge"] > 10_000 else by_side,
        "crop_size": {"height": vision.side, "width": vision.side},
        "max_image_size": {"longest_edge": vision.side},
        "patch_size": vision.patch,
        "merge_size": vision.merge,
        "spatial_merge_size": vision.merge,
        "temporal_patch_size": vision.temporal,
        "pooling_kernel_size": vision.merge,
        "image_grid_pinpoints": [list(pair) for pair in interface.probe.pinpoints],
        "resample": Image.Resampling.BICUBIC,
    }
    known = {name for name, value in settings.items() if value and (hasattr(kind, name) or name in _valid(kind))}
    return kind(**{name: settings[name] for name in known})


def _valid(kind: Any) -> set[str]:
    return set(getattr(getattr(kind, "valid_kwargs", None), "__annotations__", {}))


def _image(number: int, interface: ModalityInterface, times: tuple[int, int]) -> Image.Image:
    vision = interface.probe.vision
    side = vision.side if interface.probe.layout in ("images", "tiles") else 2 * vision.unit * vision.patch
    height, width = (side * factor for factor in times)
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# A sample, and its loss in plain transformers -------------------------------------------------------------------------


def _sample(model: PreTrainedModel, native: Discovery, modality: str, media: dict[str, Tensor]) -> dict[str, Tensor]:
    """Text around the placeholders of all media, as many as plain transformers takes."""
    problems: list[Exception] = []
    for counts in _placeholders(model, native.interfaces[modality], media):
        ids = _ids(model, native.interfaces[modality].token_id, modality, counts)
        is_media = ids == native.interfaces[modality].token_id
        labels = np.where(is_media | (np.arange(ids.size) < ids.size - 5), -100, ids)
        extras = {name: torch.from_numpy(values)[None] for name, values in native.extras(ids, labels != -100).items()}
        sample = {"input_ids": torch.from_numpy(ids)[None], "labels": torch.from_numpy(labels)[None], **extras, **media}
        try:
            _plain_loss(model, sample)
        except Exception as error:  # another number of placeholders
            problems.append(error)
            continue
        return sample
    raise problems[0]


@torch.no_grad()
def _placeholders(
    model: PreTrainedModel, interface: ModalityInterface, media: dict[str, Tensor]
) -> Iterator[list[int]]:
    """Numbers of features of each item, or of all together, that the feature method's output may have."""
    method = getattr(model.get_submodule(interface.host), interface.method)
    taken = inspect.signature(inspect.unwrap(method)).parameters
    given = {p: ~media[n] if inverted else media[n] for p, (n, inverted) in interface.bindings.items() if n in media}
    given |= {name: value for name, value in media.items() if name in taken}
    output = method(**interface.constants | given, return_dict=True)
    main = getattr(output, "pooler_output", output)
    if isinstance(main, list | tuple) and all(isinstance(piece, Tensor) and piece.ndim > 1 for piece in main):
        yield [piece.numel() // piece.size(-1) for piece in main]
        grids = next((value for name, value in media.items() if name.endswith("grid_thw")), None)
        if grids is not None:  # some models want text between the frames of a video
            frames = grids[:, 0].tolist()
            yield [piece.size(0) // number for piece, number in zip(main, frames, strict=True) for _ in range(number)]
    if isinstance(main, Tensor) and main.ndim == 3:
        yield [main.size(1)] * main.size(0)
    fields = [*output.keys()] if hasattr(output, "keys") else [""]
    for rows in dict.fromkeys(row_numbers(output, fields)):
        yield [rows]


def _ids(model: PreTrainedModel, token: int, modality: str, counts: Sequence[int]) -> np.ndarray:
    text = plain_ids(model, 14)
    opening, closing = marks(model.config, modality) or (text[10], text[11])
    if max(opening, closing) >= model.get_input_embeddings().weight.size(0):
        opening, closing = text[10], text[11]
    runs = [[opening, *[token] * count, closing, text[3 + place % 7]] for place, count in enumerate(counts)]
    return np.array([*text[:3], *chain.from_iterable(runs), *text[4:10]])


@torch.no_grad()
def _plain_loss(model: PreTrainedModel, sample: dict[str, Tensor]) -> float:
    """The sum over the trained tokens."""
    arguments = {name: value for name, value in sample.items() if name != "labels"}
    ids = sample["input_ids"]
    logits = model(**arguments, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1].float()
    return float(F.cross_entropy(logits, sample["labels"][0, 1:], ignore_index=-100, reduction="sum"))
