"""The masks that transformers composes for a packed sequence, against the masks that it makes for each sample alone."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree
from transformers import LlamaConfig
from transformers.masking_utils import (
    blockwise_overlay,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from omnitrain.errors import UserError
from omnitrain.ops.attention.backends.segments import CAUSAL_SLACK, batches_of
from omnitrain.ops.attention.install import ATTENTION_NAME
from omnitrain.ops.attention.packed_context import packed, packed_sequence
from omnitrain.ops.attention.spec import MaskSpec, segment_starts
from tests.waits import DEVICE, Device

OFFSETS = (0, 4, 9, 10, 18)
# Blocks of image tokens; one ends where a sample ends and the next sample begins with another.
BLOCK_IDS = torch.tensor([[-1, 0, 0, 0, 1, 1, -1, 2, 2, -1, -1, 3, 3, 3, -1, -1, -1, -1]])
POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(OFFSETS)])[None]
CPU = torch.device("cpu")

# (config, first token, last token + 1, keyword arguments of every sample) -> what transformers makes
Make = Callable[..., Any]


def config(implementation: str) -> LlamaConfig:
    made = LlamaConfig(hidden_size=8, num_attention_heads=1, sliding_window=3, attention_chunk_size=3)
    made._attn_implementation = implementation
    return made


def ask(create: Callable[..., Any], implementation: str, start: int, stop: int, **more: Any) -> Any:
    name = implementation
    if create is create_chunked_causal_mask and implementation == ATTENTION_NAME:
        name = "omnitrain"  # what a config with chunks is given
    embeds = torch.zeros(1, stop - start, 8)
    return create(config=config(name), inputs_embeds=embeds, attention_mask=None, past_key_values=None, **more)


def plain(create: Callable[..., Any]) -> Make:
    return lambda implementation, start, stop, **more: ask(create, implementation, start, stop, **more)


def blocks(implementation: str, start: int, stop: int, **more: Any) -> Any:
    ids = BLOCK_IDS[:, start:stop]
    return ask(create_causal_mask, implementation, start, stop, block_sequence_ids=ids, **more)


def windowed_blocks(implementation: str, start: int, stop: int, **more: Any) -> Any:
    ids = blockwise_overlay(BLOCK_IDS[:, start:stop])
    overlays = {"or_mask_function": ids, "and_mask_function": sliding_window_overlay(3)}
    return ask(create_causal_mask, implementation, start, stop, **overlays, **more)


def bidirectional_window(implementation: str, start: int, stop: int, **_: Any) -> Any:
    overlay = sliding_window_bidirectional_overlay(2)
    return ask(create_bidirectional_mask, implementation, start, stop, and_mask_function=overlay)


def chains(implementation: str, start: int, stop: int, **_: Any) -> Any:
    overlay = packed_sequence_mask_function(BLOCK_IDS[:, start:stop])
    return ask(create_bidirectional_mask, implementation, start, stop, and_mask_function=overlay)


def prefix(implementation: str, start: int, stop: int, **more: Any) -> Any:
    """A function of the model's own that counts."""
    width = 2

    def overlay(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query < width) & (key < width)

    return ask(create_causal_mask, implementation, start, stop, or_mask_function=overlay, **more)


