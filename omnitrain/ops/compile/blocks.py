"""``torch.compile`` a model's blocks with dynamic lengths, and count recompiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain import torch_private
from omnitrain.errors import UserError
from omnitrain.ops.host_values import reading_nothing
from omnitrain.ops.patch_forward import recomputed_call_of
from omnitrain.transformers_private import checkpoint_block, checkpoint_of

# Past its default limit of 8, torch silently runs eagerly, or fails with fullgraph=True. Models, kinds of layers,
# lengths, forward and recomputation share code, so they need more.
_KEPT = 64

# Compilations in this process: (id of the code, index of its compilation).
_compiled: list[tuple[int, int]] = []


@cache
def _counting(name: str) -> Callable[..., Any]:
    """A backend that counts compilations. One object per name: torch does not share code between backend objects."""
    compile_graph = torch_private.dynamo_backend(name)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        current = torch_private.compile_id()
        if current is not None and current.frame_id is not None and current.frame_compile_id is not None:
            _compiled.append((current.frame_id, current.frame_compile_id))
        return compile_graph(graph, inputs, **options)

    return backend


class CompiledBlocks:
    """The blocks that :func:`compile_blocks` compiled, and how often; equal ones, also of equal models, share code."""

    def __init__(self, blocks: Mapping[str, nn.Module], max_recompiles: int) -> None:
        self.names = list(blocks)
        self._blocks = list(blocks.values())
        self._max_recompiles = max_recompiles
        self._before = len(_compiled)

    @property
    def compilations(self) -> dict[int, int]:
        """Id of the code -> number of compilations since these blocks were compiled."""
        return Counter(code for code, _ in set(_compiled[self._before :]))

    @property
    def recompiles(self) -> int:
        """Number of compilations beyond the first of each code; another length of the input needs none."""
        return sum(count - 1 for count in self.compilations.values())

    def check(self) -> None:
        """Raise a UserError that stops the run if there were more recompiles than allowed."""
        if self.recompiles > self._max_recompiles:
            raise UserError(
                f"{self.recompiles} recompiles, {self._max_recompiles} allowed: the inputs of the blocks keep changing "
                "(TORCH_LOGS=recompiles shows how); raise train.compile.max_recompiles, or set train.compile to false"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the blocks, but not attention and losses, without compilation: for generation, whose inputs differ."""
        compiled = [torch_private.compiled_call(block) for block in self._blocks]
        for block in self._blocks:
            torch_private.set_compiled_call(block, None)
        try:
            yield
        finally:
            for block, call in zip(self._blocks, compiled, strict=True):
                torch_private.set_compiled_call(block, call)


def compile_blocks(
    model: nn.Module, device: torch.device, *, max_recompiles: int = 8, backend: str = "inductor"
) -> CompiledBlocks:
    """Compile each block of ``model``, in place; parameters and the keys of the state dict stay.

    All sizes are dynamic, so another length does not recompile. The entry point of attention disables compilation, so a
    block has two graphs, before and after attention, which equal blocks share. Of what is recomputed in the backward,
    the forward inside the checkpoint is compiled, in training. Too many recompiles are an error of
    :meth:`CompiledBlocks.check`. Raises UserError: ``model`` has no blocks, or ``device`` no compiler.
    """
    blocks = dict(blocks_in(model))
    if not blocks:
        raise UserError(f"{type(model).__name__} has no list of blocks, which torch.compile would compile one by one")
    if backend == "inductor" and (lack := compiler_missing(device)) is not None:
        raise UserError(f"train.compile: torch.compile {lack}; install it or set train.compile to false")
    keep_compilations()
    compiled = cache(partial(_compiled_function, backend))
    for block in blocks.values():
        for module in block.modules():
            if (call := recomputed_call_of(module)) is not None:
                call.checkpoint = partial(_compiled_inside, call.checkpoint, compiled)
        if (checkpoint := checkpoint_of(block)) is None:
            block.compile(backend=_counting(backend), dynamic=True)
            torch_private.set_compiled_call(block, partial(_compiled_call, torch_private.compiled_call(block)))
        else:
            checkpoint_block(block, partial(_compiled_inside, checkpoint, compiled))
    return CompiledBlocks(blocks, max_recompiles)


def _compiled_function(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what runs inside a checkpoint; on a GPU it runs again in the thread of backwards."""
    compiled = torch.compile(function, backend=_counting(backend), dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        keep_compilations()
        return compiled(*args, **kwargs)

    return call


def _compiled_inside(checkpoint: Callable[..., Any], compiled: Callable[..., Any], function: Any, *args: Any) -> Any:
    """Checkpoint ``function``, a forward, compiled: torch compiles nothing around a checkpoint."""
    with reading_nothing():
        return checkpoint(partial(compiled(function.func), *function.args, **function.keywords), *args)


def _compiled_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with reading_nothing():
        return call(*args, **kwargs)


def blocks_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of all blocks: the items of module lists that transformers can recompute."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        is_listed = isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)
        if is_listed and isinstance(module, GradientCheckpointingLayer):
            yield name, module


def compiler_missing(device: torch.device) -> str | None:
    """Return the missing requirement of torch.compile for ``device``; None: nothing is missing."""
    try:
        torch_private.find_cpp_compiler()
    except Exception as error:  # the type depends on the platform
        return f"needs a C++ compiler, and none was found ({str(error).splitlines()[0]})"
    return "needs triton (pip install triton)" if device.type == "cuda" and not torch_private.has_triton() else None


def keep_compilations() -> None:
    """Set up torch's compiler for this thread: on a GPU, backwards recompute blocks in another one."""
    config = torch_private.dynamo_config()
    if config.recompile_limit < _KEPT:
        config.recompile_limit = _KEPT
    config.nested_graph_breaks = True  # a graph break inside a call must not break its callers
