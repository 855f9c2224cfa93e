"""The search of layouts: how fast it is, and how close to the best of all layouts it comes.

``NAME_joint`` and ``NAME_two_stages``: seconds of a step of the layout that is found on 8 H100 over those of the best
of all layouts, each of which is estimated; 1 is the best. ``NAME_estimated`` and ``NAME_all``: how many layouts are
estimated, and how many there are. ``dense`` is a text model, ``images`` a Qwen3-VL of which packs have 2 or 6 images.

``ranks_1024_*``: a search for Qwen3-VL-235B-A22B on 1,024 H100 in nodes of 8; a step has 1,024 packs of 8,192 tokens,
each with two images of 1,024 tokens. ``processor_seconds`` are those of the one core that it uses, ``gib`` the memory
of the process at most. The model is built before, on the meta device.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from encoders import model_of
from harness import Result, parser, report, start

from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.plan.tables import ItemFacts, MicroBatchFacts
from omnitrain.recipe import Optimizer, ParallelPlan
from omnitrain.train.planning.devices import find_device
from omnitrain.train.planning.rank_run import Training
from omnitrain.train.planning.search import Planner, Search, text_pack

FORMULA = "NAME_joint = seconds of a step of the layout found / of the best of all layouts"
LARGE = Path(__file__).parent / "configs" / "qwen3_vl_235b_a22b.json"
PATCH = 3 * 2 * 16 * 16  # elements
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def training_of(config: dict[str, Any], tokens: int) -> Training:
    """A model without weights, and a pack of one text."""
    model: OmniModel = build_omni_model(foundation=config, init_device="meta").train()
    return Training(model, Optimizer(), True, text_pack(model, [tokens]))


def drawn(tokens: int, numbers: tuple[int, ...], image: int, elements: int) -> list[MicroBatchFacts]:
    """Packs with so many images of ``image`` tokens."""
    item = ItemFacts(image, elements, 0, elements)
    return [MicroBatchFacts({"text": tokens}, (tokens,), {"foundation.image": (item,) * n}) for n in numbers]


def compared(name: str, planner: Planner) -> dict[str, float]:
    """Both searches on 8 ranks, and all layouts."""
    found = Search()
    candidates = [*planner.of_sequence(1)]
    planner.joint(candidates, found, 1)
    everything = [planner.judge(candidate) for candidate in candidates]
    best = min(one.found.seconds for one in everything if one.found and not one.reason)
    two = planner.two_stages()
    assert found.fitting[0].found is not None and two is not None and two.found is not None
    return {
        f"{name}_joint": found.fitting[0].found.seconds / best,
        f"{name}_two_stages": two.found.seconds / best,
        f"{name}_estimated": float(len(found.fitting) + len(found.rejected)),
        f"{name}_all": float(len(everything)),
    }


def small(name: str) -> Planner:
    """A model on 8 ranks."""
    device = find_device("h100")
    if name == "dense":
        return Planner(training_of(DENSE, 2048), ParallelPlan(), device, 8, 16)
    training = training_of(model_of(192).foundation.config.to_dict(), 1024)
    return Planner(training, ParallelPlan(), device, 8, 48, drawn(1024, (2, 6, 2, 6), 64, 256 * 96))


def large(num_ranks: int) -> dict[str, float]:
    """The search on many ranks."""
    config = json.loads(LARGE.read_text())["config"]
    training = training_of(config, 8192)
    print(f"the model is built after {time.process_time():.0f} processor seconds", flush=True)
    began, used = time.perf_counter(), time.process_time()
    packs = drawn(8192, (2,), 1024, 4096 * PATCH)
    planner = Planner(training, ParallelPlan(), find_device("h100"), num_ranks, num_ranks, packs)
    found = planner.search(print)
    best = found.fitting[0]
    assert best.found is not None
    print(f"{num_ranks} ranks: {best}: {best.found}")
    return {
        f"ranks_{num_ranks}_processor_seconds": time.process_time() - used,
        f"ranks_{num_ranks}_seconds": time.perf_counter() - began,
        f"ranks_{num_ranks}_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        f"ranks_{num_ranks}_counted": float(planner.num_counted),
        f"ranks_{num_ranks}_layouts": float(sum(map(len, vars(found).values()))),
        f"ranks_{num_ranks}_step_seconds": best.found.seconds,
    }


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=1, steps=1)
    options.add_argument("--parts", nargs="*", default=["dense", "images", "large"], help="what is searched")
    options.add_argument("--ranks", type=int, default=1024, help="of the large search")
    given = start(options)
    figures: dict[str, float] = {}
    for part in given.parts:
        figures |= large(given.ranks) if part == "large" else compared(part, small(part))
        print(figures)
    report(Result("plan_search", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
