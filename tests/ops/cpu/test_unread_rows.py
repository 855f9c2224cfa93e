import copy

import pytest
import torch
from torch import nn

from omnitrain.ops.cpu.unread_rows import (
    ReadRows,
    name_from_end,
    reading,
    rows_read,
    rows_read_of,
    skip_unread_rows,
    submodule,
)


class Counting(nn.Linear):
    """Notes how many rows it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[:-1].numel()
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting(3, 4), Counting(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


READ = ReadRows(torch.tensor([4, 1]), 6)


def test_only_rows_that_are_read_are_computed_and_losses_and_gradients_stay():
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(1, 6, 3)
    skipping = copy.deepcopy(plain)
    assert skip_unread_rows(skipping, ["layers.-1"]) == {"Counting": 1}
    with reading(READ):
        hidden = skipping(x)
    assert (skipping.layers[0].rows, skipping.layers[1].rows, plain(x).shape) == (6, 2, hidden.shape)
    assert torch.equal(hidden[:, READ.rows], plain(x)[:, READ.rows])
    assert hidden[0].any(1).tolist() == [False, True, False, False, True, False]
    for output in (hidden, plain(x)):
        output[0, READ.rows].square().sum().backward()
    for ours, theirs in zip(skipping.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_without_a_single_read_row_gradients_are_zeros():
    model = Model()
    skip_unread_rows(model, ["layers.-1"])
    with reading(ReadRows(torch.zeros(0, dtype=torch.long), 6)):
        model(torch.randn(1, 6, 3)).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(1, 5, 3), (2, 6, 3), (6, 3)])
def test_what_is_not_the_row_is_computed_whole(shape):
    model, x = Model(), torch.randn(shape)
    expected = model(x)
    skip_unread_rows(model, ["layers.-1"])
    with reading(READ):
        assert torch.equal(model(x), expected)


def test_outside_of_the_context_and_in_a_copy_everything_is_as_before():
    model, x = Model(), torch.randn(1, 6, 3)
    expected = model(x)
    skip_unread_rows(model, ["layers.-1"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[1].bias.add_(1)
    assert torch.equal(model(x), expected) and not torch.equal(twin(x), expected)
    with reading(READ), reading(None):
        assert rows_read() is None
    assert rows_read() is None


def test_only_what_attends_last_leaves_queries_out():
    blocks = nn.ModuleList(nn.ModuleDict({"attention": nn.ModuleDict({"out": nn.Linear(3, 3)})}) for _ in range(2))
    skip_unread_rows(blocks, ["-1.attention.out"])
    first, last = (block["attention"] for block in blocks)
    with reading(READ):
        assert [rows_read_of(module, 6) for module in (first, last, blocks[1])] == [None, READ, None]
        assert rows_read_of(last, 5) is None
    assert rows_read_of(last, 6) is None


def test_items_of_lists_are_named_from_their_end():
    tall = nn.ModuleDict({"blocks": nn.ModuleList(Model() for _ in range(5))})
    assert name_from_end(tall, "blocks.4.layers.1") == "blocks.-1.layers.-1"
    assert submodule(tall, "blocks.-1.layers.-2") is tall["blocks"][4].layers[0]
