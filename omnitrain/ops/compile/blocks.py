"""``torch.compile`` of a model's blocks, with dynamic lengths, and a count of what was compiled again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.errors import UserError
from omnitrain.ops.compile.cache_limit import keep_compilations

# What torch compiled in this process: (piece of code, number of its compilation), by any of our backends.
_compiled: list[tuple[int, int]] = []


@cache
def _counting(name: str) -> Callable[..., Any]:
    """A backend that counts. One object per name: torch compiles anew for another one, models could share nothing."""
    compile_graph = torch._dynamo.lookup_backend(name)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        current = torch._guards.CompileContext.current_compile_id()
        if current is not None and current.frame_id is not None and current.frame_compile_id is not None:
            _compiled.append((current.frame_id, current.frame_compile_id))
        return compile_graph(graph, inputs, **options)

    return backend


class CompiledBlocks:
    """What :func:`compile_blocks` compiled, and how often.

    Blocks share their code, so those that are alike compile once; so do models that are alike.

    Attributes:
        names: of the blocks.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], max_recompiles: int) -> None:
        self.names = list(blocks)
        self._blocks = list(blocks.values())
        self._max_recompiles = max_recompiles
        self._before = len(_compiled)

    @property
    def compilations(self) -> dict[int, int]:
        """Piece of code -> how often it was compiled since these blocks were."""
        return Counter(code for code, _ in set(_compiled[self._before :]))

    @property
    def recompiles(self) -> int:
        """Compilations of any code beyond its first: another kind of input; another length needs none."""
        return sum(number - 1 for number in self.compilations.values())

    def check(self) -> None:
        """Stop a run that spends its time compiling.

        Raises:
            UserError: more recompiles than allowed.
        """
        if self.recompiles > self._max_recompiles:
            raise UserError(
                f"{self.recompiles} recompiles, {self._max_recompiles} allowed: what reaches the blocks keeps changing "
                "(TORCH_LOGS=recompiles names it); raise train.compile.max_recompiles, or set train.compile to false"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The blocks run as they are: for generation, whose inputs are of another kind.

        Attention and losses that are compiled for themselves stay so: as they are, they would need far more memory.
        """
        compiled = [block._compiled_call_impl for block in self._blocks]
        for block in self._blocks:
            block._compiled_call_impl = None
        try:
            yield
        finally:
            for block, call in zip(self._blocks, compiled, strict=True):
                block._compiled_call_impl = call


def compile_blocks(
    model: nn.Module, device: torch.device, *, max_recompiles: int = 8, backend: str = "inductor"
) -> CompiledBlocks:
    """Compile each block of ``model``, in place; parameters and the keys of the state dict stay.

    All sizes are dynamic, so lengths do not recompile. Attention is not in the graphs: its entry point asks torch to
    stay out. So a block is two graphs, and blocks that are alike share them.

    Args:
        model: on any device.
        device: where it will compute.
        max_recompiles: more of them are an error of :meth:`CompiledBlocks.check`.
        backend: of ``torch.compile``.

    Raises:
        UserError: ``model`` has no such blocks, or this machine no C++ compiler.
    """
    blocks = dict(blocks_in(model))
    if not blocks:
        raise UserError(f"{type(model).__name__} has no list of blocks that torch.compile could take one by one")
    if backend == "inductor" and (lack := compiler_missing(device)) is not None:
        raise UserError(f"train.compile: torch.compile {lack}; install it or set train.compile to false")
    keep_compilations()
    torch._dynamo.config.nested_graph_breaks = True  # a break inside a call does not break its callers, too
    for block in blocks.values():
        block.compile(backend=_counting(backend), dynamic=True)
    return CompiledBlocks(blocks, max_recompiles)


def blocks_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of all blocks of ``model``: the items of module lists that transformers can recompute."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        is_listed = isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)
        if is_listed and isinstance(module, GradientCheckpointingLayer):
            yield name, module


def compiler_missing(device: torch.device) -> str | None:
    """What torch.compile lacks here to make kernels for ``device``; None: nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except Exception as error:  # torch raises what the platform's search raises
        return f"needs a C++ compiler, and none was found ({str(error).splitlines()[0]})"
    return "needs triton (pip install triton)" if device.type == "cuda" and not has_triton() else None
