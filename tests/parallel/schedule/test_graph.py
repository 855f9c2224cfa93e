"""A step cuts the graph at the features of each component, and has the bits of the model's own forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import own_calls
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.step.plan import step_planner
from tests.parallel.schedule.pipelines import build
from tests.parallel.schedule.test_accumulate import ALONE
from tests.parallel.schedule.test_layouts import samples_of


def built(name: str) -> OmniModel:
    torch.manual_seed(0)
    model = build(name)
    return (model if isinstance(model, OmniModel) else build_omni_model(foundation=model)).train()


def gradients_of(model: OmniModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_omni_thinker", "gemma3")]


@pytest.mark.parametrize("name", ["any_to_any", "qwen3_vl", "frozen qwen3_vl", *SLOW])
def test_a_step_has_the_bits_of_the_models_own_forward(name: str) -> None:
    """Encoders, decoders, towers inside the foundation, deepstack; with images and without, in one process."""
    model, samples = built(name), samples_of(name)
    text = [sample for sample in samples if not sample.spans]
    packs = [Pack.from_samples(samples), Pack.from_samples(text or samples[:1])]
    counts = {head: sum(pack.loss_counts().get(head, 0) for pack in packs) for head in ("text", *model.decoder_names)}
    expected_loss = torch.zeros(())
    for pack in packs:
        loss = torch.stack([t.sum / max(counts[head], 1) for head, t in model(pack).losses.items()]).sum()
        if loss.requires_grad:  # not of a text, where a tower alone trains
            loss.backward()
        expected_loss += loss.detach()
    expected = gradients_of(model)
    loss = accumulate_gradients(model, step_planner(model, ALONE)(packs))
    found = gradients_of(model)
    assert torch.equal(loss, expected_loss) and loss > 0
    assert found.keys() == expected.keys() and len(found) > 5
    assert [n for n, gradient in expected.items() if not torch.equal(found[n], gradient)] == []


def test_a_forward_reads_leaves_and_a_decoder_is_a_node_as_an_encoder_is() -> None:
    model, samples = built("any_to_any"), samples_of("any_to_any")
    pack = Pack.from_samples(samples)
    batch = step_planner(model, ALONE)([pack])
    graph = StepGraph(model, batch, None)
    features = graph.features_of(0, batch.packs[0])
    assert features.keys() == {"image_encoder", "audio_encoder", "image_decoder", "audio_decoder"}
    for name, received in features.items():
        embeddings, *labels = received.tensors()
        items = sum(sum(call.num_tokens) for call in own_calls(model, pack, name))
        assert embeddings.is_leaf and embeddings.requires_grad and len(embeddings) == items
        assert [label.dtype for label in labels] == [torch.int64] * (name in model.decoder_names)
        embeddings.grad = torch.ones_like(embeddings)
    graph.take_gradients(0)
    for name in graph.trained_in(0):
        graph.backward(name, 0)
    assert graph.trained_in(0) == sorted(features, key=list(model.media_names).index, reverse=True)
    found = gradients_of(model)
    assert {name.partition(".")[0] for name, gradient in found.items() if gradient.any()} == features.keys()
