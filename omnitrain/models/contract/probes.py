"""Tiny samples of everything a foundation reads, for the check; and the same as arguments of the plain HF forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.sample import NATIVE_PREFIX, MediaItem, MediaSpan, Sample
from omnitrain.models.native import (
    Discovery,
    PositionFunction,
    config_nodes,
    extra_arguments,
    special_ids,
    token_types,
)

# Names of the tokens around a medium, by what they start with.
_STEMS = {"image": ("image", "vision"), "video": ("video", "vision", "image"), "audio": ("audio",)}
_STARTS = ("{}_start_token_id", "{}_bos_token_id", "bo{}_token_id", "bo{}_token_index")
_ENDS = ("{}_end_token_id", "{}_eos_token_id", "eo{}_token_id", "eo{}_token_index")


@dataclass(frozen=True)
class Probe:
    """A sample, and what the plain HF forward takes for it.

    Attributes:
        sample: as the data side would make it.
        arguments: of the HF forward, a batch of one: ids, attention mask, media; no positions, the model finds them.
    """

    sample: Sample
    arguments: dict[str, Tensor]

    @property
    def modalities(self) -> tuple[str, ...]:
        """What is in it beside text."""
        return tuple(span.component.removeprefix(NATIVE_PREFIX) for span in self.sample.spans)


def probe_samples(model: PreTrainedModel, native: Discovery) -> list[Probe]:
    """Text alone (twice), each modality alone, two items of one, and all modalities together."""
    mixtures: list[tuple[str, ...]] = [(), (), *((modality,) for modality in native.ports)]
    if native.ports:
        mixtures += [(next(iter(native.ports)),) * 2, tuple(native.ports)]
    maker = _ProbeMaker(model, native)
    return [maker.probe(index, mixture) for index, mixture in enumerate(mixtures)]


class _ProbeMaker:
    def __init__(self, model: PreTrainedModel, native: Discovery) -> None:
        self.model, self.native = model, native
        size = model.get_input_embeddings().weight.size(0)
        self.words = np.array(sorted(set(range(size)) - special_ids(model.config)))
        self.positions = PositionFunction.of(model)
        self.extras = extra_arguments(model)

    def probe(self, index: int, mixture: tuple[str, ...]) -> Probe:
        """Sample ``index``: text, and the media of a mixture between."""
        generator = np.random.default_rng(index)
        ids = [self._text(generator, 4 + 3 * index % 7)]
        spans: list[MediaSpan] = []
        used: dict[str, int] = {}
        for modality in mixture:
            port = self.native.ports[modality]
            number = used.get(modality, index % 2)
            used[modality] = number + 1
            features = port.probe_items(number + 1)[number]
            rows = self._rows(modality, features)
            start, end = surrounding_tokens(self.model.config, modality)
            begin = sum(map(len, ids)) + len(start)
            arrays = {name: tensor.numpy() for name, tensor in features.items()}
            spans.append(MediaSpan(NATIVE_PREFIX + modality, begin, MediaItem(arrays, rows), is_target=False))
            ids += [np.array([*start, *[port.token_id] * rows, *end], dtype=np.int64)]
            ids += [self._text(generator, 3 + index % 4)]
        return self._finished(index, np.concatenate(ids), spans, generator)

    def _text(self, generator: np.random.Generator, length: int) -> np.ndarray:
        return generator.choice(self.words, length).astype(np.int64)

    @torch.no_grad()
    def _rows(self, modality: str, features: dict[str, Tensor]) -> int:
        return self.native.ports[modality].encode(self.model, features).main.size(0)

    def _finished(
        self, index: int, ids: np.ndarray, spans: Sequence[MediaSpan], generator: np.random.Generator
    ) -> Probe:
        types = token_types(ids, self.native.token_ids)
        token_inputs = {name: types for name in self.extras}
        media = _joined([span.item.features for span in spans])
        sample = Sample(
            id=f"probe {index}",
            source="probe",
            input_ids=ids,
            loss_mask=np.isin(ids, self.words) & (generator.random(len(ids)) < 0.8),
            position_ids=self.positions(ids, token_inputs, media),
            spans=tuple(spans),
            index=index,
            token_inputs=token_inputs,
        )
        arguments = {"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None], **media}
        arguments |= {name: values[None] for name, values in token_inputs.items()}
        return Probe(sample, {name: torch.from_numpy(values) for name, values in arguments.items()})


def surrounding_tokens(config: PreTrainedConfig, modality: str) -> tuple[list[int], list[int]]:
    """Tokens that the config names for before and after a medium; empty lists where it names none."""
    return _named(config, modality, _STARTS), _named(config, modality, _ENDS)


def _named(config: PreTrainedConfig, modality: str, forms: Sequence[str]) -> list[int]:
    for stem in _STEMS[modality]:
        for form in forms:
            name = form.format(stem if form.startswith("{") else stem[0])
            for _, node in config_nodes(config):
                if isinstance(value := getattr(node, name, None), int):
                    return [value]
    return []


def _joined(items: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Features of a sample's items in one batch, as a HF processor returns them."""
    names = dict.fromkeys(name for item in items for name in item)
    return {name: np.concatenate([item[name] for item in items if name in item]) for name in names}
