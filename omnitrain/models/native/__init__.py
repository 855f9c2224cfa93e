"""Whole HF models as foundation: components, rows, positions; found from signatures and configs."""

from omnitrain.models.native.discover import Discovery, discover
from omnitrain.models.native.failure import failure_of_model, raise_if_ours, refusing
from omnitrain.models.native.geometry import config_nodes
from omnitrain.models.native.inputs import native_inputs
from omnitrain.models.native.peaked import peaked_
from omnitrain.models.native.placeholders import special_ids
from omnitrain.models.native.port import override
from omnitrain.models.native.rows import NativeRows, check_rows
from omnitrain.models.native.touch import ParameterReads, float_tensors

__all__ = [
    "Discovery",
    "NativeRows",
    "ParameterReads",
    "check_rows",
    "config_nodes",
    "discover",
    "failure_of_model",
    "float_tensors",
    "native_inputs",
    "override",
    "peaked_",
    "raise_if_ours",
    "refusing",
    "special_ids",
]
