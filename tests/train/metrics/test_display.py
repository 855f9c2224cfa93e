from __future__ import annotations

import logging
from pathlib import Path

import pytest

from omnitrain.data.sources.rows import RowSource
from omnitrain.errors import DataError
from omnitrain.recipe import DataSource
from omnitrain.train.metrics.display import quiet_libraries


def test_libraries_do_not_say_again_what_an_error_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.parquet"
    file.write_text("question,answer\na,b\n")
    quiet_libraries()
    told = r"train\.parquet' cannot be read as parquet.*: Parquet magic bytes not found"
    with pytest.raises(DataError, match=told):
        RowSource(DataSource(path=str(file)))
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
    assert capfd.readouterr() == ("", "")