def allowed(is_open: torch.Tensor, batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return is_open[batch, key]


def bound_kinds_of_token(implementation: str, start: int, stop: int, **more: Any) -> Any:
    overlay = partial(allowed, BLOCK_IDS[:, start:stop] < 2)
    return ask(create_causal_mask, implementation, start, stop, or_mask_function=overlay, **more)


def kinds_of_token(implementation: str, start: int, stop: int, **more: Any) -> Any:
    """A function of the model's own that looks up tokens."""
    is_image = BLOCK_IDS[:, start:stop] >= 0

    def overlay(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_image[batch, key] | is_image[batch, query]

    return ask(create_causal_mask, implementation, start, stop, and_mask_function=overlay, **more)


MASKS: dict[str, tuple[Make, str]] = {
    "causal": (plain(create_causal_mask), "causal"),
    "window": (plain(create_sliding_window_causal_mask), "window"),
    "chunks": (plain(create_chunked_causal_mask), "causal"),
    "full": (lambda name, start, stop, **_: ask(create_bidirectional_mask, name, start, stop), "full"),
    "image blocks": (blocks, "general"),
    "image blocks in a window": (windowed_blocks, "general"),
    "window to both sides": (bidirectional_window, "general"),
    "chains": (chains, "general"),
    "prefix": (prefix, "general"),
    "kinds of token": (kinds_of_token, "general"),
    "kinds of token, bound": (bound_kinds_of_token, "general"),
}


def opened(spec: MaskSpec) -> torch.Tensor:
    """``[T, T]``: what the spec lets through."""
    places = torch.arange(OFFSETS[-1])
    seen = spec.packed_function(CPU)(torch.zeros((), dtype=torch.long), 0, places[:, None], places[None])
    return seen.expand(OFFSETS[-1], OFFSETS[-1])


def alone(make: Make) -> torch.Tensor:
    """``[T, T]``: the eager masks of the samples on the diagonal."""
    parts = []
    for start, stop in itertools.pairwise(OFFSETS):
        mask = make("eager", start, stop, position_ids=POSITIONS[:, start:stop])
        parts.append(torch.ones(stop - start, stop - start, dtype=torch.bool) if mask is None else mask[0, 0] == 0)
    return torch.block_diag(*parts).bool()


@pytest.mark.parametrize("detected", [False, True], ids=["offsets only", "positions restart, too"])
@pytest.mark.parametrize("name", MASKS)
def test_the_mask_of_a_packed_row_is_that_of_each_sample_alone(name: str, detected: bool) -> None:
    make, kind = MASKS[name]
    with packed(OFFSETS):
        spec = make(ATTENTION_NAME, 0, OFFSETS[-1], position_ids=POSITIONS if detected else None)
    assert spec.kind == kind
    assert torch.equal(opened(spec), alone(make))
    for start, stop in itertools.pairwise(spec.offsets):
        part = spec.block_mask((start, stop), (start, stop), CPU).expand(1, 1, stop - start, stop - start)
        assert torch.equal(part[0, 0], alone(make)[start:stop, start:stop])


def test_a_window_as_long_as_every_sample_needs_no_mask() -> None:
    made = config(ATTENTION_NAME)
    made.sliding_window = 8
    embeds = torch.zeros(1, 18, 8)
    with packed(OFFSETS):
        spec = create_sliding_window_causal_mask(made, embeds, None, None)
    assert (spec.kind, spec.offsets) == ("causal", OFFSETS)
    assert [batch.mask for batch in batches_of(spec, 1.25, CPU)] == [None] * 3  # 4 and 5 tokens share a call


def test_chunks_are_cut_as_samples_are() -> None:
    with packed(OFFSETS):
        spec = MASKS["chunks"][0](ATTENTION_NAME, 0, 18)
    assert spec.offsets == (0, 3, 4, 7, 9, 10, 13, 16, 18)


def test_a_function_that_counts_and_looks_up_is_refused() -> None:
    by_token, inner = BLOCK_IDS >= 0, sliding_window_overlay(2)

    def both(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return by_token[batch, key] & inner(batch, head, query, key)

    class Object:
        def __call__(self, batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return by_token[batch, key]

    for function in (both, Object(), Object().__call__):
        with packed(OFFSETS), pytest.raises(UserError, match="more than a lookup or a count"):
            ask(create_causal_mask, ATTENTION_NAME, 0, 18, or_mask_function=function)


def test_layers_share_what_follows_from_a_mask() -> None:
    evaluated = []

    def counted(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        evaluated.append(query.shape)
        return (key <= query) & (key != 1)

    spec = MaskSpec(OFFSETS, general=counted)
    assert batches_of(spec, 1.25, CPU) is batches_of(spec, 1.25, CPU)
    assert len(evaluated) == 4


def test_a_row_that_is_entered_again_keeps_no_masks_of_the_forward_before() -> None:
    row = packed(OFFSETS)
    for _ in range(3):
        with row:
            spec = blocks(ATTENTION_NAME, 0, 18)
            assert packed_sequence().masks == [spec]


def test_a_mask_that_an_outer_model_made_stays() -> None:
    with packed(OFFSETS):
        outer = blocks(ATTENTION_NAME, 0, 18)
        inner = create_causal_mask(config(ATTENTION_NAME), torch.zeros(1, 18, 8), outer, None)
    assert inner is outer


def test_padding_in_a_packed_row_is_refused() -> None:
    mask = torch.ones(1, 18, dtype=torch.long)
    embeds = torch.zeros(1, 18, 8)
    with packed(OFFSETS):
        assert create_causal_mask(config(ATTENTION_NAME), embeds, mask, None).kind == "causal"
        mask[0, -1] = 0
        with pytest.raises(UserError, match="packed sequence has no padding"):
            create_causal_mask(config(ATTENTION_NAME), embeds, mask, None)


@pytest.mark.parametrize("shape", [(1, 19, 8), (2, 18, 8)])
def test_a_causal_mask_that_does_not_fit_the_row_is_refused(shape: tuple[int, ...]) -> None:
    with packed(OFFSETS), pytest.raises(UserError, match="packed sequence of 18 tokens"):
        create_causal_mask(config(ATTENTION_NAME), torch.zeros(shape), None, None)


def test_a_tower_with_another_number_of_tokens_gets_its_own_mask() -> None:
    with packed(OFFSETS):
        assert create_bidirectional_mask(config(ATTENTION_NAME), torch.zeros(2, 16, 8), None) is None
        with packed(None):
            assert create_causal_mask(config(ATTENTION_NAME), torch.zeros(1, 18, 8), None, None) is None


def test_code_that_computes_on_a_mask_is_told_what_it_is() -> None:
    spec = MaskSpec(OFFSETS)
    with pytest.raises(UserError, match="reads 'dtype' of its attention mask, so it cannot be packed"):
        _ = spec.dtype
    with pytest.raises(UserError, match="slices its attention mask, so it cannot be packed"):
        _ = spec[:, :, :4]
    assert not hasattr(spec, "to")


@pytest.mark.parametrize(
    "make",
    [
        lambda spec: spec.packed_function(DEVICE),
        lambda spec: segment_starts(spec.offsets, DEVICE),
        lambda spec: batches_of(spec, CAUSAL_SLACK, DEVICE),
    ],
)
def test_what_follows_from_offsets_comes_to_the_device_without_a_wait(make: Callable[[MaskSpec], Any]) -> None:
    device = Device()
    with device.watched():
        make(MaskSpec((0, 8, 17), causal=True))
    assert device.waits == {}


class Keeps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, attention_mask: Any) -> torch.Tensor:
        self.seen += [attention_mask, x.dtype]
        return self.linear(x)


def test_a_spec_passes_fsdp_and_trees_as_the_same_object() -> None:
    spec, module = MaskSpec(OFFSETS, causal=True), Keeps()
    assert _pytree.tree_map(lambda leaf: leaf, {"mask": [spec]})["mask"][0] is spec
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        module(torch.zeros(1, 2), attention_mask={"full_attention": spec})
    finally:
        torch.distributed.destroy_process_group()
    assert module.seen[0]["full_attention"] is spec
    assert module.seen[1] == torch.bfloat16
