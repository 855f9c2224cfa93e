"""Async Ulysses through ``build_parallelize_model``, in the any-to-any model."""

from typing import Any

import pytest
import torch

import omnitrain as ot
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.run import Outcome, micro_batches, train
from tests.parallel import factories
from tests.parallel.laid_out import laid_out
from tests.tiny import tiny_processor, tiny_samples


def trained(is_async: bool, degrees: dict[str, int], plan: dict[str, Any]) -> tuple[Outcome, str]:
    """Three steps, and what the table says of the foundation's sequences."""
    foundation = {"async_ulysses": is_async}
    model = laid_out(plan, {"foundation": foundation}, degrees)
    table = micro_batches(model, tiny_samples(tiny_processor(factories.any_to_any()), 6), 1, 2)
    rows = {row.name: row.sequence for row in ot.parallel.layout_of(model).table(model)}
    assert {text for name, text in rows.items() if name != "foundation"} == {"whole"}
    return train(model, table[0]), rows["foundation"]


def on_and_off(degrees: dict[str, int], plan: dict[str, Any]) -> list[str]:
    """What the tables say, after all gradients and weights have been compared bit by bit."""
    (off, plain), (on, overlapping) = trained(False, degrees, plan), trained(True, degrees, plan)
    assert on.loss == off.loss
    for name, gradient in off.gradients.items():
        assert torch.equal(on.gradients[name], gradient), name
    for name, weight in off.weights.items():
        assert torch.equal(on.weights[name], weight), name
    return [plain, overlapping]


@pytest.mark.second
def test_async_ulysses_trains_bit_for_bit_as_the_plain_form(ranks: RankPool) -> None:
    found = ranks.run(on_and_off, {"ulysses_size": 2}, {"memory": {"recompute": "full"}}, timeout_s=120, world=2)
    assert found == [["ulysses 2", "ulysses 2, async 2 of 2 layers"]] * 2
