from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.encode import idle_prompt, own_calls
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.step.rendezvous import Rendezvous
from omnitrain.plan.placement import Place
from tests.tiny import tiny_model, tiny_processor, tiny_samples

ALONE = Rendezvous("", 0, 0, 1)
ENCODERS = ("image_encoder", "audio_encoder")


def gradients_on_ranks(table: Sequence[Sequence[Sequence[Sample]]], place: Place) -> tuple[float, dict, dict]:
    """Of the packs ``table[rank][micro-batch]``: this rank's loss, gradients and items encoded by each rank."""
    rank, model = torch.distributed.get_rank(), tiny_model()
    idle = idle_prompt(model)
    packs = [Pack.from_samples(samples or [idle]) for samples in table[rank]]
    planner = step_planner(model)
    components = [replace(c, place=place) if c.name in ENCODERS else c for c in planner.topology.components]
    planner.topology = replace(planner.topology, components=tuple(components))
    batch = planner(packs)
    loss = accumulate_gradients(model, batch)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    loads = {name: batch.plan.loads(name).tolist() for name in ENCODERS}
    return loss.item(), gradients, loads


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model()


@pytest.fixture(scope="module")
def samples(model: OmniModel) -> list[Sample]:
    return tiny_samples(tiny_processor(model), 21)


def reference(model: OmniModel, samples: Sequence[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = accumulate_gradients(model, step_planner(model, ALONE)([Pack.from_samples(samples)]))
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        # The floor is for key biases without rotary positions, whose gradient is zero but for rounding.
        error = (got[name] - gradient).abs().max()
        assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"{name}: {error:.1e} of {gradient.abs().max():.1e}"


def summed(results: Sequence[tuple[float, dict, dict]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of ranks whose models are not sharded: parts of the loss and of the gradients add up."""
    names = {name for _, gradients, _ in results for name in gradients}
    zero = torch.zeros(())
    return sum(r[0] for r in results), {n: sum((r[1].get(n, zero) for r in results), zero) for n in names}


def test_a_step_of_one_process_plans_the_calls_that_its_packs_need(model: OmniModel, samples: list[Sample]) -> None:
    packs = [Pack.from_samples(samples[:7]), Pack.from_samples([samples[0]])]
    plan = step_planner(model, ALONE)(packs).plan
    names = [call_site.name for call_site in plan.topology.call_sites if call_site.kind == "encode"]
    for micro_batch, pack in enumerate(packs):
        planned = dict(zip(names, plan.calls[micro_batch].tolist(), strict=False))
        needed = {name: len(own_calls(model, pack, name)) for name in (*pack.inputs, *pack.targets)}
        assert {name: number for name, number in planned.items() if number} == needed
    assert plan.loss_counts == {
        name: sum(pack.loss_counts().get(name, 0) for pack in packs) for name in ("text", *model.decoder_names)
    }


def test_heads_without_data_add_nothing(model: OmniModel, samples: list[Sample]) -> None:
    text = Pack.from_samples([samples[0]])
    alone = model(text)
    model.zero_grad()
    together = model(EncodedPack(text, heads=model.decoder_names))
    assert set(together.losses) == {"text"} and torch.equal(together.losses["text"].sum, alone.losses["text"].sum)
    together.losses["text"].sum.backward()
    for name in model.decoder_names:
        gradients = [p.grad for n, p in model.get_submodule(name).named_parameters() if n.startswith("head")]
        assert gradients and all(g is not None and not g.any() for g in gradients), name


def test_nothing_of_a_micro_batch_is_held_in_the_forward_of_the_next(model: OmniModel, samples: list[Sample]) -> None:
    graphs: list[weakref.ref] = []
    held: list[bool] = []

    @contextmanager
    def forward(*_: object) -> Iterator[None]:
        held.extend(graph() is not None for graph in graphs)
        yield

    def on_output(_: Pack, output: OmniOutput) -> None:
        graphs.append(weakref.ref(output.losses["text"].sum.grad_fn))

    batch = step_planner(model, ALONE)([Pack.from_samples([sample]) for sample in samples[:2]])
    accumulate_gradients(model, batch, on_output=on_output, forward_context=forward)
    assert held == [False]


@pytest.mark.parametrize("place", ["local", "world"])
def test_a_step_is_the_same_wherever_its_media_are_encoded(
    ranks: RankPool, model: OmniModel, samples: list[Sample], place: Place
) -> None:
    media = [s for s in samples if s.spans]
    text = [s for s in samples if not s.spans]
    table = [[media[:9], []], [text, media[9:]], [[], []]]  # all images of the first micro-batch on one of three ranks
    loss, gradients = reference(model, samples)
    results = ranks.run(gradients_on_ranks, table, place, timeout_s=60, world=3)
    got_loss, got = summed(results)
    assert abs(got_loss - loss) <= 1e-5 * abs(loss)
    assert_same(got, gradients)
    loads = np.array(results[0][2]["image_encoder"])  # [micro-batches, ranks]
    busy = (loads > 0).sum(axis=1).tolist()
    assert busy == ([1, 1] if place == "local" else [3, 3])


def test_a_step_in_which_only_a_decoder_has_something_to_predict_has_a_backward_on_every_rank(
    ranks: RankPool, model: OmniModel, samples: list[Sample]
) -> None:
    """Calls without data are tied to the loss of the text, also where no token of text is predicted."""
    silent = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in samples]
    drawing = [sample for sample in silent if sample.source == "text_to_image"]
    seeing = [sample for sample in silent if sample.source == "image_to_text"]
    loss, gradients = reference(model, [*drawing, *seeing])
    results = ranks.run(gradients_on_ranks, [[drawing], [seeing]], "world", timeout_s=60, world=2)
    got_loss, got = summed(results)
    assert loss > 1 and abs(got_loss - loss) <= 1e-5 * loss
    assert_same(got, gradients)
