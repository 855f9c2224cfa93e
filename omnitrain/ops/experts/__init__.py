"""The experts that omnitrain registers with transformers: sorted by expert, computed by grouped products.

A layer's forward is three steps on a run of tokens: ``dispatch`` brings a row of every (token, expert) pair to its
expert, the experts compute rows, ``combine`` adds the results per token (``routes``; over ranks: a :class:`Dispatcher`
that :mod:`omnitrain.parallel` puts in). What a layer's weights mean is declared by transformers'
``use_experts_implementation`` (``declared``). What was decided in a forward is taped for its recomputation (``tape``).
"""

from omnitrain.ops.experts.choose import AUTO, EXPERTS, ExpertsRow, experts_report
from omnitrain.ops.experts.declared import ExpertWeights, experts_in, is_experts, matrix_names
from omnitrain.ops.experts.entry import Dispatcher, bytes_sent, set_dispatcher, set_row_budget
from omnitrain.ops.experts.lora import add_expert_adapter, parameter_names
from omnitrain.ops.experts.replay import Recording, Replayed
from omnitrain.ops.experts.routes import Routes, combine_rows, sort_by_expert, take_rows
from omnitrain.ops.experts.tape import RoutingTape, is_replaying
from omnitrain.ops.experts.use import backend_of, use_omnitrain_experts

__all__ = [
    "AUTO",
    "EXPERTS",
    "Dispatcher",
    "ExpertWeights",
    "ExpertsRow",
    "Recording",
    "Replayed",
    "Routes",
    "RoutingTape",
    "add_expert_adapter",
    "backend_of",
    "bytes_sent",
    "combine_rows",
    "experts_in",
    "experts_report",
    "is_experts",
    "is_replaying",
    "matrix_names",
    "parameter_names",
    "set_dispatcher",
    "set_row_budget",
    "sort_by_expert",
    "take_rows",
    "use_omnitrain_experts",
]
