"""What a step, a line of metrics and a save cost per rank, on up to a thousand ranks.

One process stands in for all ranks. The functions are those of a run; only the network below them is replaced, by one
that counts bytes. ``growth`` is the figure of the largest world over that of the world before it: with four times as
many ranks, 4 is linear.

- ``step``: every rank lists its samples and images, the tables are gathered, and one rank plans the step and gets the
  media that it encodes. ``peak`` is the most memory that planning takes at a time; ``batch`` is what the data process
  hands to the training process.
- ``line``: a line of metrics of a resumed run in which ranks meet damaged rows.
- ``start``: the ranks compare the parameters of a model of 200.
- ``save``: the ranks collect the state of the data and commit a checkpoint, in which each has a file of the optimizer's
  state. ``groups_of_all_ranks_per_save`` are the process groups that saving an optimizer makes after the first time.
- ``process``: what a rank of 512 makes until its first step (``process_groups.py``), and the sockets of real ranks. The
  command fails if one is above its bound.
- ``order``: the seconds to order the micro-batches of a run whose image encoder has ranks of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import QUICKSTART, ROOT, Result, parser, report, start
from process_groups import exceeded, real, simulated
from simulated_ranks import GroupsMade, SimulatedRanks
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from omnitrain.checkpoint.optimizer import save_optimizer
from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.data.loading.data_process import encode
from omnitrain.data.loading.loader import LoaderOptions, StepLoader
from omnitrain.data.loading.slots import LoaderState, merge_states
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import MediaItem, MediaSpan, Rejected, Sample
from omnitrain.ops.timing import FEATURES, What
from omnitrain.parallel.fsdp.load import require_same_parameters
from omnitrain.parallel.step.feature_routing import row_splits
from omnitrain.parallel.step.media_dispatch import dispatch_media
from omnitrain.parallel.step.plan import StepPlanner, facts_of
from omnitrain.parallel.step.rendezvous import DataProcessGroup, Rendezvous
from omnitrain.peers import GlooGroup
from omnitrain.plan import Placement, Topology, decode_tables, encode_table, padded, plan_step
from omnitrain.plan.step import Rates
from omnitrain.plan.wavefront.step import SectionLimits, StepOrder
from omnitrain.recipe import Data, Recipe
from omnitrain.train.measures import RunMeasures
from omnitrain.train.metrics.flops import RunFlops
from omnitrain.train.metrics.meter import LossMeter, MeanLoss
from omnitrain.train.metrics.step_timing import StepSpans, Stopwatch
from omnitrain.train.process_groups import Ranks

BEFORE = ROOT / "benchmarks" / "results" / "many_ranks_before.json"  # by the first commit of this benchmark
FORMULA = "NAME_growth = NAME on the largest world / NAME on the world before it"
ENCODER = "image_encoder"
MICRO_BATCHES = 2
SAMPLES = 4  # of a micro-batch; each has an image
SOURCES = ("captions", "documents", "speech", "text")
REJECTED = 1  # damaged rows per rank, before the run was resumed
REASON = "image 1: unreadable image of 6,144 bytes: cannot identify image file"
PER_SECTION_RANK = 8  # ranks that read data for one rank that encodes
PROCESSES = 512  # ranks whose process groups are counted


def measure(worlds: Sequence[int], rounds: int) -> Result:
    """Measure all worlds, the smallest first."""
    figures: dict[str, float] = {}
    measured: dict[str, list[float]] = {}
    found: dict[str, list[float]] = {}
    for world in worlds:
        values = step_of(world, rounds) | order_of(world, rounds) | start_of(world) | line_of(world) | save_of(world)
        for name, value in values.items():
            figures[f"{name}_{world}"] = median(value)
            found.setdefault(name, []).append(median(value))
            if name.endswith("_seconds") and len(value) == rounds:
                measured[f"{name}_{world}"] = value
    growth = {f"{name}_growth": values[-1] / values[-2] for name, values in found.items() if values[-2]}
    of_bytes = max(value for name, value in growth.items() if name.endswith("_bytes_growth"))
    groups = {"groups_of_all_ranks_per_save": float(groups_of_a_save())}
    figures |= simulated(PROCESSES)
    return Result("many_ranks", FORMULA, {"largest_growth_of_bytes": of_bytes} | groups | figures | growth, measured)


Values = dict[str, list[float]]  # name -> one value, or one of each round


class Network:
    """In place of the gloo group of the data processes, as one rank sees it."""

    def __init__(self, tables: Sequence[np.ndarray], parcels: Sequence[bytes]) -> None:
        self.tables, self.parcels = tables, parcels
        self.sent = self.held = 0

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Network:
        """Give each of ``outputs`` the table of a rank."""
        for out, table in zip(outputs[0], self.tables, strict=True):
            out.copy_(torch.from_numpy(padded(table, len(out))))
        self._count(inputs[0].nbytes, sum(out.nbytes for out in outputs[0]))
        return self

    def alltoall_base(
        self, out: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], _: Any
    ) -> Network:
        """Give ``out`` the lengths of the parcels for this rank, then the parcels."""
        if received_sizes:
            out.copy_(torch.frombuffer(bytearray(b"".join(self.parcels)), dtype=torch.uint8))
        else:
            out.copy_(torch.tensor([len(parcel) for parcel in self.parcels]))
        self._count(sent.nbytes, out.nbytes)
        return self

    def wait(self) -> None:
        """All is there."""

    def _count(self, sent: int, held: int) -> None:
        self.sent += sent
        self.held += held


def topology_of(world: int, encoders: int = 0) -> Topology:
    """Images are encoded on any rank, or on ``encoders`` ranks of their own."""
    readers, everyone = tuple(range(world)), tuple(range(world + encoders))
    ranks = everyone[world:] if encoders else readers
    encoder = Placement(ENCODER, ranks, (ENCODER,), place="world")
    return Topology(
        len(everyone), (encoder, Placement("foundation", readers, reads_packs=True)), ("text",), readers=readers
    )


def packs_of(rank: int) -> list[Pack]:
    """The micro-batches of a rank, whose images have very different sizes."""
    rng = np.random.default_rng(rank)
    return [Pack.from_samples([_sample(rng, index) for index in range(SAMPLES)]) for _ in range(MICRO_BATCHES)]


def _sample(rng: np.random.Generator, index: int) -> Sample:
    tokens = 1 + int(rng.lognormal(2, 1))
    ids = np.arange(8 + tokens)
    item = MediaItem({"pixels": rng.random((tokens, 4), dtype=np.float32)}, tokens)
    return Sample(f"row {index}", SOURCES[0], ids, ids >= tokens, ids, (MediaSpan(ENCODER, 0, item, False),), index)


def step_of(world: int, rounds: int) -> Values:
    """Return what a rank in the middle sends and holds for a step, and the seconds to plan it."""
    topology, rank = topology_of(world), world // 2
    drawn = [packs_of(other) for other in range(world)]
    tables = [encode_table(topology, tuple(map(facts_of, packs))) for packs in drawn]
    plan = plan_step(topology, decode_tables(topology, tables))
    parcels: list[bytes] = []

    def keep(sent: Sequence[bytes]) -> list[bytes]:
        parcels.append(sent[rank])
        raise StopIteration

    for other, packs in enumerate(drawn):
        try:
            dispatch_media(plan, other, packs, keep)
        except StopIteration:
            continue
    network = Network(tables, parcels)
    data_processes = DataProcessGroup(Rendezvous("", 0, rank, world))
    data_processes._group = network  # connected
    planner = StepPlanner(topology, data_processes, None, _idle())
    batch = planner(drawn[rank])
    assert all(np.array_equal(getattr(batch.plan, f.name), getattr(plan, f.name)) for f in fields(plan))
    gathered = np.stack([padded(table, 1024) for table in tables])
    values: Values = {
        "step_sent_bytes": [float(network.sent)],
        "step_held_bytes": [float(network.held)],
        "step_batch_bytes": [float(sum(memoryview(part).nbytes for part in encode(batch)))],
        "step_peak_bytes": [float(_peak_of_planning(topology, gathered))],
    }
    for _ in range(rounds):
        begin = time.process_time()
        decoded = decode_tables(topology, gathered)
        planned_from = time.process_time()
        plan = plan_step(topology, decoded)
        read_from = time.process_time()
        for micro_batch in range(MICRO_BATCHES):
            plan.calls_of(rank, ENCODER, micro_batch)
            row_splits(plan.routes(ENCODER, micro_batch), range(world), rank)
        ends = (planned_from - begin, read_from - planned_from, time.process_time() - read_from)
        for name, seconds in zip(("decode", "plan", "route"), ends, strict=True):
            values.setdefault(f"step_{name}_seconds", []).append(seconds)
    return values


def _peak_of_planning(topology: Topology, gathered: np.ndarray) -> int:
    tracemalloc.start()
    plan_step(topology, decode_tables(topology, gathered))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _idle() -> Sample:
    ids = np.arange(2)
    return Sample("idle", "idle", ids, np.zeros(2, dtype=bool), ids, index=-1)


def order_of(world: int, rounds: int) -> Values:
    """Return the seconds to order the micro-batches of ``world`` ranks that read data."""
    encoders = max(1, world // PER_SECTION_RANK)
    topology = topology_of(world, encoders)
    facts = [tuple(map(facts_of, packs_of(rank))) if rank < world else () for rank in range(world)]
    facts += [()] * encoders
    tables = decode_tables(topology, [encode_table(topology, own) for own in facts])
    order = StepOrder((SectionLimits((ENCODER,), encoders, 2, None, False),), coupled=True)
    values = []
    for _ in range(rounds):
        begin = time.process_time()
        order(topology, tables, Rates(1.0, {ENCODER: 0.5}))
        values.append(time.process_time() - begin)
    return {"order_seconds": values}


class Rows(Sequence[Sample]):
    """A data set; every fourth row is damaged."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, row: Any) -> Sample:
        ids = np.arange(16)
        return Sample(f"data/train-00000-of-00001.parquet:{row}", SOURCES[row % len(SOURCES)], ids, ids > 0, ids)


