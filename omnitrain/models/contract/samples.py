"""Tiny samples of all modalities that a foundation reads, with the arguments of the plain HF forward for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import NATIVE_PREFIX, MediaItem, MediaSpan, Sample
from omnitrain.errors import UserError
from omnitrain.models.contract.tiny_model import TINY_THRESHOLD
from omnitrain.models.discovery import Discovery, config_nodes, special_ids
from omnitrain.models.discovery.model_errors import suppress_errors_of_models
from omnitrain.models.discovery.text_run import plain_ids
from omnitrain.ops.config_value import config_value

# Shorter and longer than the tiny model's windows.
_TEXT_LENGTHS = (TINY_THRESHOLD - 2, TINY_THRESHOLD + 3, TINY_THRESHOLD + 5)
# Names of the tokens around an item, by their prefix.
_STEMS = {"image": ("image", "vision"), "video": ("video", "vision", "image"), "audio": ("audio",)}
_STARTS = ("{}_start_token_id", "{}_bos_token_id", "bo{}_token_id", "bo{}_token_index")
_ENDS = ("{}_end_token_id", "{}_eos_token_id", "eo{}_token_id", "eo{}_token_index")


@dataclass(frozen=True)
class Probe:
    """A sample, and the arguments of the plain HF forward for it."""

    sample: Sample  # as omnitrain's data pipeline would make it
    arguments: dict[str, Tensor]  # of the HF forward, a batch of one, without positions, which the model computes

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of its media, in order."""
        return tuple(span.component.removeprefix(NATIVE_PREFIX) for span in self.sample.spans)


def probe_samples(model: PreTrainedModel, native: Discovery) -> list[Probe]:
    """Return probes: text of three lengths, each modality alone, two items of one modality, and all modalities."""
    mixtures: list[tuple[str, ...]] = [(), (), (), *((modality,) for modality in native.interfaces)]
    if native.interfaces:
        mixtures.append((next(iter(native.interfaces)),) * 2)
    if len(native.interfaces) > 1:
        mixtures.append(tuple(native.interfaces))
    maker = _ProbeMaker(model, native)
    return [maker.probe(index, mixture) for index, mixture in enumerate(mixtures)]


def reworded(probe: Probe, words: np.ndarray) -> Sample:
    """Return the sample with other words at its supervised tokens; its length and media stay the same."""
    ids = probe.sample.input_ids
    other = words[(np.searchsorted(words, ids) + 1) % len(words)]
    return replace(probe.sample, input_ids=np.where(probe.sample.loss_mask & np.isin(ids, words), other, ids))


def ordinary_words(model: PreTrainedModel) -> np.ndarray:
    """Return the ids of tokens that the config does not name as special and the forward may predict, ascending."""
    return np.array(sorted(set(range(_num_classes(model))) - special_ids(model.config) - forbidden_words(model)))


@torch.no_grad()
def forbidden_words(model: PreTrainedModel) -> set[int]:
    """Return the ids whose logits the forward sets to the minimum (codes of images, in Chameleon); often none."""
    forbidden = set[int]()
    with suppress_errors_of_models():
        logits = model(input_ids=torch.tensor([plain_ids(model, 2)], device=model.device)).logits[0, -1]
        forbidden.update((logits == torch.finfo(logits.dtype).min).nonzero().flatten().tolist())
    return forbidden


def _num_classes(model: PreTrainedModel) -> int:
    embedded: int = model.get_input_embeddings().weight.size(0)
    return min(embedded, getattr(model.get_output_embeddings(), "out_features", embedded))


