"""What a run shows of the time of its actions, experts and exchanges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from tests.tiny import tiny_moe_recipe, tiny_recipe
from tests.train.test_ranks import fit, metrics

LAYERS = [f"foundation.model.layers.{number}.mlp.experts" for number in range(2)]
OVERLAPPED = ["parallel.default.ep=2", "parallel.default.experts.chunks=4", "parallel.default.experts.delay_wgrad=true"]


class Events:
    """The spans of a layer in a trace."""

    def __init__(self, file: Path, layer: str) -> None:
        every = json.loads(file.read_text())["traceEvents"]
        self.tracks = {event["args"]["name"] for event in every if event["name"] == "thread_name"}
        self.spans = [event for event in every if event["ph"] == "X" and event["args"]["layer"] == layer]

    def start_and_end(self, name: str, phase: str) -> tuple[float, float]:
        (span,) = (span for span in self.spans if span["name"] == name and span["args"]["phase"] == phase)
        return span["ts"], span["ts"] + span["dur"]

    def is_under_way_during(self, exchange: str, experts: str, phase: str) -> bool:
        """It left before these experts began, and was asked for when they had ended."""
        left, _ = self.start_and_end(exchange, phase)
        asked, _ = self.start_and_end(f"wait for {exchange}", phase)
        began, ended = self.start_and_end(experts, phase)
        return left < began < ended < asked


def test_a_trace_shows_rows_of_the_next_chunk_on_their_way_while_experts_compute(
    ranks: RankPool, tmp_path: Path
) -> None:
    recipe = tiny_moe_recipe(tmp_path)
    ranks.run(fit, recipe, [*OVERLAPPED, "train.trace.steps=[2]"], timeout_s=60, world=2)
    files = sorted((tmp_path / "run" / "trace").iterdir())
    assert [file.name for file in files] == ["step-00000002-rank-0.json", "step-00000002-rank-1.json"]
    for file in files:
        for layer in LAYERS:
            events = Events(file, layer)
            assert events.tracks == {"actions", "compute", *(f"link, chunk {chunk}" for chunk in range(4))}
            for chunk in range(3):
                assert events.is_under_way_during(f"dispatch {chunk + 1}", f"experts {chunk}", "forward")
                assert events.is_under_way_during(f"combine {chunk}", f"experts {chunk + 1}", "forward")
                assert events.is_under_way_during(f"combine {chunk}", f"experts {chunk + 1}", "backward")
                assert events.is_under_way_during(f"dispatch {chunk + 1}", "weight gradients", "backward")


def test_metrics_have_the_seconds_that_ranks_waited_for_exchanges(ranks: RankPool, tmp_path: Path) -> None:
    lines = ["train.log_every=3", "evaluation={max_new_tokens: 1, loss_every: 1}"]  # one for every step all the same
    overrides = [*OVERLAPPED, "parallel.default.memory.recompute=full", *lines]
    ranks.run(fit, tiny_moe_recipe(tmp_path, evaluated=True), overrides, timeout_s=60, world=2)
    assert len({line["exposed_communication"]["seconds"] for line in metrics(tmp_path / "run")}) == 4
    for line in metrics(tmp_path / "run"):
        layers = [line["experts"][layer]["exposed"] for layer in LAYERS]
        assert min(layers) > 0 and line["exposed_communication"]["seconds"] == pytest.approx(sum(layers))
        assert 0 < line["exposed_communication"]["share"] < 1


def test_a_trace_shows_the_waits_for_features_and_for_their_gradients(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["parallel.components.image_encoder.place=world", "train.trace.steps=[1]", "train.steps=1"]
    ranks.run(fit, tiny_recipe(tmp_path), overrides, timeout_s=60, world=2)
    seconds = []
    for file in sorted((tmp_path / "run" / "trace").iterdir()):
        every = json.loads(file.read_text())["traceEvents"]
        waits = [e for e in every if e["ph"] == "X" and e["name"] == "wait for features"]
        assert {(e["args"]["phase"], e["args"]["layer"]) for e in waits} == {
            ("forward", "image_encoder"),
            ("backward", "image_encoder"),
        }
        seconds.append(sum(event["dur"] for event in waits) / 1e6)
    (line,) = metrics(tmp_path / "run")
    assert line["encoders"]["image_encoder"]["waited"] == pytest.approx(sum(seconds) / 2, rel=1e-3)


def test_nothing_is_exposed_where_no_row_travels(tmp_path: Path) -> None:
    fit(tiny_moe_recipe(tmp_path), ["train.trace.steps=[1]"])
    assert {line["exposed_communication"]["seconds"] for line in metrics(tmp_path / "run")} == {0.0}
    events = Events(tmp_path / "run" / "trace" / "step-00000001-rank-0.json", LAYERS[0])
    assert events.tracks == {"actions", "compute"}
    assert [span["args"]["phase"] for span in events.spans] == 2 * ["forward", "backward"]


def test_a_trace_of_a_step_beyond_the_last_is_refused(tmp_path: Path) -> None:
    beyond = r"`trace.steps`: found 5, 9, but the last step is 4; name earlier steps, or raise `steps`"
    with pytest.raises(UserError, match=beyond):
        Recipe.load(str(tiny_moe_recipe(tmp_path)), ["train.steps=4", "train.trace.steps=[4, 5, 9]"])


def test_a_trace_shows_the_actions_of_the_schedule_in_order_and_the_encoders_in_them(tmp_path: Path) -> None:
    fit(tiny_recipe(tmp_path), ["train.trace.steps=[1]"])
    every = json.loads((tmp_path / "run" / "trace" / "step-00000001-rank-0.json").read_text())["traceEvents"]
    spans = [event for event in every if event["ph"] == "X"]
    forward, backward = (span for span in spans if span["cat"] == "action")
    assert [forward["name"], backward["name"]] == ["0F0", "0B0"]
    ends = forward["ts"] + forward["dur"]
    assert ends <= backward["ts"]
    encoded = [span for span in spans if span["name"] == "encode"]
    assert {"audio_encoder", "image_encoder"} <= {span["args"]["layer"] for span in encoded}
    assert all(forward["ts"] <= span["ts"] and span["ts"] + span["dur"] <= ends for span in encoded)


def test_the_actions_of_a_section_are_in_its_trace_by_name_and_their_time_is_in_the_metrics(
    ranks: RankPool, tmp_path: Path
) -> None:
    section = {"media": {"components": ["image_encoder", "audio_encoder"], "ranks": 1}}
    overrides = [f"parallel.sections={json.dumps(section)}", "train.trace.steps=[2]", "train.packs_per_step=2"]
    ranks.run(fit, tiny_recipe(tmp_path), overrides, timeout_s=100, world=2)
    rows = metrics(tmp_path / "run")[1]["encoders"]
    of_ranks = []
    for rank, name in enumerate(("rank 0 (main)", "rank 1 (media)")):
        every = json.loads((tmp_path / "run" / "trace" / f"step-00000002-rank-{rank}.json").read_text())["traceEvents"]
        assert [event["args"]["name"] for event in every if event["name"] == "process_name"] == [name]
        of_ranks.append([event for event in every if event["ph"] == "X" and event["cat"] == "action"])
    for encoder in section["media"]["components"]:
        spans = [
            {event["name"]: event["dur"] / 1e6 for event in events if event["name"].endswith(f"@{encoder}")}
            for events in of_ranks
        ]
        assert [name for name in spans[0] if name.startswith("RECV_F")] and rows[encoder]["bytes_moved"] > 0
        waited = sum(seconds for name, seconds in spans[0].items() if name.startswith("RECV_F"))
        busy = sum(seconds for name, seconds in spans[1].items() if name.startswith("ENCODE"))
        assert (rows[encoder]["waited"], rows[encoder]["busy"]) == pytest.approx((waited, busy), abs=1e-5)
        assert 0 < rows[encoder]["busy_share"] < 1
    assert "busy" not in rows["image_decoder"]  # of main
