"""The experts that omnitrain registers with transformers: rows sorted by expert, grouped matmuls.

A layer's forward dispatches one row for each (token, expert) pair to the experts, computes them and combines the
results per token (``permute.py``). Between ranks a :class:`Dispatcher` of :mod:`omnitrain.parallel` moves the rows.
transformers' ``use_experts_implementation`` declares the format of a layer's weights (``weights.py``). The routing of a
forward is recorded for its recomputation (``routing_tape.py``).
"""

from omnitrain.ops.experts.choose import AUTO, EXPERTS
from omnitrain.ops.experts.entry import Dispatcher, DispatchHandle, bytes_sent, settings_of
from omnitrain.ops.experts.install import backend_of, set_experts, use_omnitrain_experts
from omnitrain.ops.experts.lora import add_expert_adapter, merge_expert_adapter, parameter_names
from omnitrain.ops.experts.permute import (
    TokenPermutation,
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
from omnitrain.ops.experts.weights import (
    ExpertRange,
    ExpertWeights,
    chunk_offsets,
    experts_in,
    is_experts,
    matrix_names,
)

__all__ = [
    "AUTO",
    "EXPERTS",
    "DispatchHandle",
    "Dispatcher",
    "ExpertRange",
    "ExpertWeights",
    "LayerSpans",
    "Recording",
    "Replayed",
    "RoutingTape",
    "TokenPermutation",
    "add_expert_adapter",
    "backend_of",
    "bytes_sent",
    "chunk_offsets",
    "combine_rows",
    "experts_in",
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
