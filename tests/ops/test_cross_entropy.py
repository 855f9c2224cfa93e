import torch
import torch.nn.functional as F

from omnitrain.ops.cross_entropy import linear_cross_entropy


def test_rows_sum_to_the_plain_loss() -> None:
    hidden, weight, labels = torch.randn(7, 4), torch.randn(9, 4), torch.randint(0, 9, (7,))
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels).sum(), plain)


def test_no_labels_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.long)).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() == 0
