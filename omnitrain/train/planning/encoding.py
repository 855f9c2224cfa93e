"""Count what an encoder does for each input element, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omnitrain.data.packing.pack import MediaGroup
from omnitrain.models.omni.encode import call_component
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import RankMeter
from omnitrain.parallel.fake_world import fake_world, parallelize_in
from omnitrain.parallel.layout import layout_of
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.train.lr_groups import optimizer_of
from omnitrain.train.planning.cells import CountedPart, with_blocks
from omnitrain.train.planning.rank_run import Training

_RANKS = 2  # over which its weights are sharded
_ROWS = 128  # features that are counted together: products as wide as those of a run


@dataclass(frozen=True)
class Encoding:
    """What an encoder holds and does for items of ``elements`` input elements.

    Attributes:
        part: its weights, gradients and the optimizer's state, not sharded; what it keeps and does for these items.
        elements: of these items.
        feature_bytes: of the features of these items.
    """

    part: CountedPart
    elements: int
    feature_bytes: int


def count_encoder(training: Training, plan: ParallelPlan, name: str) -> Encoding:
    """Count a component that encodes media: so many of its smallest items that products are wide."""
    model = with_blocks(training.model, [0])
    settings = {n: ComponentPlan(**_without_ranks(plan.of(n))) for n in model.components}
    with fake_world(_RANKS) as mode:
        parallelize_in(mode, model, ParallelPlan(components=settings), training.mixed_precision)
        with mode, RankMeter() as meter:
            parameters = [p for key, p in model.components[name].items()]
            meter.hold(model.parameters())
            medium = model.media_names[name][0]
            rows = len(call_component(model, name, {}, {medium: 1})[1][0])
            items = _items(model, medium, rows, max(1, _ROWS // rows))
            before = meter.mark().alive
            features = call_component(model, name, {medium: [items]})[0].tensors()
            forward = meter.mark()
            trained = [tensor for tensor in features if tensor.requires_grad]
            feature_bytes = sum(tensor.nbytes for tensor in features)
            if trained:
                torch.autograd.backward(trained, [torch.empty_like(tensor) for tensor in trained])
            backward = meter.mark()
            learned = [p for p in parameters if p.requires_grad]
            for parameter in model.parameters():
                parameter.grad = None
            for parameter in learned:
                parameter.grad = torch.empty_like(parameter)
            without_state = meter.alive
            optimizer = optimizer_of(model, training.optimizer, layout_of(model))
            optimizer.step()
            state = meter.alive - without_state
    elements = sum(items.num_elements)
    part = CountedPart(
        sum(p.nbytes for p in parameters),
        sum(p.nbytes for p in learned),
        _RANKS * state,
        max(0, forward.alive - before - feature_bytes) if trained else 0,
        forward.work,
        backward.work,
    )
    return Encoding(part, elements, feature_bytes)


def _without_ranks(plan: ComponentPlan) -> dict[str, object]:
    kept = ("freeze", "lora", "precision", "memory")
    return {key: value for key in kept if (value := getattr(plan, key)) is not None}


def _items(model: OmniModel, medium: str, rows: int, number: int) -> MediaGroup:
    """So many of the smallest items of a medium, each with ``rows`` features."""
    features, _ = model.minimal_input(medium)
    repeated = {key: torch.cat([tensor] * number) for key, tensor in features.items()}
    num_rows = {key: (len(tensor),) * number for key, tensor in features.items()}
    return MediaGroup(repeated, num_rows, (rows,) * number, ("",) * number)