class _ProbeMaker:
    def __init__(self, model: PreTrainedModel, native: Discovery) -> None:
        self.model, self.native = model, native
        self.vocabulary = model.get_input_embeddings().weight.size(0)
        self.words = ordinary_words(model)
        self._items: dict[tuple[str, int], MediaItem] = {}

    def probe(self, index: int, mixture: tuple[str, ...]) -> Probe:
        """Make sample ``index``: text with media in between; text between the frames of a video if it must be."""
        try:
            return self._probe(index, mixture, between_frames=False)
        except UserError:
            return self._probe(index, mixture, between_frames=True)

    def _probe(self, index: int, mixture: tuple[str, ...], between_frames: bool) -> Probe:
        generator = np.random.default_rng(index)
        ids = [self._text(generator, 5 if mixture else _TEXT_LENGTHS[index])]
        spans: list[MediaSpan] = []
        for position, modality in enumerate(mixture):
            interface = self.native.interfaces[modality]
            item = self._item(modality, mixture[:position].count(modality))
            grids = (array for name, array in item.features.items() if "grid" in name and array.ndim == 2)
            num_runs = next((int(grid[0, 0]) for grid in grids), 1) if between_frames else 1  # temporal patches
            start, end = (self._marks(modality, forms) for forms in (_STARTS, _ENDS))
            run = [*[interface.token_id] * (item.num_tokens // num_runs), *self._text(generator, 1)]
            tokens = np.array([*start, *(run * num_runs)[:-1], *end], dtype=np.int64)
            where = sum(map(len, ids)) + np.flatnonzero(tokens == interface.token_id)
            spans.append(MediaSpan(NATIVE_PREFIX + modality, int(where[0]), item, is_target=False, scattered=where))
            ids += [tokens, self._text(generator, 3 + index % 4)]
        return self._finished(index, np.concatenate(ids), spans, generator)

    def _text(self, generator: np.random.Generator, length: int) -> np.ndarray:
        return generator.choice(self.words, length).astype(np.int64)

    @torch.no_grad()
    def _item(self, modality: str, index: int) -> MediaItem:
        if (modality, index) not in self._items:
            interface = self.native.interfaces[modality]
            tensors = interface.probe_items(index + 1)[index]
            num_tokens = interface.encode(self.model, tensors).main.size(0)
            features = {name: tensor.numpy() for name, tensor in tensors.items()}
            self._items[modality, index] = MediaItem(features, num_tokens)
        return self._items[modality, index]

    def _finished(
        self, index: int, ids: np.ndarray, spans: Sequence[MediaSpan], generator: np.random.Generator
    ) -> Probe:
        placeholders = [interface.token_id for interface in self.native.interfaces.values()]
        trained = ~np.isin(ids, placeholders) & (ids < _num_classes(self.model)) & (generator.random(len(ids)) < 0.8)
        if self.native.extras.marks_answer:  # supervised tokens must come after all others
            trained &= np.arange(len(ids)) >= len(ids) - 4
        token_inputs = self.native.extras(ids, trained)
        modalities = [span.component.removeprefix(NATIVE_PREFIX) for span in spans]
        media = {
            name: tensor.numpy()
            for modality in dict.fromkeys(modalities)
            for name, tensor in self.native.interfaces[modality].probe_batch(modalities.count(modality)).items()
        }
        sample = Sample(
            id=f"probe {index}",
            source="probe",
            input_ids=ids,
            loss_mask=trained,
            position_ids=self.native.positions(ids, media, token_inputs),
            spans=tuple(spans),
            index=index,
            token_inputs=token_inputs,
        )
        arguments = {"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None], **media}
        arguments |= {name: values[None] for name, values in token_inputs.items()}
        return Probe(sample, {name: torch.from_numpy(values) for name, values in arguments.items()})

    def _marks(self, modality: str, forms: Sequence[str]) -> list[int]:
        """The token that the config names for the start or the end of an item; empty if it names none."""
        pairs = product(_STEMS[modality], forms)
        names = [form.format(stem if form.startswith("{") else stem[0]) for stem, form in pairs]
        values = (config_value(node, name) for name in names for node in config_nodes(self.model.config))
        first = next((value for value in values if isinstance(value, int)), self.vocabulary)
        return [first] if first < self.vocabulary else []
