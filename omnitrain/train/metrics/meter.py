"""Measurements of a run: losses and tokens per head and source, memory."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch

from omnitrain.data.packing.pack import Pack, PackInfo
from omnitrain.errors import TrainingError
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.ops.host_values import to_device
from omnitrain.peers import SINGLE_PROCESS, Peers
from omnitrain.recipe.train import EarlyStopping
from omnitrain.report.svg import numbers_in
from omnitrain.train.metrics.trackers import ShownSample, Tracker, tell


class StopWatcher:
    """Counts measurements of a metric without improvement; ``reason``: why the run should end, or None."""

    def __init__(self, settings: EarlyStopping, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue from the ``lines`` that the run has written so far."""
        self._settings = settings
        self._best, self._best_step, self._missed = float("nan"), 0, 0
        self.reason: str | None = None
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics; one without the metric does not count."""
        value: Any = line
        for part in self._settings.metric.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            return
        gain = (self._best - value) if self._settings.mode == "min" else (value - self._best)
        if not self._best_step or gain > self._settings.min_delta:
            self._best, self._best_step, self._missed, self.reason = value, line["step"], 0, None
            return
        self._missed += 1
        if self._missed >= self._settings.patience:
            self.reason = (
                f"{self._settings.metric} has not improved in {self._missed} measurement{'s' * (self._missed > 1)} "
                f"since {self._best:.4g} at step {self._best_step} (train.early_stopping)"
            )


def read_lines(file: Path, last_step: int) -> list[str]:
    """Return the lines of a file up to a step, without a last one that a kill has cut; none without a file."""
    whole = file.read_text().rpartition("\n")[0] if file.is_file() else ""
    return [line for line in whole.splitlines() if json.loads(line)["step"] <= last_step]


# Head -> source -> sum of its losses, tokens. METRIC/HEAD has the values of a metric. `data:` -> source ->
# samples, their tokens; `data:COMPONENT` -> source -> media items that the component reads or writes, their tokens.
Totals = dict[str, dict[str, list[float]]]

_DATA = "data:"


@dataclass(frozen=True)
class PackLosses:
    """The losses of one pack, without the tensors that the model's backward needs."""

    info: PackInfo  # the samples of the pack
    sample: dict[str, torch.Tensor]  # head -> ``[n]`` int64, the index of the sample of each row; on the host
    rows: dict[str, torch.Tensor]  # head -> ``[n]`` fp32, the losses of predicted tokens; on the device of the model
    metrics: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # (metric, head) -> values like ``rows``

    @classmethod
    def of(cls, pack: Pack, output: OmniOutput) -> PackLosses:
        """Take the losses of a pack out of the model's output."""
        ends = torch.tensor(list(accumulate(pack.info.lengths)))
        sample = {name: torch.bucketize(read, ends, right=True) for name, read in output.read.items()}
        metrics = {(name, head): rows for head, term in output.losses.items() for name, rows in term.metrics.items()}
        return cls(pack.info, sample, {name: term.rows for name, term in output.losses.items()}, metrics)

    def not_finite(self) -> dict[str, list[str]]:
        """Return head -> ids of the samples with a loss that is NaN or infinite. Waits for the device."""
        found = {name: self.sample[name][~rows.isfinite().cpu()].unique() for name, rows in self.rows.items()}
        return {name: [self.info.ids[i] for i in samples.tolist()] for name, samples in found.items() if len(samples)}


class MeanLoss:
    """The mean of the total loss of steps, weighted by their predicted tokens."""

    def __init__(self, mean: float = 0.0, tokens: int = 0) -> None:
        """Continue from the ``mean`` of earlier steps with ``tokens`` predicted tokens."""
        self.mean, self.tokens = mean, tokens

    def add(self, loss: float, tokens: int) -> None:
        """Add the total loss of a step with ``tokens`` predicted tokens over all ranks."""
        self.tokens += tokens
        if tokens:
            self.mean += (loss - self.mean) * (tokens / self.tokens)

    def read(self) -> float:
        """Return the mean since the last reading, and reset."""
        mean, self.mean, self.tokens = self.mean, 0.0, 0
        return mean


