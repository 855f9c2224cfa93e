"""Discover how an HF model reads media: components, features, positions; from signatures, configs and tiny runs."""

from omnitrain.models.discovery.discover import Discovery as Discovery
from omnitrain.models.discovery.discover import discover as discover
from omnitrain.models.discovery.discover import native_inputs as native_inputs
from omnitrain.models.discovery.discover import rest_codecs as rest_codecs
from omnitrain.models.discovery.features import MediaFeatures as MediaFeatures
from omnitrain.models.discovery.features import check_rows as check_rows
from omnitrain.models.discovery.geometry import config_nodes as config_nodes
from omnitrain.models.discovery.interface import override as override
from omnitrain.models.discovery.model_errors import failure_of_model as failure_of_model
from omnitrain.models.discovery.model_errors import raise_if_ours as raise_if_ours
from omnitrain.models.discovery.model_errors import refusing as refusing
from omnitrain.models.discovery.parameter_reads import ParameterReads as ParameterReads
from omnitrain.models.discovery.parameter_reads import float_tensors as float_tensors
from omnitrain.models.discovery.placeholders import special_ids as special_ids
from omnitrain.models.discovery.text_run import text_blocks as text_blocks
from omnitrain.models.discovery.text_run import watching as watching
