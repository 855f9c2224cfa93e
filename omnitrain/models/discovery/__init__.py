"""Discover how an HF model reads media: components, features, positions; from signatures, configs and tiny runs."""

from omnitrain.models.discovery.discover import Discovery, discover, native_inputs, rest_codecs
from omnitrain.models.discovery.features import MediaFeatures, check_rows
from omnitrain.models.discovery.geometry import config_nodes
from omnitrain.models.discovery.interface import override
from omnitrain.models.discovery.model_errors import failure_of_model, raise_if_ours, refusing
from omnitrain.models.discovery.parameter_reads import ParameterReads, float_tensors
from omnitrain.models.discovery.peaked_init import init_peaked_
from omnitrain.models.discovery.placeholders import special_ids
from omnitrain.models.discovery.text_run import text_blocks, watching

__all__ = [
    "Discovery",
    "MediaFeatures",
    "ParameterReads",
    "check_rows",
    "config_nodes",
    "discover",
    "failure_of_model",
    "float_tensors",
    "init_peaked_",
    "native_inputs",
    "override",
    "raise_if_ours",
    "refusing",
    "rest_codecs",
    "special_ids",
    "text_blocks",
    "watching",
]
