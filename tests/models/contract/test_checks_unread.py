"""Modules that only some samples call are found, and the others call them on empty inputs."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from pydantic import TypeAdapter
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract, SkippedModule
from omnitrain.models.contract.check import check_contract
from omnitrain.models.foundation.skipped_modules import call_skipped_modules
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.plan import step_planner
from tests.families import FAMILIES
from tests.models.contract import broken
from tests.models.plain import pair_of

LAYER = ("model.layers.*.mlp.extra", "model.layers.*.mlp")


def test_a_layer_that_short_samples_leave_out_is_called_on_no_rows() -> None:
    contract = check_contract(broken.CallingForLongRows, FAMILIES["qwen3"]())
    assert contract.skipped_modules == (SkippedModule(*LAYER, takes=((1, 0, 64),)),)
    assert TypeAdapter(Contract).validate_json(json.dumps(asdict(contract))) == contract


def test_a_layer_whose_arguments_for_no_rows_nobody_knows_says_so() -> None:
    (found,) = check_contract(broken.TellingForLongRows, FAMILIES["qwen3"]()).skipped_modules
    assert (found.module, found.parent) == LAYER and found.problem.startswith("it takes `scale`")


def test_what_only_images_call_is_called_on_nothing_for_a_text_whose_model_is_given_no_rows() -> None:
    both = pair_of(FAMILIES["llama4"]())
    assert both.ours.runner.contract.skipped_modules == (SkippedModule("multi_modal_projector", "", takes=((0, 64),)),)
    text = Pack.from_samples([both.probes[0].sample])
    both.ours(text).losses["text"].sum.backward()
    weight = both.ours.foundation.multi_modal_projector.linear_1.weight
    assert not weight.grad.any()
    both.ours.zero_grad()
    image = Pack.from_samples([both.probes[3].sample])
    for packs, is_read in (([text], False), ([text, image], True), ([text], True)):
        accumulate_gradients(both.ours, step_planner(both.ours)(packs))
        # Zeros in place of no gradient let AdamW decay a weight, and momentum move it.
        assert (weight.grad is not None) == is_read


def test_what_short_texts_do_not_read_keeps_a_model_on_one_rank() -> None:
    contract = check_contract(broken.ReadByLongTexts, FAMILIES["qwen3"]())
    (found,) = contract.skipped_modules
    assert (found.module, found.problem) == ("compressor", "samples of 2 tokens do not read its parameters")


class _Chooses(nn.Module):
    """Calls those of three layers whose numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, rows: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
        for number in numbers:
            rows = self.steps[number](rows)
        return rows


def test_calls_come_in_one_order_and_give_gradients_of_zeros() -> None:
    model = _Chooses()
    names: list[int] = []
    for number, step in enumerate(model.steps):
        step.register_forward_hook(lambda *_, number=number: names.append(number))
    call_skipped_modules(model, [SkippedModule("steps.*", "", takes=((0, 3),))])
    rows = torch.randn(4, 3, requires_grad=True)
    for numbers in ((0, 1, 2), (1,), (), (2,)):
        names.clear()
        model.zero_grad()
        output = model(rows, numbers)
        output.sum().backward()
        assert names == [0, 1, 2]
        for number, step in enumerate(model.steps):
            assert (float(step.weight.grad.abs().max()) > 0) == (number in numbers)
    assert torch.equal(output, model.steps[2](rows))
