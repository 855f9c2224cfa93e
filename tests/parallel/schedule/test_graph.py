"""A step cuts the graph at the features of each component, and has the bits of the model's own forward and backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import own_calls
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import gradients, laid_out, pack, samples
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
    model, drawn = built(name), samples_of(name)
    text = [sample for sample in drawn if not sample.spans]
    packs = [Pack.from_samples(drawn), Pack.from_samples(text or drawn[:1])]
    counts = {head: sum(one.loss_counts().get(head, 0) for one in packs) for head in ("text", *model.decoder_names)}
    expected_loss = torch.zeros(())
    for one in packs:
        loss = torch.stack([t.sum / max(counts[head], 1) for head, t in model(one).losses.items()]).sum()
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
    model, drawn = built("any_to_any"), pack()
    batch = step_planner(model, ALONE)([drawn])
    graph = StepGraph(model, batch, None)
    features = graph.features_of(0, batch.packs[0])
    assert features.keys() == {"image_encoder", "audio_encoder", "image_decoder", "audio_decoder"}
    for name, received in features.items():
        embeddings, *labels = received.tensors()
        items = sum(sum(call.num_tokens) for call in own_calls(model, drawn, name))
        assert embeddings.is_leaf and embeddings.requires_grad and len(embeddings) == items
        assert [label.dtype for label in labels] == [torch.int64] * (name in model.decoder_names)
        embeddings.grad = torch.ones_like(embeddings)
    graph.take_gradients(0)
    in_order = graph.with_backward(0)
    for name in in_order:
        graph.backward(name, 0)
    assert graph.left == [] and in_order == sorted(features, key=list(model.media_names).index, reverse=True)
    found = gradients_of(model)
    assert {name.partition(".")[0] for name, gradient in found.items() if gradient.any()} == features.keys()


def head_of_a_decoder_with_a_frozen_embedding(state: dict[str, int]) -> Tensor:
    """The gradient of its head after two micro-batches, which are the same on all ranks, for each rank's packs."""
    model = any_to_any().train()
    model.audio_decoder.embedding.requires_grad_(False)
    if torch.distributed.is_initialized():
        model = laid_out(state=state, model=model)
    batch = step_planner(model)([pack(), pack("image_to_speech")])
    accumulate_gradients(model, batch)
    return gradients(model)["audio_decoder.head.weight"]


@pytest.mark.parametrize("state", [{}, {"dp_replicate_size": 2}], ids=["dp2", "hsdp2x1"])
def test_a_decoder_whose_features_have_no_graph_is_reduced_with_its_head(
    ranks: RankPool, state: dict[str, int]
) -> None:
    alone = head_of_a_decoder_with_a_frozen_embedding({})
    assert alone.abs().sum() > 0
    for found in ranks.run(head_of_a_decoder_with_a_frozen_embedding, state, timeout_s=60, world=2):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def test_nothing_of_a_micro_batch_is_kept_where_no_token_is_trained() -> None:
    model = built("any_to_any")
    untrained = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in samples("image_to_text")]
    packs = [Pack.from_samples(untrained)] * 2
    batch = step_planner(model, ALONE)(packs)
    assert not any(batch.plan.loss_counts.values())
    graph = StepGraph(model, batch, None, trains=False)
    graph.features_of(0, batch.packs[0])
    graph.take_gradients(0)
    assert graph.left == []
