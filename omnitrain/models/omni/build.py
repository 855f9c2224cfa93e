"""Build a foundation or an omni model from Hub ids, configs or modules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from pydantic import BaseModel, ValidationError
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from omnitrain.data.render.hf_visuals import pixel_arguments
from omnitrain.data.sources.reading import Reading
from omnitrain.errors import UserError
from omnitrain.models.adapters.files import load_adapters
from omnitrain.models.components.protocols import DecoderMixin, EncoderMixin
from omnitrain.models.decoders.codec_decoder import CodecDecoder
from omnitrain.models.decoders.flow import FlowDecoder
from omnitrain.models.decoders.in_context import InContextDecoder
from omnitrain.models.decoders.latents import LatentModel
from omnitrain.models.decoders.of_foundation import decoder_of, find_writer
from omnitrain.models.decoders.tokens import TokenDecoder
from omnitrain.models.decoders.vae import SCALES, vae_at
from omnitrain.models.encoders.audio import AudioEncoder
from omnitrain.models.encoders.towers import JoinedTowers, reads_waveforms, tower_from_source
from omnitrain.models.encoders.vision import VisionEncoder, image_processor
from omnitrain.models.hf.load import (
    Source,
    as_config,
    as_dict,
    config_at,
    foundation_class,
    foundation_config,
    model_class,
    require_folder,
    require_sub_configs,
    resolve,
    untie_as_in_files,
)
from omnitrain.models.hf.stored_tensor import read_weights, weights_left_in_files
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.teacher import Teacher
from omnitrain.peers import is_spread
from omnitrain.recipe import Decoder, Encoder, HFSource, TeacherSource
from omnitrain.recipe.component_configs import (
    AudioEncoderConfig,
    FlowDecoderConfig,
    InContextDecoderConfig,
    OmniConfig,
    TeacherConfig,
    TokenDecoderConfig,
    VisionEncoderConfig,
)
from omnitrain.recipe.problems import problem_lines
from omnitrain.transformers_private import fp32_modules_of

M = TypeVar("M", bound=PreTrainedModel)
Node = TypeVar("Node", bound=BaseModel)

Components = dict[str, dict[str, PreTrainedModel]]
"""Kind (`encoders`, `decoders`, `teachers`) -> component name -> the component."""

_CONFIGS = (AudioEncoderConfig, FlowDecoderConfig, InContextDecoderConfig, TokenDecoderConfig, VisionEncoderConfig)


def build_foundation_model(
    source: Source | Path, *, init_device: str = "cpu", torch_dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build the causal language model that ``source`` names.

    ``source``: Hub id or folder (pretrained weights), HF config or dict with ``model_type``, or a recipe's
    ``{"config": ...}`` (random weights), or a model, which is returned unchanged. Of a model with several stages
    (Qwen-Omni), only the part that reads media is built. ``init_device``: where the weights are created; ``meta``
    creates shapes only. ``torch_dtype``: of the weights; None: fp32 for random weights, else the checkpoint's. Raises
    UserError: ``source`` names no model, it has no language-model head, or it is parallelized already; WeightsError:
    tensors are missing or renamed.
    """
    require_device(init_device)
    source = str(source) if isinstance(source, Path) else source
    if isinstance(source, dict):
        source = source.get("config", source)
    if isinstance(source, (str, dict)):
        require_sub_configs(source)
    elif isinstance(source, PreTrainedModel):
        if is_spread(source):
            raise UserError("the model is parallelized already; build a new model for another layout")
    elif not isinstance(source, PreTrainedConfig):
        raise UserError(
            f"foundation: found a {type(source).__name__}; expected a Hub id, a folder, or a config or model of "
            "transformers"
        )
    config = foundation_config(config_at(source)) if isinstance(source, str) else None
    has_own_head = config is not None and untie_as_in_files(config, foundation_class(config), str(source))
    with _on(init_device), weights_left_in_files():
        described = _described(source, init_device)
        model = resolve(described, foundation_class, torch_dtype, lambda whole: config or foundation_config(whole))
    model.has_own_head = has_own_head or getattr(model, "has_own_head", False)
    if model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} has no language-model head; the foundation must be a causal language model"
        )
    return model if init_device == "meta" else _read_to(model, init_device)


