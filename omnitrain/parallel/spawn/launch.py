"""``ot.notebook.launch``: run a function of a notebook or a script on ranks of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankError, RankPool

_HEAVY = ("transformers", "omnitrain.parallel.parallelize")  # if this process has imported them, the ranks will


@dataclass(frozen=True)
class RankResults:
    """What a function returned on each rank, and what each rank printed; ``results[1]`` is what rank 1 returned."""

    results: tuple[Any, ...]
    output: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, rank: int) -> Any:
        return self.results[rank]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __repr__(self) -> str:
        return "\n".join(f"rank {rank}: {result!r}" for rank, result in enumerate(self.results))


def launch(
    function: Callable[..., Any] | str, nproc: int, *args: Any, timeout_s: float = 3600.0, quiet: bool = False
) -> RankResults:
    """Call ``function(*args)`` on ranks that are CPU processes of this machine, and wait for them.

    ``torch.distributed`` is initialised with the backend gloo, and the environment has what ``torchrun`` sets
    (``RANK``, ``WORLD_SIZE``, ...). Each rank has one thread and the seed 0. What the ranks print is shown as it comes,
    with the rank before each line. If a rank fails, the others are ended at once.

    Args:
        function: a function of a notebook's cell, or at the top level of a module; or ``"module:function"``. In a
            script, call ``launch`` under ``if __name__ == "__main__":``.
        nproc: number of ranks.
        args: its arguments; they and the results must be picklable. Tensors are copied.
        timeout_s: seconds after which ranks that have not returned are ended.
        quiet: do not show what the ranks print. It is in the results in any case.

    Raises:
        RankError: a rank raised, died, or did not return in time; has the tracebacks and what each rank printed.
        UserError: ``function`` or ``args`` cannot be sent to another process.
    """
    if nproc < 1:
        raise UserError(f"nproc: found {nproc}; expected a number of ranks above 0")
    printed: list[list[str]] = [[] for _ in range(nproc)]

    def on_print(rank: int, text: str) -> None:
        printed[rank].append(text)
        if not quiet:
            sys.stdout.write("".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True)))
            sys.stdout.flush()

    with RankPool(nproc, preload=[name for name in _HEAVY if name in sys.modules]) as pool:
        try:
            results = pool.run(function, *args, timeout_s=timeout_s, on_print=on_print)
        except RankError as error:
            error.output = tuple(map("".join, printed))
            raise
    return RankResults(tuple(results), tuple(map("".join, printed)))
