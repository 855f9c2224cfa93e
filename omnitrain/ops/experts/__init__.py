"""The experts that omnitrain registers with transformers: sorted by expert, computed by grouped products.

A layer's forward is a :class:`Journey` of rows, one of every (token, expert) pair: they arrive at their experts, which
compute them, go back, and are added per token (``routes``; over ranks: a :class:`Dispatcher` that
:mod:`omnitrain.parallel` puts in). What a layer's weights mean is declared by transformers'
``use_experts_implementation`` (``declared``). What was decided in a forward is taped for its recomputation (``tape``).
"""

from omnitrain.ops.experts.choose import AUTO, EXPERTS, ExpertsRow, experts_report
from omnitrain.ops.experts.entry import Dispatcher, Journey, bytes_sent, settings_of
from omnitrain.ops.experts.install import backend_of, set_experts, use_omnitrain_experts
from omnitrain.ops.experts.lora import add_expert_adapter, merge_expert_adapter, parameter_names
from omnitrain.ops.experts.permute import (
    Routes,
    combine_rows,
    sort_by_expert,
    take_rows,
    token_gradients,
    weighted_sum_gradients,
    weighted_sums,
)
from omnitrain.ops.experts.routing_replay import Recording, Replayed
from omnitrain.ops.experts.routing_tape import RoutingTape, is_replaying
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.ops.experts.weights import ExpertWeights, Piece, chunk_borders, experts_in, is_experts, matrix_names

__all__ = [
    "AUTO",
    "EXPERTS",
    "Dispatcher",
    "ExpertWeights",
    "ExpertsRow",
    "Journey",
    "LayerSpans",
    "Piece",
    "Recording",
    "Replayed",
    "Routes",
    "RoutingTape",
    "add_expert_adapter",
    "backend_of",
    "bytes_sent",
    "chunk_borders",
    "combine_rows",
    "experts_in",
    "experts_report",
    "is_experts",
    "is_replaying",
    "matrix_names",
    "merge_expert_adapter",
    "parameter_names",
    "set_experts",
    "settings_of",
    "sort_by_expert",
    "take_rows",
    "token_gradients",
    "use_omnitrain_experts",
    "weighted_sum_gradients",
    "weighted_sums",
]
