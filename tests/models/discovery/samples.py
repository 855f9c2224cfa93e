"""Samples of a whole HF model: token ids around the features of two probe items, and the other forward arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.discovery.discover import Discovery, discover
from omnitrain.models.discovery.features import MediaFeatures
from omnitrain.models.discovery.interface import override
from omnitrain.models.discovery.placeholders import marks
from omnitrain.models.discovery.text_run import plain_ids
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES


@lru_cache(maxsize=4)
def built(family: str) -> tuple[PreTrainedModel, Discovery]:
    """A model of the family with peaked attention, in eval mode, and what was found in it."""
    config = FAMILIES[family]()
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model.eval(), discover(model)


@dataclass(frozen=True)
class MediaSample:
    """A sample with two items of one modality."""

    model: PreTrainedModel
    found: Discovery
    modality: str
    features: dict[str, Tensor]
    ids: np.ndarray[Any, Any]

    @property
    def extras(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value)[None] for name, value in self.found.extras(self.ids).items()}

    @property
    def positions(self) -> Tensor:
        found = self.found.positions(self.ids, self.features, self.found.extras(self.ids))
        return torch.from_numpy(found)[:, None] if found.ndim == 2 else torch.from_numpy(found)[None]

    def plain(self) -> Tensor:
        """Logits of plain transformers, positions left to the model."""
        return self._forward(**self.features)

    def injected(self, rows: MediaFeatures) -> Tensor:
        """Logits with rows put in, and positions computed beforehand."""
        with override(self.model, self.found.interfaces, {self.modality: rows}) as arguments:
            return self._forward(**arguments, position_ids=self.positions)

    def _forward(self, **arguments: Tensor) -> Tensor:
        ids = torch.from_numpy(self.ids)[None]
        output = self.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **self.extras, **arguments, use_cache=False
        )
        return output.logits


def media_sample(family: str, modality: str) -> MediaSample:
    """Text, two items of the modality with text between, text."""
    model, found = built(family)
    interface = found.interfaces[modality]
    with torch.no_grad():
        counts = [interface.encode(model, item).main.size(0) for item in interface.probe_items(2)]
    features = {name: value for name, value in interface.probe_batch(2).items() if name in interface.arguments}
    sample = MediaSample(model, found, modality, features, _ids(model, interface.token_id, modality, counts, runs=1))
    if modality == "video" and not _placed(sample):  # a run of rows per frame, as timestamps between them make it
        return MediaSample(model, found, modality, features, _ids(model, interface.token_id, modality, counts, runs=2))
    return sample


def _placed(sample: MediaSample) -> bool:
    try:
        return sample.positions is not None
    except ValueError:
        return False


def _ids(model: PreTrainedModel, token: int, modality: str, counts: list[int], runs: int) -> np.ndarray[Any, Any]:
    text = plain_ids(model, 12)
    opening, closing = marks(model.config, modality) or (text[10], text[11])
    if max(opening, closing) >= model.get_input_embeddings().weight.size(0):
        opening, closing = text[10], text[11]
    ids = text[:3]
    for place, count in enumerate(counts):
        rows: list[int] = []
        for run in range(runs):
            rows += [text[9]] * (run > 0) + [token] * (count // runs)
        ids += [opening, *rows, closing, text[3 + place]]
    return np.array([*ids, *text[5:9]])


def gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters for a fixed random gradient of the logits."""
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
