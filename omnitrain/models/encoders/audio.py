"""Sound through any HF audio encoder that takes log-mel chunks of one length (Whisper and its kin)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name

from omnitrain.data.media import Waveform
from omnitrain.data.sample import Features
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, EncoderMixin, TensorFeatures, one_item
from omnitrain.models.encoders.projector import Projector, ProjectorSettings, merge_frames
from omnitrain.models.encoders.towers import tower_from_config
from omnitrain.models.hf.load import as_config
from omnitrain.recipe.component_configs import AudioEncoderConfig


class AudioAdapter(ComponentAdapter):
    """Waveforms -> log-mel chunks, by the HF feature extractor. A clip of any length becomes as many chunks."""

    modalities = ("audio",)

    def __init__(self, config: AudioEncoderConfig) -> None:
        """Build the feature extractor of ``config``, and the tower without weights for its length function."""
        settings = dict(config.processor or {})
        self.extractor = feature_extractor(settings)
        self.merge = ProjectorSettings(**(config.projector or {})).merge
        with torch.device("meta"):
            tower = tower_from_config(as_config(config.tower or {}), "audio")
        if not hasattr(tower, "_get_feat_extract_output_lengths"):
            raise UserError(f"{type(tower).__name__} does not tell how many rows it makes of a clip")
        self._tower_rows: Callable[[torch.Tensor], torch.Tensor] = tower._get_feat_extract_output_lengths

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Log-mel chunks of one clip (see :meth:`AudioEncoder.lm_encode` for shapes)."""
        waveform: Waveform = media.resampled(self.extractor.sampling_rate)
        size = self.extractor.n_samples
        pieces = [waveform.samples[start : start + size] for start in range(0, len(waveform.samples), size)]
        output = self.extractor(
            pieces, sampling_rate=waveform.rate, return_attention_mask=True, return_tensors="np", padding="max_length"
        )
        frames = torch.from_numpy(output["attention_mask"].sum(axis=1).astype(np.int64))
        rows = -(-self._tower_rows(frames).numpy() // self.merge)
        features = {"input_features": output["input_features"].astype(np.float32), "num_rows": rows.astype(np.int64)}
        return features, int(rows.sum())


def feature_extractor(settings: dict[str, Any]) -> Any:
    """The HF feature extractor of ``settings``.

    Raises:
        UserError: unknown ``feature_extractor_type``, or one without fixed-length chunks.
    """
    name = settings.pop("feature_extractor_type")
    found = feature_extractor_class_from_name(name)
    if found is None:
        raise UserError(f"feature extractor {name!r} is not in transformers")
    extractor = found(**settings)
    if not hasattr(extractor, "n_samples"):
        raise UserError(f"{name} does not cut sound into chunks of one length (n_samples), as Whisper's does")
    return extractor


class AudioEncoder(PreTrainedModel, EncoderMixin):
    """An audio tower and a projector; ``pixel_shuffle`` joins ``factor`` neighbouring rows into one."""

    config_class = AudioEncoderConfig
    main_input_name = "input_features"
    _supports_sdpa = True

    def __init__(self, config: AudioEncoderConfig, tower: PreTrainedModel | None = None) -> None:
        """``tower``: its weights; None: random ones."""
        super().__init__(config)
        self.tower = tower if tower is not None else tower_from_config(as_config(config.tower or {}), "audio")
        settings = ProjectorSettings(**(config.projector or {}))
        tower_size = self.tower.config.hidden_size
        self.projector = Projector(settings, 1, tower_size, config.hidden_size)
        self.post_init()

    def adapter(self) -> AudioAdapter:
        """Clips -> features, for data workers."""
        return AudioAdapter(self.config)

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Rows of all clips; the padding of a clip's last chunk is dropped.

        Args:
            features: ``input_features`` ``[chunks, mels, frames]`` fp32; ``num_rows`` ``[chunks]`` int64, the rows of
                each chunk that sound, not padding, made.
            num_tokens: rows of each clip.

        Returns:
            ``[sum(num_tokens), hidden]``.

        Raises:
            RuntimeError: the tower made another number of rows; from the device, where there is one.
        """
        output = self.tower(features["input_features"].to(self.tower.dtype)).last_hidden_state
        merged = merge_frames(output, self.projector.factor)
        sounding = torch.arange(merged.size(1), device=merged.device) < features["num_rows"][:, None]
        total, kind = sum(num_tokens), type(self.tower).__name__
        torch._assert_async(sounding.sum() == total, f"{kind} did not make a row for each of {total} placeholders")
        # Which these are is a value on the device; how many is known, so nothing waits for it.
        index = sounding.flatten().int().argsort(descending=True, stable=True)[:total]
        return self.projector(merged.flatten(0, 1).index_select(0, index))

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """A tenth of a second of silence."""
        adapter = self.adapter()
        rate = adapter.extractor.sampling_rate
        return one_item(adapter, "audio", Waveform(np.zeros(rate // 10, dtype=np.float32), rate))
