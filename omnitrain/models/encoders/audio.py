"""Encode sound by HF towers that take log-mel chunks of a fixed length (Whisper), or waveforms (wav2vec2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name

from omnitrain.data.packing.sample import Features
from omnitrain.data.sources.media import Waveform
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, EncoderMixin, TensorFeatures, one_item
from omnitrain.models.encoders.towers import (
    WAVEFORM,
    FeatureProjector,
    ProjectorSettings,
    merge_frames,
    reads_waveforms,
    tower_from_config,
)
from omnitrain.models.encoders.waveforms import clip_features, merged_frames, takes_padding
from omnitrain.models.hf.load import as_config
from omnitrain.recipe.component_configs import AudioEncoderConfig
from omnitrain.torch_private import assert_async
from omnitrain.transformers_private import ContainerModel, audio_lengths


class AudioAdapter(ComponentAdapter):
    """Convert sound by the HF feature extractor to log-mel chunks, several of a long clip, or to a waveform."""

    modalities = ("audio",)

    def __init__(self, config: AudioEncoderConfig) -> None:
        """Build the extractor, and the tower without weights for its length function; UserError: it has none."""
        settings = dict(config.processor or {})
        self.extractor = feature_extractor(settings)
        self.merge = ProjectorSettings(**(config.projector or {})).merge
        with torch.device("meta"):
            tower = tower_from_config(as_config(config.tower or {}), "audio")
        lengths = audio_lengths(tower)
        if lengths is None:
            raise UserError(
                f"{type(tower).__name__} cannot be an audio encoder: it has no `_get_feat_extract_output_lengths`, "
                "which returns the number of features of a clip"
            )
        self._num_features: Callable[[torch.Tensor], torch.Tensor] = lengths
        self._kind = type(tower).__name__
        self._is_waveform, self._is_padded = reads_waveforms(type(tower), tower.config), takes_padding(tower)
        if self._is_waveform and WAVEFORM not in self.extractor.model_input_names:
            raise UserError(f"{type(self.extractor).__name__} makes no waveforms, which {type(tower).__name__} reads")
        if not self._is_waveform and not hasattr(self.extractor, "n_samples"):
            raise UserError(
                f"{type(self.extractor).__name__} does not cut sound into chunks of a fixed length: it has no "
                "`n_samples`, as Whisper's has"
            )

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return the chunks or the waveform of a clip (shapes: :meth:`AudioEncoder.lm_encode`), and its tokens."""
        waveform: Waveform = media.resampled(self.extractor.sampling_rate)
        if self._is_waveform:
            (values,) = self.extractor(waveform.samples, sampling_rate=waveform.rate, return_tensors="np")[WAVEFORM]
            count = int(self._num_features(torch.tensor(len(values))))
            return clip_features(self._kind, values.astype(np.float32), count, self.merge, is_padded=self._is_padded)
        size = self.extractor.n_samples
        chunks = [waveform.samples[start : start + size] for start in range(0, len(waveform.samples), size)]
        output = self.extractor(
            chunks, sampling_rate=waveform.rate, return_attention_mask=True, return_tensors="np", padding="max_length"
        )
        frames = torch.from_numpy(output["attention_mask"].sum(axis=1).astype(np.int64))
        num_tokens = -(-self._num_features(frames).numpy() // self.merge)
        features = {
            "input_features": output["input_features"].astype(np.float32),
            "num_rows": num_tokens.astype(np.int64),
        }
        return features, int(num_tokens.sum())


def feature_extractor(settings: dict[str, Any]) -> Any:
    """Build the HF feature extractor; raise UserError if it is unknown."""
    name = settings.pop("feature_extractor_type")
    extractor_class = feature_extractor_class_from_name(name)
    if extractor_class is None:
        raise UserError(f"transformers has no feature extractor {name!r}")
    return extractor_class(**settings)


class AudioEncoder(ContainerModel, EncoderMixin):
    """An audio tower and a projector; ``pixel_shuffle`` joins ``factor`` neighbouring features into one."""

    config_class = AudioEncoderConfig
    main_input_name = "input_features"

    def __init__(self, config: AudioEncoderConfig, tower: PreTrainedModel | None = None) -> None:
        """``tower``: a tower with weights; None: one with random weights."""
        super().__init__(config)
        self.tower = tower if tower is not None else tower_from_config(as_config(config.tower or {}), "audio")
        settings = ProjectorSettings(**(config.projector or {}))
        tower_size = self.tower.config.hidden_size
        self.projector = FeatureProjector(settings, 1, tower_size, config.hidden_size)
        self.post_init()

    def adapter(self) -> AudioAdapter:
        """Return the converter from clips to input features, for data workers."""
        return AudioAdapter(self.config)

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode clips of ``num_tokens`` features each, without padding: ``[sum(num_tokens), hidden]``.

        ``features``: ``input_features`` ``[chunks, mels, frames]`` fp32; ``num_rows`` ``[chunks]`` int64, of features.
        For towers that read waveforms, see :func:`clip_features`.
        Raises RuntimeError (on CUDA in an assertion): the tower gives another number.
        """
        return self.lm_project(self.lm_tower(features, num_tokens))

    def lm_tower(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> TensorFeatures:
        """First part of :meth:`lm_encode`: ``main``, the joined frames of the tower."""
        if WAVEFORM in features:
            merged = merged_frames(self.tower, features, self.projector.factor)
        else:
            output = self.tower(features["input_features"].to(self.tower.dtype)).last_hidden_state
            merged = merge_frames(output, self.projector.factor)
        is_sound = torch.arange(merged.size(1), device=merged.device) < features["num_rows"][:, None]
        total, kind = sum(num_tokens), type(self.tower).__name__
        assert_async(is_sound.sum() == total, f"{kind} did not give one feature for each of {total} placeholders")
        # The host knows the number of features but not their positions; a sort finds them without a synchronisation.
        index = is_sound.flatten().int().argsort(descending=True, stable=True)[:total]
        return {"main": merged.flatten(0, 1).index_select(0, index)}

    def lm_project(self, rows: TensorFeatures) -> torch.Tensor:
        """Second part of :meth:`lm_encode`."""
        return self.projector(rows["main"])

    def minimal_rows(self) -> TensorFeatures:
        """Return a row of zeros."""
        return {"main": torch.zeros(1, self.projector.width)}

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the features of a tenth of a second of silence."""
        adapter = self.adapter()
        rate = adapter.extractor.sampling_rate
        return one_item(adapter, "audio", Waveform(np.zeros(rate // 10, dtype=np.float32), rate))
