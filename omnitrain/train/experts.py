"""The experts of a run: router monitoring, recorded routing, chunk tuning and metrics."""

from __future__ import annotations

from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.expert.chunk_tuning import ExpertChunks
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.expert.routing_record import RoutingOfRun
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.step_timing import StepSpans
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.state import TrainingState


class ExpertsOfRun:
    """Everything that a run does with its experts: balance, recorded or replayed routing, the number of chunks.

    Raises:
        UserError: the recipe has settings for experts, but the model has none.
    """

    def __init__(self, model: OmniModel, recipe: Recipe, ranks: Ranks, spans: StepSpans, state: TrainingState) -> None:
        settings = recipe.train.experts
        self._ranks, self._replays = ranks, settings.replay is not None
        self.routers = RouterMonitor(model, settings)
        self.routers.continue_from(state.expert_shares)
        self.routing = RoutingOfRun(model, settings.record, settings.replay, ranks.peers.rank)
        self.chunks = ExpertChunks(model, state.expert_chunks)
        self._spans = spans

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last measured step over all ranks. Every rank calls this."""
        found: dict[str, Any] = {}
        if layers := self.routers.read():
            exposed = self._spans.exposed(self._ranks.peers)
            found["experts"] = {name: row | {"exposed": exposed.layers.get(name, 0.0)} for name, row in layers.items()}
            found["exposed_communication"] = {"seconds": exposed.seconds, "share": exposed.share}
        if self._replays:  # how replayed decisions differ from the routers' decisions
            near_ties, others = (round(self._ranks.meter_peers.sum(count)) for count in self.routing.read())
            found["replay"] = {"near_ties": near_ties, "others": others}
        return found
