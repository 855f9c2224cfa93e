"""How many compilations of one piece of code torch keeps."""

from __future__ import annotations

import torch

# Past its own limit, 8, torch goes on eagerly without a word, or fails where a whole graph was asked for. Models share
# code, and so do kinds of layers, lengths, forward and recomputation.
_KEPT = 64


def keep_compilations() -> None:
    """Let this thread keep as many as there may be; to be called where compiled code is.

    From torch 2.13 on each thread has settings of its own, and on a GPU a backward, which computes blocks again, is
    another thread than its forward.
    """
    config = torch._dynamo.config
    if config.recompile_limit < _KEPT:
        config.recompile_limit = _KEPT
