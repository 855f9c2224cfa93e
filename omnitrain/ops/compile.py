"""``torch.compile`` of a model's blocks, with dynamic lengths, and a count of what was compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from omnitrain.errors import UserError
from omnitrain.ops.attention import ATTENTION_NAME


class CompiledBlocks:
    """What :func:`compile_blocks` compiled, and how often.

    Blocks share their code, so those that are alike compile once.

    Attributes:
        names: of the blocks.
        compilations: piece of code -> how often it was compiled.
    """

    def __init__(self, names: list[str], max_recompiles: int, backend: str) -> None:
        self.names = names
        self.compilations: dict[int, int] = {}
        self._max_recompiles = max_recompiles
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        """The backend that torch calls with each new graph."""
        compile_id = torch._guards.CompileContext.current_compile_id()
        if compile_id is not None and compile_id.frame_id is not None and compile_id.frame_compile_id is not None:
            done = self.compilations.get(compile_id.frame_id, 0)
            self.compilations[compile_id.frame_id] = max(done, compile_id.frame_compile_id + 1)
        return self._compile(graph, inputs, **options)

    @property
    def recompiles(self) -> int:
        """Compilations of any code beyond its first: another kind of input; another length needs none."""
        return sum(self.compilations.values()) - len(self.compilations)

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
        """The blocks run as they are: for generation, whose inputs are of another kind."""
        with torch.compiler.set_stance("force_eager"):
            yield


def compile_blocks(model: nn.Module, *, max_recompiles: int = 8, backend: str = "inductor") -> CompiledBlocks:
    """Compile each block of ``model``, in place; parameters and the keys of the state dict stay.

    Blocks are the items of the module lists that transformers can recompute (``GradientCheckpointingLayer``). All sizes
    are dynamic, so lengths do not recompile. Attention over packed rows runs as it is, between two compiled halves.

    Args:
        model: on its device.
        max_recompiles: more of them are an error of :meth:`CompiledBlocks.check`.
        backend: of ``torch.compile``.

    Raises:
        UserError: ``model`` has no such blocks, or this machine no C++ compiler.
    """
    blocks = {name: block for name, block in model.named_modules() if _is_block(model, name, block)}
    if not blocks:
        raise UserError(f"{type(model).__name__} has no list of blocks that torch.compile could take one by one")
    if backend == "inductor":
        _require_compiler()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, max_recompiles + 2)
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]))
    compiled = CompiledBlocks(list(blocks), max_recompiles, backend)
    for block in blocks.values():
        block.compile(backend=compiled, dynamic=True)
    return compiled


def _is_block(model: nn.Module, name: str, module: nn.Module) -> bool:
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, GradientCheckpointingLayer) and isinstance(parent, nn.ModuleList)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch raises what the platform's search raises
        raise UserError(
            "train.compile: torch.compile needs a C++ compiler, and none was found "
            f"({str(error).splitlines()[0]}); install g++ or set train.compile to false"
        ) from None
