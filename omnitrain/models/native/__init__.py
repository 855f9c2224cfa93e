"""Whole HF models as foundation: components, rows, positions; found from signatures and configs."""

from omnitrain.models.native.discover import Discovery, discover
from omnitrain.models.native.failure import failure_of_model, raise_if_ours
from omnitrain.models.native.geometry import config_nodes
from omnitrain.models.native.inputs import native_inputs
from omnitrain.models.native.peaked import peaked_
from omnitrain.models.native.placeholders import TokenExtras, special_ids
from omnitrain.models.native.port import NativePort, override
from omnitrain.models.native.positions import PositionFunction
from omnitrain.models.native.rows import NativeRows, check_rows

__all__ = [
    "Discovery",
    "NativePort",
    "NativeRows",
    "PositionFunction",
    "TokenExtras",
    "check_rows",
    "config_nodes",
    "discover",
    "failure_of_model",
    "native_inputs",
    "override",
    "peaked_",
    "raise_if_ours",
    "special_ids",
]
