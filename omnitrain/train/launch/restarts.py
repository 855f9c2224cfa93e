"""Start a run again on the ranks that are left, when some of them were killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnitrain.errors import EXIT_REQUEUE
from omnitrain.train.launch.launch import RanksLostError, launch


def launch_with_restarts(
    arguments: Callable[[], Sequence[str]],
    nproc: int,
    *,
    max_restarts: int,
    fits: Callable[[int], bool],
    say: Callable[[str], None],
    stop_seconds: float,
) -> int:
    """Call :func:`launch`, and again on fewer ranks whenever ranks were killed; return its last exit code.

    Places on this machine (on CUDA: devices) in which a rank was killed are not used again. Of the others, so many are
    used as the run can divide itself over; 143: it works on none of the ranks that are left. An error of the run itself
    never starts it again.

    Args:
        arguments: called before each start; returns the arguments of the python interpreter.
        nproc: number of ranks of the first start.
        max_restarts: how often to start again.
        fits: whether the run works on a number of ranks.
        say: called with a line for the user.
        stop_seconds: see :func:`launch`.
    """
    left = used = list(range(nproc))
    places: list[int] | None = None  # all of them
    for restart in range(1, max_restarts + 1):
        try:
            return launch(arguments(), len(used), stop_seconds=stop_seconds, places=places)
        except RanksLostError as lost:
            size_before = len(used)
            gone = {used[rank] for rank in lost.ranks}
            left = [place for place in left if place not in gone]
            if not left:  # all crashed alike
                raise
            used = places = left[: next((size for size in range(len(left), 0, -1) if fits(size)), 0)]
            if not used:
                say(f"{lost}; the run does not work on fewer than {size_before} ranks, so it ends")
                return EXIT_REQUEUE
            idle = f", {len(left) - len(used)} idle" if len(used) < len(left) else ""
            say(f"{lost}; restart {restart} of {max_restarts} on {len(used)} rank{'s' * (len(used) > 1)}{idle}")
    return launch(arguments(), len(used), stop_seconds=stop_seconds, places=places)
