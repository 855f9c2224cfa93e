"""The experts of a run: their routers, what these decided, the number of chunks, and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.expert.chunk_tuning import ExpertChunks
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.expert.routing_record import RoutingOfRun
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.expert_timing import ExpertSpans
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.state import TrainingState


class ExpertsOfRun:
    """All that a run does with its experts; nothing where the model has none.

    Args:
        model: laid out, or on one process.
        recipe: of the run.
        ranks: all of it.
        device: of this rank.
        traces: folder for traces.
        state: where the run stands.

    Attributes:
        routers: their losses, biases and load.
        routing: their decisions, recorded or replayed.
        chunks: of the exchanges.

    Raises:
        UserError: the recipe asks something of experts that the model does not have.
    """

    def __init__(
        self, model: OmniModel, recipe: Recipe, ranks: Ranks, device: torch.device, traces: Path, state: TrainingState
    ) -> None:
        asked = recipe.train.experts
        self._ranks, self._replays = ranks, asked.replay is not None
        self.routers = RouterMonitor(model, asked)
        self.routers.continue_from(state.expert_shares)
        self.routing = RoutingOfRun(model, asked.record, asked.replay, ranks.peers.rank)
        self.chunks = ExpertChunks(model, state.expert_chunks)
        self._spans = ExpertSpans(model, device, recipe, traces)

    @contextmanager
    def measured(self, step: int, tokens: int) -> Iterator[None]:
        """Optimizer step ``step``, from 1, over so many tokens of all ranks."""
        peers = self._ranks.peers
        with self._spans.step(step, peers.rank), self.chunks.measured(tokens, peers):
            yield

    def metrics(self) -> dict[str, Any]:
        """Of the last step that was measured, over all ranks, each of which calls this."""
        return {**self._load(), **self._replayed()}

    def _load(self) -> dict[str, Any]:
        if not (layers := self.routers.read()):
            return {}
        exposed = self._spans.exposed(self._ranks.peers)
        return {
            "experts": {name: row | {"exposed": exposed.layers.get(name, 0.0)} for name, row in layers.items()},
            "exposed_communication": {"seconds": exposed.seconds, "share": exposed.share},
        }

    def _replayed(self) -> dict[str, dict[str, int]]:
        """Where decisions of an earlier run are taken."""
        if not self._replays:
            return {}
        near_ties, others = (round(self._ranks.loss_peers.sum(number)) for number in self.routing.read())
        return {"replay": {"near_ties": near_ties, "others": others}}
