"""What the host sent to a device, it reads without waiting; results keep their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omnitrain.ops.host_values import reading_on_host, remember, values_of
from tests.waits import DEVICE, Device

Read = Callable[[Tensor, Tensor], object]


def sent(values: Tensor) -> Tensor:
    return remember(values.clone(), values)


READS: list[Read] = [
    lambda grid, x: grid.prod(-1).tolist(),
    lambda grid, x: [int(row.sum()) for row in grid],
    lambda grid, x: f"{(grid == 4).sum()}" if (grid == 4).any() else "",
    lambda grid, x: torch.repeat_interleave(grid[:, 1], grid[:, 2]).cumsum(0).tolist(),
    lambda grid, x: torch.arange(grid.sum(), device=DEVICE).max().item(),
    lambda grid, x: torch.tensor([2, 3], device=DEVICE).expand(2, 2).tolist(),
    lambda grid, x: x[grid[:, 0] == 2].shape,
]


@pytest.mark.parametrize("read", READS)
def test_what_the_host_sent_is_read_without_a_wait(read: Read) -> None:
    grid = torch.tensor([[2, 3, 4], [1, 4, 2]])
    there, x = sent(grid), torch.randn(2, 3)
    expected = read(grid, x)
    device = Device([there])
    with device.watched(), reading_on_host(DEVICE):
        assert read(there, x) == expected
    assert device.waits == {}


def test_a_gradient_through_a_known_mask_waits_for_nothing_and_has_the_same_bits() -> None:
    values, x = torch.tensor([True, False, True, True]), torch.randn(4, 3)
    gradients = []
    for mask in (values, sent(values)):
        device, leaf = Device([mask, x]), x.clone().requires_grad_()
        device.put([leaf])
        with device.watched(), reading_on_host(DEVICE):
            hidden = leaf * 2
            hidden[mask, :] = hidden[mask, :] + 1
            hidden.square().sum().backward()
        gradients.append(leaf.grad)
        assert (device.waits == {}) is (mask is not values)
    assert torch.equal(*gradients)


def test_the_host_forgets_what_is_changed_in_place() -> None:
    there = sent(torch.tensor([1, 2]))
    with reading_on_host(DEVICE):
        doubled, view = there * 2, there[:1]
        there += 1
        later = there * 2
    assert values_of(doubled).tolist() == [2, 4]
    assert values_of(there) is None and values_of(view) is None and values_of(later) is None
    assert later.tolist() == [4, 6]


def test_the_host_does_not_know_what_the_device_drew() -> None:
    there = sent(torch.tensor([1, 2]))
    with reading_on_host(DEVICE):
        drawn = torch.randint_like(there, 100)
    assert values_of(drawn) is None
