"""The rows that are looked at when a data set is opened, and their records without the bytes of media."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from omnitrain.recipe import Columns

EXAMPLES = 64  # rows of a data set
URL_READS = 16  # most reads for them, if the data set is at a URL


def evenly_spaced(total: int, most: int) -> list[int]:
    """Return at most ``most`` positions below ``total``, from the first to the last."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64)).tolist()


def example_of(table: pa.Table, position: int, columns: Columns) -> dict[str, Any]:
    """Return a row of an Arrow table. Bytes of media are not read: in their place is whether there are any."""
    media = columns.of_media().values()
    row = {name: table.column(name)[position] for name in table.column_names}
    return {name: without_bytes(value) if name in media else value.as_py() for name, value in row.items()}


def without_bytes(value: pa.Scalar) -> Any:
    """Return an Arrow value in Python, with a bool in the place of bytes: whether there are any."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        return {name: without_bytes(one) for name, one in value.items()}
    if isinstance(value, (pa.ListScalar, pa.LargeListScalar)):
        return [without_bytes(one) for one in value.values]
    if pa.types.is_binary(value.type) or pa.types.is_large_binary(value.type):
        return value.as_buffer().size > 0
    return value.as_py()