class Processor:
    """Makes the samples of :class:`Rows`."""

    def sample(self, row: Sample, max_tokens: int | None, **options: bool) -> Sample | Rejected:
        """Return a row as it is, or why not."""
        number = int(row.id.rpartition(":")[2])
        return Rejected(row.id, row.source, REASON) if number % 4 == 0 else row


def loader_of(rank: int, world: int) -> StepLoader:
    """The loader of a rank that has made a step since the run was resumed."""
    rows = Rows(64 * world)
    before = [Rejected(rows[-index].id, SOURCES[0], REASON) for index in range(1, REJECTED * world + 1)]
    data = Data.model_validate({"train": [{"path": "rows"}], "pack_tokens": 64, "packing_buffer": 1, "workers": 0})
    state = LoaderState(rejected=tuple(before) if rank == 0 else ())  # one rank lists them, as in open_data
    options = LoaderOptions(seed=0, state=state, slots=world, rank=rank, ranks=world)
    loader = StepLoader([rows], Processor(), data, options)
    stream: Iterator[Any] = iter(loader)
    next(stream)
    return loader


def meter() -> LossMeter:
    """A meter with losses of one head for every source."""
    made = LossMeter()
    made.continue_from({"text": {source: [1.5, 3.0] for source in SOURCES}})
    return made