class LossMeter:
    """Losses, tokens and samples by source since the last reading, without waiting for the device."""

    def __init__(self) -> None:
        self._sources: dict[str, int] = {}
        self._totals: dict[str, torch.Tensor] = {}  # head -> [sources, 2]: loss sum, tokens
        self._data: Totals = {}

    def add_samples(self, packs: Sequence[Pack], media: Mapping[str, Sequence[str]]) -> None:
        """Count samples and media (of ``media_of_data``) by source, on one of the ranks that hold them."""
        names = {name for of_component in media.values() for name in of_component}
        for pack in packs:
            sources = pack.info.sources
            for source, length, index in zip(sources, pack.info.lengths, pack.info.indices, strict=True):
                if index >= 0:  # no stand-in
                    self._count(_DATA, source, length)
            for component, batch in (*pack.inputs.items(), *pack.targets.items()):
                if component not in names:
                    continue
                for sample, tokens in zip(batch.samples, batch.num_tokens, strict=True):
                    if pack.info.indices[sample] >= 0:
                        self._count(f"{_DATA}{component}", sources[sample], tokens)

    def _count(self, name: str, source: str, tokens: int) -> None:
        counts = self._data.setdefault(name, {}).setdefault(source, [0.0, 0.0])
        counts[0] += 1
        counts[1] += tokens

    def add(self, pack: Pack, output: OmniOutput) -> None:
        """Add the losses of one pack."""
        self.add_losses(PackLosses.of(pack, output))

    def add_losses(self, losses: PackLosses) -> None:
        """Add the losses of one pack."""
        source_of_sample = torch.tensor(
            [self._sources.setdefault(source, len(self._sources)) for source in losses.info.sources]
        )
        metrics = {f"{metric}/{head}": rows for (metric, head), rows in losses.metrics.items()}
        for name, rows in (losses.rows | metrics).items():
            sources = to_device(source_of_sample[losses.sample[name.rpartition("/")[2]]], rows.device)
            # Doubles count tokens exactly, and past 2^24, where adding 1 to a float no longer changes it.
            values = torch.stack([rows, torch.ones_like(rows)], dim=1).double()
            self._total(name, values).index_add_(0, sources, values)

    def _total(self, name: str, like: torch.Tensor) -> torch.Tensor:
        old = self._totals[name].to(like.device) if name in self._totals else like.new_zeros(0, 2)
        missing = len(self._sources) - len(old)
        self._totals[name] = torch.cat([old, old.new_zeros(missing, 2)]) if missing else old
        return self._totals[name]

    def read(self, peers: Peers = SINGLE_PROCESS) -> dict[str, Any]:
        """Return means by head and by source, metrics and samples, the same on all peers, which call it; and reset."""
        found: dict[str, list[tuple[str, list[float]]]] = {}
        for totals in peers.gather(self._own()):
            for name, of_sources in totals.items():
                found.setdefault(name, []).extend(of_sources.items())
        self._totals, self._data = {}, {}
        heads: dict[str, Any] = {}
        sources: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        data: dict[str, Any] = {}
        for name, rows in sorted(found.items()):
            if name.startswith(_DATA):
                _add_data(data, name.removeprefix(_DATA), rows)
                continue
            metric, is_metric, head = name.partition("/")
            if is_metric:
                metrics.setdefault(metric, {})[head] = _mean([values for _, values in rows])["loss"]
                continue
            heads[name] = _mean([values for _, values in rows])
            for source in sorted({source for source, (_, count) in rows if count}):
                sources.setdefault(source, {})[name] = _mean([values for found, values in rows if found == source])
        more = {"metrics": metrics, "data": data}
        return {"heads": heads, "sources": sources, **{name: values for name, values in more.items() if values}}

    def totals(self, peers: Peers = SINGLE_PROCESS) -> Totals:
        """Return the sums since the last reading over all peers, for a checkpoint. All peers must call it."""
        found: Totals = {}
        for own in peers.gather(self._own()):
            for name, rows in own.items():
                for source, row in rows.items():
                    before = found.setdefault(name, {}).get(source, [0.0, 0.0])
                    found[name][source] = [a + b for a, b in zip(before, row, strict=True)]
        return found

    def continue_from(self, totals: Totals) -> None:
        """Start from the totals of an earlier run; call it on one of the peers."""
        for name, rows in totals.items():
            if name.startswith(_DATA):
                self._data[name] = rows
                continue
            for source, row in rows.items():
                index = self._sources.setdefault(source, len(self._sources))
                self._total(name, torch.empty(0, dtype=torch.float64))[index] = torch.tensor(row, dtype=torch.float64)

    def _own(self) -> Totals:
        losses = {name: dict(zip(self._sources, total.tolist(), strict=False)) for name, total in self._totals.items()}
        return losses | self._data


