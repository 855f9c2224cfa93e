import copy
import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from omnitrain.errors import UserError
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.attention.packed_context import packed
from omnitrain.ops.compile.blocks import CompiledBlocks, blocks_in, compile_blocks
from omnitrain.ops.fused.install import fuse_ops
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.memory.recompute import (
    SAVED_OPS,
    attention_modules,
    recompute_blocks,
    recompute_modules,
)

MAX_TOKENS = 12
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgets_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed_model(**values: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    sizes |= {"num_hidden_layers": 2, "head_dim": 16} | values
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, **sizes))
    use_omnitrain_attention(model)
    return model


def pack(lengths: list[int]) -> dict[str, Any]:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "input_ids": torch.randint(0, 50, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }


def run(model: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    """Logits of a packed sequence."""
    with packed(arguments["cu_seq_lens_q"].tolist()):
        return model(**arguments).logits


def step(model: nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    logits = run(model, arguments)
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def train_on_random_shapes(model: nn.Module, number: int, **options: str) -> CompiledBlocks:
    plain, shapes = copy.deepcopy(model), random.Random(0)
    keys = list(model.state_dict())
    compiled = compile_blocks(model, CPU, **options)
    assert list(model.state_dict()) == keys
    for _ in range(number):
        arguments = pack([shapes.randint(1, MAX_TOKENS) for _ in range(shapes.randint(1, 6))])
        for ours, theirs in zip(step(model, arguments), step(plain, arguments), strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    return compiled


@pytest.mark.second
def test_random_shapes_compile_two_graphs_for_all_blocks():
    model = packed_model()
    fuse_ops(model, {"rms_norm": "fused"})
    graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = train_on_random_shapes(model, 10, backend="eager")
    assert compiled.names == ["model.layers.0", "model.layers.1"]
    assert sum(compiled.compilations.values()) == 2  # before attention and behind it; blocks that are alike share them
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs_before == 2
    assert compiled.recompiles == 0


@pytest.mark.slow
def test_fifty_random_shapes_of_blocks_that_differ_compile_at_most_two_graphs_per_block():
    model = packed_model(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=4)
    compiled = train_on_random_shapes(model, 50, backend="aot_eager")
    assert sum(compiled.compilations.values()) <= 2 * len(compiled.names)


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["torch", "fused"])
def test_fifty_random_shapes_compile_two_graphs_with_inductor(norms):
    model = packed_model()
    fuse_ops(model, {"rms_norm": norms})
    compiled = train_on_random_shapes(model, 50)
    assert sum(compiled.compilations.values()) == 2


@pytest.mark.second
def test_too_many_recompiles_are_an_error():
    model = packed_model()
    compiled = compile_blocks(model, CPU, max_recompiles=0, backend="eager")
    run(model, pack([3, 4]))
    compiled.check()
    with torch.no_grad():
        run(model, pack([3, 4]))
    assert compiled.recompiles > 0
    with pytest.raises(UserError, match=r"0 allowed.*train\.compile\.max_recompiles"):
        compiled.check()


def test_a_second_model_of_the_same_shapes_compiles_nothing():
    for expected in (True, False):
        model = packed_model()
        compiled = compile_blocks(model, CPU, backend="eager")
        run(model, pack([3, 4]))
        assert bool(compiled.compilations) == expected


@pytest.mark.second
def test_paused_blocks_do_not_compile_and_what_is_no_block_does():
    model, others = packed_model(), []
    compiled = compile_blocks(model, CPU, backend="eager")
    loss = torch.compile(lambda x: x.sin().sum(), backend=lambda graph, _: others.append(graph) or graph)
    with compiled.paused():
        run(model, pack([3, 4]))
        loss(torch.ones(2))
    assert not compiled.compilations and len(others) == 1
    run(model, pack([3, 4]))
    assert compiled.compilations


def test_what_cannot_compile_says_so():
    with pytest.raises(UserError, match="Linear has no list of blocks"):
        compile_blocks(nn.Linear(2, 2), CPU)
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        compile_blocks(packed_model(), CPU)


def test_what_a_gpu_needs_is_asked_of_a_model_whose_parameters_are_on_the_host(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UserError, match="needs triton"):
        compile_blocks(packed_model(), torch.device("cuda"))


def recompute(model: nn.Module, how: str) -> None:
    """As a plan's ``memory.recompute``, or with ``memory.offload: [activations]``."""
    blocks = [block for _, block in blocks_in(model)]
    if how == "parts":
        recompute_modules(module for block in blocks for module in attention_modules(block))
    else:
        around = ActivationOffload(CPU).saving if how == "offload" else None
        recompute_blocks(blocks, SAVED_OPS if how == "selective" else None, around)


@pytest.mark.parametrize(
    "how", ["full", "parts", *(pytest.param(how, marks=pytest.mark.second) for how in ("selective", "offload"))]
)
def test_what_is_recomputed_is_compiled_and_computes_as_eager(how: str) -> None:
    model = packed_model(num_hidden_layers=4).train()
    plain = copy.deepcopy(model)
    recompute(model, how)
    compiled = compile_blocks(model, CPU, backend="eager")
    for lengths in ([3, 4], [9], [1, 7, 2], [5, 5, 6]):
        arguments = pack(lengths)
        for ours, theirs in zip(step(model, arguments), step(plain, arguments), strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert 2 <= sum(compiled.compilations.values()) <= 6  # the same for any number of layers and any lengths
    compiled.check()
    before = compiled.compilations
    with compiled.paused(), torch.no_grad():  # as evaluation and generation
        assert torch.equal(run(model.eval(), arguments), run(plain.eval(), arguments))
    assert compiled.compilations == before