class Experts:
    """Waits of one layer, as :class:`~omnitrain.train.measures.RunMeasures` shows them."""

    def __init__(self, ranks: Ranks, recipe: Recipe) -> None:
        model = torch.nn.Module()
        model.media_names = {}
        self._ranks, self._spans = ranks, StepSpans(model, torch.device("cpu"), recipe, Path())
        with self._spans.step(1, 0, is_measured=True):
            for name in (FEATURES, "dispatch"):
                self._spans.recorder.add(What("wait", name, "forward", ENCODER), 0.0, 0.5)

    def metrics(self) -> dict[str, Any]:
        """Return what waits there were, over all ranks."""
        exposed = self._spans.exposed(self._ranks.peers)
        return {"experts": exposed.layers, "waits": list(self._spans.of_encoders(self._ranks.peers))}


def line_of(world: int) -> Values:
    """Return what the busiest rank sends and holds for a line of metrics, its length, and the seconds of a rank."""
    loaders = [loader_of(rank, world) for rank in range(world)]
    ranks, recipe = SimulatedRanks(world), Recipe.load(QUICKSTART)

    def on_rank(rank: int) -> dict[str, Any]:
        peers = GlooGroup()
        ranks_of_run = Ranks(None, peers, peers, peers, Rendezvous("", 0, rank, world))
        measures = SimpleNamespace(
            _recipe=recipe,
            step=1,
            samples=world,
            seconds=0.0,
            mean_loss=MeanLoss(1.5, 3),
            meter=meter(),
            ranks=ranks_of_run,
            stopwatch=Stopwatch(),
            flops=RunFlops(None, None),
            _device=torch.device("cpu"),
            loader=loaders[rank],
            data=loaders[rank].state(),
            steps_without_targets=0,
            compiled=None,
            _of_experts=Experts(ranks_of_run, recipe).metrics,
            encoder_metrics={},
        )
        return RunMeasures.metrics(measures, 1.0)

    begin = time.process_time()
    lines = ranks.run(on_rank)
    seconds = (time.process_time() - begin) / world
    return {"line_json_bytes": [float(len(json.dumps(lines[0])))], "line_cpu_seconds": [seconds]} | _traffic(
        "line", ranks
    )


