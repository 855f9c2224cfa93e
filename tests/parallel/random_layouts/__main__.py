"""Run rows: ``python -m tests.parallel.random_layouts "LINE" ...``, or ``--draw SEED NUMBER [FIRST]``."""

from __future__ import annotations

import os
import sys
import time

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch

from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel.random_layouts.compare import compare
from tests.parallel.random_layouts.rows import Row, draw

if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    if arguments[0] == "--draw":
        seed, number, first, *_ = [*map(int, arguments[1:]), 0]
        rows = draw(seed, number)[first:]
    else:
        rows = [Row.parse(line) for line in arguments]
    with RankPool(8, preload=["omnitrain.train.trainer", "tests.parallel.random_layouts.on_ranks"]) as pool:
        for index, row in enumerate(rows):
            began = time.monotonic()
            found = compare(pool, row)
            print(f"{index:3} {time.monotonic() - began:5.1f}s {str(found)[:600]}", flush=True)
