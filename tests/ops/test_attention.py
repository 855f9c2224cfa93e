import itertools

import pytest
import torch
import torch.nn.functional as F

from omnitrain.ops.attention import omnitrain_attention, segment_attention


class CausalLayer(torch.nn.Module):
    is_causal = True


def draw(length: int, kv_heads: int = 2, value_dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    return tuple(torch.randn(1, heads, length, dim, generator=generator) for heads, dim in sizes)


@pytest.mark.parametrize(
    "borders", [[0, 11], [0, 3, 6, 9, 11], [0, 1, 2, 11], [0, 5, 5, 11], [0, 4, 9, 11], [0, 2, 4, 7, 11]]
)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_a_packed_segment_equals_the_segment_alone(borders: list[int], is_causal: bool, value_dim: int) -> None:
    q, k, v = draw(11, value_dim=value_dim)
    for x in (q, k, v):
        x.requires_grad_()
    packed = segment_attention(q, k, v, borders, is_causal=is_causal, scale=None)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(packed.shape, generator=generator)
    gradients = torch.autograd.grad(packed, (q, k, v), upstream)
    for start, stop in itertools.pairwise(borders):
        alone = F.scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], is_causal=is_causal, enable_gqa=True
        )
        torch.testing.assert_close(packed[:, start:stop], alone.transpose(1, 2), atol=1e-6, rtol=1e-6)
        own = torch.autograd.grad(alone.transpose(1, 2), (q, k, v), upstream[:, start:stop])
        for whole, part in zip(gradients, own, strict=True):
            torch.testing.assert_close(whole[:, :, start:stop], part[:, :, start:stop], atol=1e-5, rtol=1e-5)


def test_changing_one_segment_leaves_the_others_bitwise_unchanged() -> None:
    q, k, v = draw(12)
    borders = torch.tensor([0, 4, 8, 12])
    before, _ = omnitrain_attention(CausalLayer(), q, k, v, None, cu_seq_lens_q=borders)
    for x in (q, k, v):
        x[:, :, 4:8] += 100.0
    after, _ = omnitrain_attention(CausalLayer(), q, k, v, None, cu_seq_lens_q=borders)
    assert torch.equal(before[:, :4], after[:, :4]) and torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.equal(before[:, 4:8], after[:, 4:8])


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"sliding_window": 3}])
def test_attention_that_is_not_honoured_is_refused_by_name(asked: dict[str, object]) -> None:
    q, k, v = draw(8)
    with pytest.raises(ValueError, match=next(iter(asked))):
        omnitrain_attention(CausalLayer(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 4, 8]), **asked)


def test_a_window_wider_than_every_sample_changes_nothing() -> None:
    q, k, v = draw(8)
    borders = torch.tensor([0, 4, 8])
    plain, _ = omnitrain_attention(CausalLayer(), q, k, v, None, cu_seq_lens_q=borders)
    windowed, _ = omnitrain_attention(CausalLayer(), q, k, v, None, cu_seq_lens_q=borders, sliding_window=4)
    assert torch.equal(plain, windowed)
