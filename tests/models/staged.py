"""A step of a model whose foundation runs in pipeline stages, one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.stage import StageInput


def with_layers(config: PreTrainedConfig, number: int = 4) -> PreTrainedConfig:
    """``config`` with so many layers of the language model; lists with a value for each layer are repeated."""
    text = config.get_text_config(decoder=True)
    name = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(getattr(text, name), int))
    before: int = getattr(text, name)
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(values := getattr(text, key, None), list) and len(values) == before:
            setattr(text, key, (values * number)[:number])
    setattr(text, name, number)
    return config


def detached(encoded: EncodedPack) -> tuple[EncodedPack, list[tuple[Tensor, Tensor]]]:
    """Cut the graph between the encoders and the foundation, so that each has its own backward.

    Returns:
        The pack with leaves in place of the encoders' results; and each result that has a graph with its leaf. The
        backward of the encoders starts from these results, with the gradients of the leaves.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        pairs.append((tensor, tensor.detach().requires_grad_()))
        return pairs[-1][1]

    native = {
        name: features.with_tensors([leaf(tensor) for tensor in features.tensors()], features.counts)
        for name, features in encoded.native.items()
    }
    inserted = [(positions, leaf(embeddings)) for positions, embeddings in encoded.inserted]
    idle = [leaf(tensor) for tensor in encoded.idle]
    return replace(encoded, native=native, inserted=inserted, idle=idle), pairs


class InFlight:
    """A micro-batch in the stages of a model: forwards in order, then backwards in reverse order.

    Features of media are cut off the encoders' graph, as they are for ranks that receive them: their gradients go back
    when the first stage's backward is done.
    """

    def __init__(self, model: OmniModel, pack: Pack, cuts: Sequence[int], count: int) -> None:
        blocks = len(text_blocks(model.foundation))
        self.model, self.count = model, count
        self.spans = [BlockSpan(start, stop, blocks) for start, stop in pairwise((0, *cuts, blocks))]
        self.encoded, self.features = detached(model.encode_media(pack))
        self.arrived: list[Tensor | None] = []
        self.left: list[Tensor] = []
        self.gradient: Tensor | None = None
        self.loss = 0.0

    def forward(self) -> None:
        """Run the next stage."""
        span = self.spans[len(self.left)]
        arrived = [tensor.detach().requires_grad_() for tensor in self.left[-1:]]
        self.arrived.append(arrived[0] if arrived else None)
        output = self.model.run_foundation(self.encoded, StageInput(span, tuple(arrived)))
        if isinstance(output, Tensor):
            self.left.append(output)
        else:
            heads = self.model.run_heads(self.encoded, output)
            self.left.append(_total(heads) / self.count)
            self.loss = self.left[-1].item()

    def backward(self) -> None:
        """Run the backward of the last stage that has not run backward."""
        self.left.pop().backward(self.gradient)
        arrived = self.arrived.pop()
        self.gradient = None if arrived is None else arrived.grad
        if arrived is None:
            read = [(result, leaf.grad) for result, leaf in self.features if leaf.grad is not None]
            torch.autograd.backward([result for result, _ in read], [gradient for _, gradient in read])


def staged_step(model: OmniModel, packs: Sequence[Pack], cuts: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of packs that go through all stages one after the other."""
    model.zero_grad(set_to_none=True)
    count, total = sum(sum(pack.loss_counts().values()) for pack in packs), 0.0
    for pack in packs:
        batch = InFlight(model, pack, cuts, count)
        for _ in batch.spans:
            batch.forward()
        for _ in batch.spans:
            batch.backward()
        total += batch.loss
    return total, gradients(model)


def whole_step(model: OmniModel, packs: Sequence[Pack]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of packs without stages."""
    model.zero_grad(set_to_none=True)
    count, total = sum(sum(pack.loss_counts().values()) for pack in packs), 0.0
    for pack in packs:
        loss = _total(model(pack)) / count
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def gradients(model: OmniModel) -> dict[str, Tensor]:
    """Parameter -> gradient, of those whose gradient is not zero."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if gradient.any()}


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Gradient that is not equal bit for bit -> its error relative to its largest value."""
    return {
        name: float((one[name] - other[name]).abs().max() / one[name].abs().max())
        if name in one and name in other
        else 1.0
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    }


def _total(output: OmniOutput) -> Tensor:
    return torch.stack([term.sum for term in output.losses.values()]).sum()