def build_omni_model(
    config_path: str | Path | None = None,
    weights_path: str | Path | None = None,
    *,
    foundation: Source | Path | None = None,
    encoders: dict[str, Any] | None = None,
    decoders: dict[str, Any] | None = None,
    teachers: Mapping[str, Source | TeacherSource | Teacher] | None = None,
    init_device: str = "cpu",
    torch_dtype: torch.dtype | None = None,
) -> OmniModel:
    """Build an omni model from a saved one, from a foundation, encoders and decoders, or from both.

    With both, a part that is given replaces the saved part: ``foundation`` the saved foundation, an encoder or decoder
    the saved one of its name. Encoders and decoders of other names are added, for modalities that no saved one has.
    The other saved parts stay.

    Args:
        config_path: folder of a saved omni model; without ``weights_path`` the weights of its parts are random.
        weights_path: folder of a saved omni model. All its weights are loaded, and its LoRA adapters; a missing tensor
            is an error.
        foundation: see :func:`build_foundation_model`.
        encoders: component name -> :class:`omnitrain.recipe.Encoder` (or its dict, in which ``tower`` may be a ready
            model), or a ready model with :class:`EncoderMixin`.
        decoders: component name -> :class:`omnitrain.recipe.Decoder` (or its dict, in which ``tokenizer`` may be a
            ready model), or a ready model with :class:`DecoderMixin`.
        teachers: component name -> a frozen language model, as :func:`build_foundation_model` takes it, whose last
            hidden states losses read; or :class:`omnitrain.recipe.TeacherSource`, which may make its divergence a loss;
            or a ready ``Teacher``.
        init_device: ``cpu``, ``cuda``, or ``meta`` (shapes only).
        torch_dtype: dtype of the weights (media tokenizers stay fp32); None: the foundation's dtype, which is fp32 for
            random weights and the checkpoint's dtype for loaded weights.

    Raises UserError: neither a saved model nor a foundation is given; a model is unknown; settings do not fit; an
    encoder or decoder does not fit the foundation, or has a modality of a saved one of another name; WeightsError:
    tensors do not fit.
    """
    given = _given(encoders=encoders, decoders=decoders, teachers=teachers)
    saved = _from_checkpoint(config_path, weights_path, init_device, torch_dtype)
    if saved is not None and foundation is None:
        if not any(given.values()):
            return saved
        foundation = saved.foundation
    if foundation is None:
        raise UserError("build_omni_model needs a foundation (or the path of a saved omni model)")
    base = build_foundation_model(foundation, init_device=init_device, torch_dtype=torch_dtype)
    with _on(init_device):
        attached = _attached(base, saved, given, init_device, torch_dtype)
        parts = {"foundation": base} | {name: part for group in attached.values() for name, part in group.items()}
        loaded = saved.config if saved is not None and base is saved.foundation else base
        model = OmniModel(_omni_config(base, attached, loaded), parts)
    if saved is not None:
        kept = {name for name, part in parts.items() if getattr(saved, name, None) is part}
        model.renamed = {name: now for name, now in saved.renamed.items() if name.partition(".")[0] in kept}
    return model if init_device == "meta" else model.to(init_device)