def _traffic(name: str, ranks: SimulatedRanks) -> Values:
    return {
        f"{name}_sent_bytes": [float(max(ranks.sent))],
        f"{name}_held_bytes": [float(max(ranks.held))],
        f"{name}_held_by_others_bytes": [float(max(ranks.held[1:]))],
    }


def save_of(world: int) -> Values:
    """Return what the busiest rank sends and holds for a save, and the seconds of a rank."""
    loaders, ranks = [loader_of(rank, world) for rank in range(world)], SimulatedRanks(world)
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(rank: int) -> None:
            peers, own = GlooGroup(), meter()
            merge_states(peers.gather_on_first(loaders[rank].state()))
            own.totals(peers)

            def write(checkpoint: Path) -> None:
                (checkpoint / "optimizer").mkdir(exist_ok=True)
                (checkpoint / "optimizer" / f"__{rank}_0.distcp").touch()

            CheckpointStore(Path(folder, "checkpoints")).save(1, write, peers)

        begin = time.process_time()
        ranks.run(on_rank)
        seconds = (time.process_time() - begin) / world
    return {"save_cpu_seconds": [seconds]} | _traffic("save", ranks)


def groups_of_a_save() -> int:
    """Return how many process groups a save makes that is not the first one; they have all ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = torch.nn.Linear(4, 4), init_device_mesh("cpu", (1,))
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        with tempfile.TemporaryDirectory() as folder:
            save_optimizer(model, optimizer, Path(folder, "first"))
            with GroupsMade() as made:
                save_optimizer(model, optimizer, Path(folder, "second"))
            return made.number
    finally:
        dist.destroy_process_group()


def start_of(world: int) -> Values:
    """Return what a rank sends and holds to compare the parameters of a model with those of the others."""
    ranks, model = SimulatedRanks(world), torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(100)))
    ranks.run(lambda rank: require_same_parameters(model))
    return _traffic("start", ranks)


def main() -> None:
    """Measure and report."""
    arguments = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=1)
    arguments.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024], help="numbers of ranks, ascending")
    arguments.add_argument("--before", type=Path, default=BEFORE, help="an earlier result, printed beside this one")
    arguments.add_argument("--real", type=int, default=8, help="number of real ranks whose sockets are counted")
    arguments.add_argument("--only-groups", action="store_true", help="keep the other figures of the file of --json")
    options = start(arguments)
    if options.only_groups:
        result = Result(**{field.name: json.loads(options.json.read_text())[field.name] for field in fields(Result)})
        result.figures.update(simulated(PROCESSES))
    else:
        result = measure(options.worlds, options.rounds)
    result.figures.update(real(options.real))
    report(result, options.json)
    compare(json.loads(options.before.read_text())["figures"], result.figures)
    if above := exceeded(result.figures):
        raise SystemExit("\n".join(above))


def compare(before: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Print the figures that two results share, side by side."""
    print(f"{'':<42} {'before':>14} {'now':>14}")
    for name, value in now.items():
        if name in before:
            print(f"  {name:<40} {before[name]:>14,.6g} {value:>14,.6g}")


if __name__ == "__main__":
    main()
