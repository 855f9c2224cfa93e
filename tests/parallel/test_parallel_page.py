"""The script of docs/parallel.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from omnitrain.parallel.ranks import RankPool
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import pack

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def run_page(folder: Path) -> list[tuple[str, str, int]]:
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(script[1], str(PAGE), "exec"), names)
    rows = names["train"](any_to_any().train(), [pack("text"), pack("image_to_text")], folder)
    return [(row.name, row.mode, row.trainable) for row in rows]


def test_the_script_of_the_page_trains_a_step_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    rows = ranks.run(run_page, tmp_path, timeout_s=60, world=2)[0]
    assert ("image_encoder", "replicate", 7008) in rows and ("audio_encoder", "fsdp2", 0) in rows
