"""Find keys of a recipe that have no effect on its model, once the model and its processor are built."""

from __future__ import annotations

from collections.abc import Iterator

from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import MODALITIES
from omnitrain.errors import UserError
from omnitrain.models.decoders.codec_decoder import CodecDecoder
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.writers import writers_of
from omnitrain.ops.experts.weights import experts_in
from omnitrain.recipe import Decoder, Recipe
from omnitrain.recipe.data import CHAT_TEXTS, VISUAL_KEYS
from omnitrain.recipe.strict import Idle, idle_problems
from omnitrain.recipe.suggest import hint

_KINDS = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}


def require_effect(recipe: Recipe, model: OmniModel, processor: OmniProcessor) -> None:
    """Raise a UserError with one line for each key that ``recipe`` sets without an effect on its model."""
    idle = [*_of_parts(recipe, model), *_of_data(recipe, model, processor), *_of_experts(model)]
    idle += _of_sampling(recipe, model)
    unknown = [*_impossible_sizes(recipe, model, processor), *_unknown_components(recipe, processor)]
    if problems := [*idle_problems(recipe, idle), *unknown]:
        raise UserError(*dict.fromkeys(problems))


def _impossible_sizes(recipe: Recipe, model: OmniModel, processor: OmniProcessor) -> Iterator[str]:
    for name, sampling in recipe.evaluation.sampling.items() if recipe.evaluation else ():
        try:
            if name in model.decoders:
                model.decoders[name].next_classes([], sampling.size)
            elif sampling.size is not None:
                writers_of(model, processor, sampling.size)
        except UserError as error:
            yield f"evaluation.sampling.{name}.size: {error}"


def _of_sampling(recipe: Recipe, model: OmniModel) -> Iterator[Idle]:
    for name, decoder in model.decoders.items():
        for key in sorted(decoder.unused_sampling) if recipe.evaluation else ():
            yield Idle(f"evaluation.sampling.{name}.{key}", f"but {type(decoder).__name__} does not use it; remove it")


def _unknown_components(recipe: Recipe, processor: OmniProcessor) -> Iterator[str]:
    """Yield names of encoders and decoders that the data use and the model does not have."""
    readers, writers = (set().union(*by.values()) for by in (processor.readers, processor.writers))
    named = [("data.chat.starts", list(recipe.data.chat.starts if recipe.data.chat else ()), writers)]
    for kind, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        for number, source in enumerate(sources):
            named.append((f"data.{kind}.{number}.encoders", source.encoders or [], readers))
            named.append((f"data.{kind}.{number}.decoders", source.decoders or [], writers))
    for key, names, known in named:
        yield from (f"{key}: unknown name {name!r}; {hint(name, known)}" for name in names if name not in known)


def _of_parts(recipe: Recipe, model: OmniModel) -> Iterator[Idle]:
    for name in recipe.model.encoders:
        modalities = model.encoders[name].adapter().modalities
        for key in ("fps", "max_frames") if "video" not in modalities else ():
            yield Idle(f"model.encoders.{name}.{key}", "but this encoder reads no video; remove it")
        for key in ("min_pixels", "max_pixels") if not {"image", "video"} & set(modalities) else ():
            yield Idle(f"model.encoders.{name}.{key}", "but a sound has no pixels; remove it")
    for name in recipe.model.decoders:
        decoder = model.decoders[name]
        assert isinstance(decoder, CodecDecoder)
        kind = type(decoder.tokenizer).__name__
        for key in Decoder.model_fields.keys() - {"tokenizer"} - decoder.settings:
            yield Idle(f"model.decoders.{name}.{key}", f"but a decoder with {kind} does not use it; remove it")


def _of_data(recipe: Recipe, model: OmniModel, processor: OmniProcessor) -> Iterator[Idle]:
    renderer, contract = processor.renderer, model.runner.contract
    if not contract.packs:
        yield Idle("data.packing_buffer", f"but a pack has one sample ({contract.why_unpacked}); remove it")
    if isinstance(renderer, TemplateRenderer) and recipe.model.checkpoint is not None:
        yield Idle("data.chat", "but `model.checkpoint` has a chat template; remove it")
    for key in CHAT_TEXTS if isinstance(renderer, TemplateRenderer) and recipe.model.checkpoint is None else ():
        yield Idle(f"data.chat.{key}", "but a HF chat template renders the conversations; remove it")
    if not processor.writers:
        why = "but no decoder writes media, and a sample without media in its answer loses nothing; remove it"
        yield from (Idle(f"data.condition_dropout.{key}", why) for key in ("whole", "text", *MODALITIES))
    for modality in set(MODALITIES) - {*processor.readers, *renderer.native.modalities}:
        yield Idle(f"data.condition_dropout.{modality}", f"but the model reads no {modality}; remove it")
    for modality in set(MODALITIES) - processor.start_tokens.keys():
        yield Idle(f"data.chat.{modality}", f"but no attached encoder or decoder handles {modality}; remove it")
    yield from _of_hf_processor(renderer.native.modalities)
    if renderer.native.modalities:
        yield Idle("model.tokenizer", "but the foundation's processor has its own tokenizer; remove it")


def _of_hf_processor(native: frozenset[str]) -> Iterator[Idle]:
    """Yield keys for media that a HF processor prepares, which are the native media of the foundation."""
    if not native:
        why = "but no HF processor prepares media, because the foundation reads none natively; remove it"
        arguments = (f"processor_arguments.{kind}" for kind in _KINDS.values())
        yield from (Idle(f"data.{key}", why) for key in (*arguments, "audio_in_video", *VISUAL_KEYS))
        return
    for modality in sorted(_KINDS.keys() - native):
        why = f"but the foundation reads no {modality} natively; remove it"
        yield Idle(f"data.processor_arguments.{_KINDS[modality]}", why)
        if modality != "image":
            yield Idle("data.audio_in_video", why)
    for key, modalities in VISUAL_KEYS.items():
        if not native & set(modalities):
            yield Idle(f"data.{key}", f"but the foundation reads no {' or '.join(modalities)} natively; remove it")


def _of_experts(model: OmniModel) -> Iterator[Idle]:
    if next(iter(experts_in(model)), None) is None:
        why = f"but {type(model.foundation).__name__} has no experts; remove it"
        balance = ("loss", "z_weight", "bias_rate", "record", "replay")
        yield from (Idle(f"train.experts.{key}", why) for key in balance)
