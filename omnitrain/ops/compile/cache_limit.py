"""The number of compilations of one piece of code that torch keeps."""

from __future__ import annotations

from omnitrain.torch_private import dynamo_config

# Past its default limit of 8, torch silently runs eagerly, or fails with fullgraph=True. Models, kinds of layers,
# lengths, forward and recomputation share code, so they need more.
_KEPT = 64


def keep_compilations() -> None:
    """Raise the limit for this thread; call it where compiled code runs.

    Since torch 2.13 each thread has its own settings, and on a GPU the backward, which recomputes blocks, runs in
    another thread than the forward.
    """
    config = dynamo_config()
    if config.recompile_limit < _KEPT:
        config.recompile_limit = _KEPT