def _given(**kinds: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    for kind, given in kinds.items():
        if not isinstance(given, dict | None):
            raise UserError(f"{kind}: found a {type(given).__name__}; expected a dict, component name -> its settings")
    return {kind: given or {} for kind, given in kinds.items()}


def _attached(
    base: PreTrainedModel,
    saved: OmniModel | None,
    given: dict[str, Mapping[str, Any]],
    init_device: str,
    torch_dtype: torch.dtype | None,
) -> Components:
    """Return the components of each kind: the saved ones, with the given ones in their place or in addition."""
    hidden_size, dtype = base.get_input_embeddings().weight.size(1), torch_dtype or base.dtype
    attached: Components = {kind: {} for kind in given}
    if saved is not None:
        attached |= {"encoders": saved.encoders, "decoders": saved.decoders}
        if problems := [*_name_problems(saved, given), *_left_behind(saved, base, given["decoders"])]:
            raise UserError(*problems)
    for name, spec in given["encoders"].items():
        attached["encoders"][name] = _encoder(name, spec, hidden_size, init_device, dtype)
    for name, spec in given["decoders"].items():
        attached["decoders"][name] = _decoder(name, spec, base, init_device, dtype)
    for name, source in given["teachers"].items():
        if name in (*attached["encoders"], *attached["decoders"]):
            raise UserError(f"model.teachers.{name}: this is the name of another component; choose another one")
        attached["teachers"][name] = _teacher(name, source, init_device, torch_dtype)
    names = {*given["encoders"], *given["decoders"]}
    if problems := [*_size_problems(hidden_size, attached, names)] or [*_modality_problems(attached, names)]:
        raise UserError(*problems)
    return attached


def _omni_config(base: PreTrainedModel, attached: Components, loaded: Any) -> OmniConfig:
    """Return the config of a model; ``loaded`` has the facts of the foundation's checkpoint that its config lacks."""
    return OmniConfig(
        foundation=as_dict(base.config),
        unused_tensors=getattr(loaded, "unused_tensors", None),
        source_path=getattr(loaded, "source_path", None),
        has_own_head=getattr(loaded, "has_own_head", False),
        **{kind: {name: as_dict(part.config) for name, part in group.items()} for kind, group in attached.items()},
    )


def _name_problems(saved: OmniModel, given: Mapping[str, Collection[str]]) -> Iterator[str]:
    """No given encoder has the name of a saved decoder, and the other way round."""
    for kind, of, names in (("encoders", "decoder", saved.decoder_names), ("decoders", "encoder", saved.encoder_names)):
        for name in given[kind]:
            if name in names:
                yield f"{kind}: {name!r} is the name of a saved {of}; use another"


def _left_behind(saved: OmniModel, base: PreTrainedModel, given: Collection[str]) -> Iterator[str]:
    """No kept decoder is made of modules of a foundation that was replaced."""
    for name, decoder in saved.decoders.items() if base is not saved.foundation else ():
        if getattr(decoder.config, "of_foundation", None) and name not in given:
            yield f"decoders: {name!r} is a part of the saved foundation; give it a `tokenizer` of its own"


def _size_problems(hidden_size: int, attached: Components, given: Collection[str]) -> Iterator[str]:
    """Encoders and decoders of omnitrain's configs have the foundation's hidden size."""
    for kind, group in attached.items():
        for name, component in group.items():
            found = getattr(component.config, "hidden_size", None)
            if isinstance(component.config, _CONFIGS) and found != hidden_size:
                whose = f"found a model with hidden size {found}" if name in given else f"the saved one has {found}"
                yield (
                    f"{kind}: {name!r} must have the foundation's hidden size {hidden_size}, but {whose}; give new "
                    f"settings in {kind}={{{name!r}: ...}}"
                )


def _modality_problems(attached: Components, given: set[str]) -> Iterator[str]:
    """No given encoder reads what a saved one reads, and no given decoder writes what a saved one writes."""
    for kind, group in attached.items():
        if given.isdisjoint(group) or given >= group.keys():
            continue
        modalities = {name: component.adapter().modalities for name, component in group.items()}
        for new, saved in itertools.product(sorted(given & group.keys()), sorted(group.keys() - given)):
            if shared := [modality for modality in modalities[new] if modality in modalities[saved]]:
                yield (
                    f"{kind}: {new!r} is for {' and '.join(shared)}, as the saved {saved!r} is; to replace that, give "
                    f"it by its name: {kind}={{{saved!r}: ...}}"
                )


def _from_checkpoint(
    config_path: str | Path | None, weights_path: str | Path | None, init_device: str, torch_dtype: torch.dtype | None
) -> OmniModel | None:
    if not (config_path or weights_path):
        return None
    require_device(init_device)
    config = omni_config_at(config_path or weights_path or "")
    if config_path and weights_path:
        require_trained_scales(config, str(config_path), weights_path)
    if weights_path and init_device != "meta":
        with weights_left_in_files():
            model = OmniModel.from_pretrained(str(weights_path), dtype=torch_dtype, config=config)
        return _read_to(model, init_device)
    with _on(init_device):
        model = OmniModel(config)
    dtype = torch_dtype or torch.float32
    for component in (model.foundation, *model.encoders.values()):
        component.to(dtype)
    for decoder in model.decoders.values():
        cast_decoder(decoder, dtype)
    if weights_path:
        load_adapters(model, weights_path)
    return model if init_device == "meta" else model.to(init_device)


def require_trained_scales(config: OmniConfig, place: str, weights_path: str | Path) -> None:
    """Raise a UserError if the latents of a decoder have another scale than those that it was trained on."""
    trained = omni_config_at(weights_path).decoders or {}
    for name, values in (config.decoders or {}).items():
        found, expected = (
            {key: ((of.get("tokenizer") or {}).get("vae") or {}).get(key) for key in SCALES}
            for of in (values, trained.get(name, values))
        )
        if found != expected:
            raise UserError(
                f"model.decoders.{name}: the latents of {place} have {found}, and it was trained on latents with "
                f"{expected} ({weights_path}); use these, or give the decoder by its name to train it anew"
            )


def omni_config_at(folder: str | Path) -> OmniConfig:
    """Return the config of the saved omni model in a folder or Hub id; UserError: there is none."""
    require_folder(str(folder), "omni model")
    try:
        model_type = OmniConfig.get_config_dict(folder)[0].get("model_type")
        config = OmniConfig.from_pretrained(folder) if model_type == OmniConfig.model_type else None
    except (OSError, ValueError) as error:
        raise UserError(f"no omni model at {folder!r}: {str(error).splitlines()[0]}") from None
    if config is None:
        raise UserError(
            f"no omni model at {folder!r}: its config is of type {model_type!r}, not {OmniConfig.model_type!r}; pass a "
            "HF model as the foundation instead"
        )
    return config


def require_device(device: str) -> None:
    """Raise a ``UserError`` if weights cannot be created on ``device``: it is not cpu, cuda or meta."""
    with suppress(RuntimeError, TypeError):
        if torch.device(device).type in ("cpu", "cuda", "meta"):
            return
    raise UserError(f"init_device: found {device!r}; expected cpu, cuda or meta")


def _on(device: str) -> Any:
    return torch.device("meta") if device == "meta" else nullcontext()


def _read_to(model: M, device: str) -> M:
    """Read weights in files to a device, tensor by tensor, and move weights in memory there."""
    model.to(device)
    read_weights(model)
    return model


def _described(source: Source | HFSource, init_device: str) -> Source:
    """Replace a path by its config on ``meta``: only shapes matter there, so no weights are read."""
    if isinstance(source, HFSource):
        source = source.path if source.path is not None else dict(source.config or {})
    return config_at(source) if init_device == "meta" and isinstance(source, str) else source


def _specified(place: str, node: type[Node], spec: Any, part: str) -> tuple[PreTrainedModel | None, Node]:
    """Return the model given as ``spec[part]``, else None, and ``spec`` as a ``node`` with its config."""
    if isinstance(spec, node):
        return None, spec
    given = spec.get(part) if isinstance(spec, dict) else None
    ready = given if isinstance(given, PreTrainedModel) else None
    if ready is not None:
        spec = spec | {part: HFSource.model_construct(path=None, config=as_dict(ready.config))}
    try:
        return ready, node.model_validate(spec)
    except ValidationError as error:
        if not isinstance(spec, dict):
            raise UserError(f"{place}: found {type(spec).__name__}, expected a dict with `{part}`") from None
        raise UserError(*(f"{place}.{line}" for line in problem_lines(error, node))) from None


def _encoder(name: str, spec: Any, hidden_size: int, init_device: str, dtype: torch.dtype) -> PreTrainedModel:
    if isinstance(spec, EncoderMixin):
        return cast(PreTrainedModel, spec)
    place = f"model.encoders.{name}"
    ready, spec = _specified(place, Encoder, spec, "tower")
    tower = _tower(place, spec.tower, ready, init_device, dtype)
    shared: dict[str, Any] = {"projector": spec.projector.model_dump(), "hidden_size": hidden_size}
    if not _is_audio(place, tower.config):
        more = [
            _tower(f"{place}.more_towers.{number}", source, None, init_device, dtype)
            for number, source in enumerate(spec.more_towers)
        ]
        return _vision_encoder(place, spec, [tower, *more], shared).to(dtype)
    if spec.more_towers:
        raise UserError(f"{place}.more_towers: only vision towers can be joined, and `tower` reads sound; remove it")
    derived: dict[str, Any] = {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}
    if not reads_waveforms(type(tower), tower.config):
        bins = getattr(tower.config, "num_mel_bins", None)
        derived = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins}
    extractor = _settings(spec.processor, spec.tower.path, AutoFeatureExtractor.from_pretrained, derived)
    config = AudioEncoderConfig(**shared, tower=as_dict(tower.config), processor=extractor)
    return AudioEncoder(config, tower).to(dtype)


