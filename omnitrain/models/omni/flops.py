"""``ModelFlops``: the FLOPs of an omni model over the samples and media of a step, on tensors without content.

The foundation is counted over text of two lengths and two numbers of predicted tokens, which give its products per
token and per predicted token; its attention follows from the lengths of the samples. If its layers are of one kind, a
copy with one of them is counted, and one with two: the others cost what the second one does. Encoders and decoders are
counted on the shapes of each item, once per shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.models.discovery.text_run import kind_of_block, text_blocks
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.encode import call_component, features_of, idle_prompt
from omnitrain.models.omni.model import OmniModel, idle_head
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.ops.flops import Attention, Flops, Passes, Recomputed, by_layer, count, without_content

_LENGTHS = (128, 256)  # tokens; multiples of the chunks in which linear attention computes
_PREDICTED = (1, 2)
FOUNDATION = "foundation"


@dataclass(frozen=True)
class SequenceFlops:
    """The FLOPs of a foundation."""

    per_token: Passes  # of all products in it
    per_prediction: Passes  # of its head, for each predicted text token
    layers: Mapping[Attention, int]  # attention -> number of layers that have it

    def of(self, lengths: Sequence[int], predicted: int) -> Passes:
        """Return the FLOPs over samples of these lengths with so many predicted text tokens."""
        attention = sum((layer.of(lengths) * times for layer, times in self.layers.items()), Passes())
        return self.per_token * sum(lengths) + self.per_prediction * predicted + attention


@dataclass
class PackFlops:
    """FLOPs of packs and media calls."""

    components: dict[str, Passes] = field(default_factory=dict)  # with the losses of heads: `foundation`, decoders

    def add(self, name: str, passes: Passes) -> None:
        """Add FLOPs of a component."""
        self.components[name] = self.components.get(name, Passes()) + passes

    def add_all(self, other: PackFlops) -> None:
        """Add the FLOPs of ``other``."""
        for name, passes in other.components.items():
            self.add(name, passes)

    @property
    def passes(self) -> Passes:
        """The sum over components."""
        return sum(self.components.values(), Passes())


class ModelFlops:
    """Counts FLOPs of a model's packs, by a copy without weights of a complete model, not sharded, on any device."""

    def __init__(self, model: OmniModel) -> None:
        assert model.runner is not None  # checks and probes that run the model, which the copy takes over
        self.model = without_content(model)
        for part in (self.model.foundation, *self.model.encoders.values()):
            use_omnitrain_experts(part, "torch")
        self._recomputed: dict[str, Recomputed] = {}
        self._sequences: dict[bool, SequenceFlops] = {}
        self._items: dict[tuple[Any, ...], Passes] = {}
        self._heads: dict[str, Passes] = {}

    def follow(self, trained: Iterable[str], recomputed: Mapping[str, Recomputed]) -> None:
        """Say which parameters train, and what each component's backward computes again; a resolved plan tells."""
        trains = set(trained)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trains)
        self._recomputed = dict(recomputed)
        self._sequences, self._items, self._heads = {}, {}, {}

    def of_samples(self, lengths: Sequence[int], predicted: int, *, reads_trained: bool = False) -> Passes:
        """Return the foundation's FLOPs over samples; ``reads_trained``: with media of encoders that train."""
        if reads_trained not in self._sequences:
            self._sequences[reads_trained] = self._sequence(reads_trained)
        return self._sequences[reads_trained].of(lengths, predicted)

    def of_pack(self, pack: Pack) -> PackFlops:
        """Return the FLOPs of the foundation and of all heads over a pack, without its media calls."""
        found = PackFlops()
        ends = np.cumsum(pack.info.lengths)
        predicted = np.bincount(np.searchsorted(ends, pack.text_rows.numpy(), side="right"), minlength=len(ends))
        after = self._samples_with_trained_media(pack)
        for reads_trained in (False, True):
            chosen = [index for index in range(len(ends)) if (index in after) == reads_trained]
            if chosen:
                lengths = [pack.info.lengths[index] for index in chosen]
                passes = self.of_samples(lengths, int(predicted[chosen].sum()), reads_trained=reads_trained)
                found.add(FOUNDATION, passes)
        for name, batch in pack.targets.items():
            found.add(name, self._of_head(name) * sum(batch.num_tokens))
        return found

    def _samples_with_trained_media(self, pack: Pack) -> set[int]:
        """The samples of a pack that have features of a component that trains."""
        trains = {
            name
            for component, names in self.model.media_names.items()
            if any(parameter.requires_grad for parameter in self.model.components[component].values())
            for name in names
        }
        media = {**pack.inputs, **pack.targets}
        return {sample for name in trains & media.keys() for sample in media[name].samples}

    def of_media(self, name: str, group: MediaGroup) -> PackFlops:
        """Return the FLOPs of encoding items, each by itself; ``name``: their name in packs."""
        component = next(component for component, names in self.model.media_names.items() if name in names)
        found = PackFlops()
        for item in group.split([1] * len(group.num_tokens)):
            key = (name, *_shapes(item))
            if key not in self._items:
                self._items[key] = self._of_item(component, name, item)
            found.add(component, self._items[key])
        return found

    def _of_item(self, component: str, name: str, item: MediaGroup) -> Passes:
        def run() -> list[Tensor]:
            features, _ = call_component(self.model, component, {name: [item]})
            return features.tensors()

        return count(run, self.model, self._again(component)).passes

    def _of_head(self, name: str) -> Passes:
        """The loss of a decoder for one token of a medium."""
        if name not in self._heads:
            decoder, hidden = self.model.decoders[name], self.model.foundation.get_input_embeddings().weight.size(1)
            self._heads[name] = count(lambda: [idle_head(decoder, torch.empty(1, 1, hidden))], self.model).passes
        return self._heads[name]

    def _sequence(self, reads_trained: bool) -> SequenceFlops:
        (short, long), (one, two) = _LENGTHS, _PREDICTED
        first = self._of_text(short, one, reads_trained)
        per_token = _per(first.products, self._of_text(long, one, reads_trained).products, long - short)
        per_prediction = _per(first.products, self._of_text(short, two, reads_trained).products, two - one)
        return SequenceFlops(per_token, per_prediction, by_layer(first.attention))

    def _of_text(self, length: int, predicted: int, reads_trained: bool) -> Any:
        pack = Pack.from_samples([idle_prompt(self.model, length)])
        rows = torch.arange(length - predicted, length)
        pack = replace(pack, text_rows=rows, text_labels=torch.zeros(predicted, dtype=torch.long))
        # Hidden states as if other ranks had computed them: a teacher's own forward counts as media calls.
        rows_of = {name: torch.empty(predicted, self.model.get_submodule(name).width) for name in self.model.teachers}
        encoded = EncodedPack(pack, features={name: features_of(rows) for name, rows in rows_of.items()})

        def run() -> list[Tensor]:
            with self._trained_embeddings() if reads_trained else nullcontext():
                return [term.sum for term in self.model(encoded).losses.values()]

        layers = text_blocks(self.model.foundation)
        if len(layers) <= 2 or not self._are_alike(layers):
            return count(run, self.model, self._again(FOUNDATION))
        counted = []
        for number in (1, 2):
            with _first(number, layers):
                counted.append(count(run, self.model, self._again(FOUNDATION)))
        return counted[0].with_copies(len(layers) - 1, counted[1])

    def _are_alike(self, layers: nn.ModuleList) -> bool:
        """Whether all layers of the foundation have equal costs, recomputation included."""
        again = {self.model.get_submodule(name) for one in self._again(FOUNDATION) for name in one.modules}
        kinds = {
            (kind_of_block(layer), tuple(name for name, part in layer.named_modules() if part in again))
            for layer in layers
        }
        types = getattr(self.model.foundation.config.get_text_config(decoder=True), "layer_types", None) or ()
        return len(kinds) == 1 and len(set(types)) <= 1

    def _again(self, component: str) -> list[Recomputed]:
        """What the backward computes again; without modules of layers that are taken out."""
        if component not in self._recomputed:
            return []
        there = {name for name, _ in self.model.named_modules()}
        one = self._recomputed[component]
        return [replace(one, modules=[name for name in one.modules if name in there])]

    @contextmanager
    def _trained_embeddings(self) -> Iterator[None]:
        """Let the foundation's input need a gradient, as it does where it has features of an encoder that trains."""
        embedding: Any = self.model.foundation.get_input_embeddings()
        hook = embedding.register_forward_hook(
            lambda _, __, out: out if out.requires_grad else out.detach().requires_grad_()
        )
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def _first(number: int, layers: nn.ModuleList) -> Iterator[None]:
    """Within this context a model has only its first ``number`` layers."""
    others = list(layers)[number:]
    del layers[number:]
    try:
        yield
    finally:
        layers.extend(others)


def _per(few: Passes, many: Passes, units: int) -> Passes:
    pairs = ((few.forward, many.forward), (few.backward, many.backward), (few.again, many.again))
    return Passes(*(Flops((b.products - a.products) // units) for a, b in pairs))


def _shapes(item: MediaGroup) -> tuple[Any, ...]:
    """The facts on which an item's FLOPs depend: shapes, and the values of integers such as the grid of its patches."""
    return tuple(
        (name, tuple(tensor.shape), tensor.dtype, None if tensor.is_floating_point() else _digest(tensor))
        for name, tensor in sorted(item.features.items())
    )


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=8).digest()