def total_loss(heads: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of the heads' mean losses, with weight 1 by default. None: no head predicted a token."""
    means = {name: head["loss"] for name, head in heads.items() if head["tokens"]}
    return math.fsum(weights.get(name, 1.0) * mean for name, mean in means.items()) if means else None


def _add_data(data: dict[str, Any], component: str, rows: Sequence[tuple[str, list[float]]]) -> None:
    """Add the samples of each source, which come first, or (with a ``component``) their media."""
    counts: dict[str, list[float]] = {}
    for source, values in sorted(rows):
        counts[source] = [a + b for a, b in zip(counts.get(source, [0.0] * len(values)), values, strict=True)]
    for source, (number, tokens) in counts.items():
        if component:
            items = {"items": int(number), "tokens": int(tokens)}
            data[source].setdefault("media", {})[component] = items
        else:
            data[source] = {"samples": int(number), "tokens": int(tokens)}


def _mean(rows: list[list[float]]) -> dict[str, float | int | None]:
    """Return mean and count of ``(sum, count)`` rows."""
    total, count = math.fsum(row[0] for row in rows), int(sum(row[1] for row in rows))
    return {"loss": total / count if count else None, "tokens": count}


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def memory_metrics(device: torch.device, peers: Peers) -> dict[str, float]:
    """Return the largest peak memory of a rank, and the mean of all, in MiB. Every rank calls this."""
    peak = peak_memory_mb(device)
    return {"memory_mb": peers.max(peak), "memory_mb_mean": peers.sum(peak) / peers.size}


class MetricsFile:
    """``metrics.jsonl``: a flushed line per record, given to trackers, too; ``earlier``: lines of earlier starts."""

    def __init__(self, path: Path, resume_step: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        """Drop an earlier run's lines after ``resume_step`` (they come again) and an incomplete last line."""
        self._path, self._trackers, self._showing = path, list(trackers), list(trackers)
        kept = read_lines(path, resume_step)
        self.earlier: list[dict[str, Any]] = [json.loads(line) for line in kept]
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_text("".join(f"{line}\n" for line in kept))
        os.replace(unfinished, path)  # a kill in between leaves all lines

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; TrainingError: the disk is full, or cannot be written."""
        try:
            with self._path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written ({error.strerror}); `--resume` continues from the last checkpoint"
            ) from error
        self.track(line["step"], {name: value for name, value in line.items() if name != "step"})

    def track(self, step: int, values: Mapping[str, Any]) -> None:
        """Give trackers values that are in no line; nested as in a line."""
        numbers = dict(numbers_in(values))
        tell(self._trackers, lambda tracker: tracker.log(step, numbers))

    def show(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Give trackers generated answers, beside the prompts and the references."""
        tell(self._showing, lambda tracker: tracker.show(step, samples), "samples")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        tell(self._trackers, lambda tracker: tracker.close(failed=error is not None))