def _tower(
    place: str, source: HFSource, ready: PreTrainedModel | None, init_device: str, dtype: torch.dtype
) -> PreTrainedModel:
    found = ready if ready is not None else _vae(source, init_device)
    if found is not None:
        config = found.config
    else:
        config = as_config(source.config) if source.config else config_at(str(source.path))
    modality = "audio" if _is_audio(place, config) else "image"
    return tower_from_source(_described(source, init_device) if found is None else found, modality, dtype)


def _vision_encoder(
    place: str, spec: Encoder, towers: Sequence[PreTrainedModel], shared: Mapping[str, Any]
) -> VisionEncoder:
    """Build an encoder around a tower, or around several that are joined; each has an image processor."""
    tower = JoinedTowers.of(place, towers) if len(towers) > 1 else towers[0]
    load = partial(AutoImageProcessor.from_pretrained, backend="pil")
    processors = []
    given = [spec.processor, *(None for _ in spec.more_towers)]
    for one, source, own in zip(towers, (spec.tower, *spec.more_towers), given, strict=True):
        path = None if isinstance(one, LatentModel) else source.path
        processors.append(_settings(own, path, load, _image_processor_for(one.config)))
        if "size" in processors[-1] and processors[-1]["size"] is None:
            raise UserError(
                f"{place}: {type(one).__name__} takes images of any size; set the one that it gets: `processor: "
                "{size: {height: 256, width: 256}}`"
            )
    processors[0] |= _pixel_limits(place, spec, processors[0])
    more = {"more_processors": processors[1:]} if len(towers) > 1 else {}
    frames = {"max_frames": spec.max_frames, "fps": spec.fps}
    config = VisionEncoderConfig(**shared, tower=as_dict(tower.config), processor=processors[0], **more, **frames)
    return VisionEncoder(config, tower)


def _pixel_limits(place: str, spec: Encoder, settings: dict[str, Any]) -> dict[str, Any]:
    if spec.min_pixels is None and spec.max_pixels is None:
        return {}
    limits = Reading(min_pixels=spec.min_pixels, max_pixels=spec.max_pixels)
    try:
        return pixel_arguments(image_processor(dict(settings)), {}, limits)
    except UserError as error:
        raise UserError(f"{place}.{error}") from None


def _is_audio(place: str, config: PreTrainedConfig) -> bool:
    """Whether the tower's config has spectrogram bins, or its class takes waveforms (audio); or it has patches."""
    nodes = [config, *(getattr(config, key) for key in config.sub_configs)]
    if any(hasattr(node, "num_mel_bins") for node in nodes) or reads_waveforms(model_class(config), config):
        return True
    if any(hasattr(node, "patch_size") for node in nodes):
        return False
    raise UserError(f"{place}: {config.model_type!r} is neither a vision nor an audio tower")


def _settings(
    given: str | dict[str, Any] | None, path: str | None, load: Callable[[str], Any], derived: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a processor: ``given`` (a folder, or some of them), or those saved at ``path``."""
    folder = given if isinstance(given, str) else None if given else path
    if folder is not None:
        return {k: v for k, v in json.loads(load(folder).to_json_string()).items() if k != "processor_class"}
    assert not isinstance(given, str)  # a string is a folder
    return derived | (given or {})


def _image_processor_for(config: PreTrainedConfig) -> dict[str, Any]:
    if hasattr(config, "spatial_merge_size"):
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": config.patch_size,
            "temporal_patch_size": config.temporal_patch_size,
            "merge_size": config.spatial_merge_size,
        }
    side, half = getattr(config, "image_size", None), [0.5, 0.5, 0.5]
    size = None if side is None else dict.fromkeys(("height", "width"), side)
    return {"image_processor_type": "SiglipImageProcessor", "size": size, "image_mean": half, "image_std": half}


def _teacher(
    name: str, source: Source | TeacherSource | Teacher, init_device: str, dtype: torch.dtype | None
) -> PreTrainedModel:
    if isinstance(source, Teacher):
        return source
    how = source.model_dump(exclude={"path", "weight"}) if isinstance(source, TeacherSource) else {}
    path = source.path if isinstance(source, TeacherSource) else source
    try:
        model = build_foundation_model(path, init_device=init_device, torch_dtype=dtype)
    except UserError as error:
        raise UserError(f"model.teachers.{name}: {error}") from None
    return Teacher(TeacherConfig(model=as_dict(model.config), **how), model)


def _decoder(name: str, spec: Any, base: PreTrainedModel, init_device: str, dtype: torch.dtype) -> PreTrainedModel:
    if isinstance(spec, DecoderMixin):
        return cast(PreTrainedModel, spec)
    ready, spec = _specified(f"model.decoders.{name}", Decoder, spec, "tokenizer")
    try:
        decoder = _codec_decoder(spec, ready, base, init_device)
    except UserError as error:
        raise UserError(f"model.decoders.{name}: {error}") from None
    cast_decoder(decoder, dtype)
    return decoder


def _codec_decoder(
    spec: Decoder, ready: PreTrainedModel | None, base: PreTrainedModel, init_device: str
) -> CodecDecoder:
    """Build the decoder for what a tokenizer makes, codes or latents, or of the modules of the foundation ``base``."""
    names = find_writer(base) if ready is None and spec.tokenizer is None else None
    if names is not None:
        tokenizer = base.get_submodule(names["tokenizer"])
    else:
        tokenizer = ready if ready is not None else _tokenizer(cast(HFSource, spec.tokenizer), init_device)
    shared = {
        "tokenizer": as_dict(tokenizer.config),
        "hidden_size": base.get_input_embeddings().weight.size(1),
        **{key: getattr(spec, key) for key in ("image_size", "num_frames", "fps")},
    }
    if hasattr(tokenizer, "num_channels"):
        flow = spec.flow.model_dump(exclude={"kind"})
        if spec.flow.kind == "head":
            return FlowDecoder(FlowDecoderConfig(**shared, **flow), tokenizer)
        flow = {key: flow[key] for key in ("patch_size", "num_steps")}
        return InContextDecoder(InContextDecoderConfig(**shared, **flow), tokenizer)
    of_codes = {key: getattr(spec, key) for key in ("image_sizes", "num_codebooks", "max_tokens")}
    config = TokenDecoderConfig(**shared, **of_codes, of_foundation=names)
    return TokenDecoder(config, tokenizer) if names is None else decoder_of(base, config)


def _tokenizer(source: HFSource, init_device: str) -> PreTrainedModel:
    """Load or build a media tokenizer, of transformers or of diffusers."""
    return _vae(source, init_device) or resolve(_described(source, init_device), dtype=torch.float32)


def _vae(source: HFSource, init_device: str) -> LatentModel | None:
    return None if source.path is None else vae_at(source.path, with_weights=init_device != "meta")


def cast_decoder(decoder: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast all weights except a media tokenizer's, which stay in fp32 as in a loaded model."""
    fp32 = fp32_modules_of(OmniModel)
    children = dict(decoder.named_children())
    if fp32.isdisjoint(children):
        decoder.to(dtype)
    for name in children.keys() - fp32:
        children[name].to(dtype)
