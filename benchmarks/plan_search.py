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
import math
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
from omnitrain.train.planning.search import Candidate, Planner, Search, text_pack

FORMULA = "NAME_joint = seconds of a step of the layout found / of the best of all layouts"
LARGE = Path(__file__).parent / "configs" / "qwen3_vl_235b_a22b.json"
WAITS = 0.01  # share of a step
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


def two_stages(name: str, planner: Planner, candidates: list[Candidate]) -> float:
    """Seconds of the layout that Maestro's search in two stages finds (arXiv:2605.10501).

    First the foundation's layout, then the fewest ranks for encoders with which it waits 1 % of a step or less.
    """
    best = math.inf
    for ranks in (0, 1, 2, 4) if planner.encodings else (0,):
        alone, first = small(name, 8 - ranks, images=()), Search()
        alone.joint(alone.of_sequence(1), first, 1)
        if not first.fitting:
            continue
        wanted = {**first.fitting[0].degrees, **({"section": f"+section{ranks}"} if ranks else {})}
        judged = planner.judge(next(one for one in candidates if one.degrees == wanted))
        if judged.found is None or judged.reason:
            continue
        best = min(best, judged.found.seconds)
        if ranks and judged.found.idle["sections"] <= WAITS:
            break
    return best


def compared(name: str) -> dict[str, float]:
    """Both searches on 8 ranks, and all layouts."""
    planner, found = small(name), Search()
    candidates = [*planner.of_sequence(1)]
    planner.joint(candidates, found, 1)
    everything = [planner.judge(candidate) for candidate in candidates]
    best = min(one.found.seconds for one in everything if one.found and not one.reason)
    assert found.fitting[0].found is not None
    return {
        f"{name}_joint": found.fitting[0].found.seconds / best,
        f"{name}_two_stages": two_stages(name, planner, candidates) / best,
        f"{name}_estimated": float(len(found.fitting) + len(found.rejected)),
        f"{name}_all": float(len(everything)),
    }


def small(name: str, num_ranks: int = 8, images: tuple[int, ...] = (2, 6, 2, 6)) -> Planner:
    """A model on a few ranks, of which packs have so many images."""
    device = find_device("h100")
    if name == "dense":
        return Planner(training_of(DENSE, 2048), ParallelPlan(), device, num_ranks, 16)
    training = training_of(model_of(192).foundation.config.to_dict(), 1024)
    return Planner(training, ParallelPlan(), device, num_ranks, 48, drawn(1024, images, 64, 256 * 96))


def large(num_ranks: int) -> dict[str, float]:
    """The search on many ranks."""
    config = json.loads(LARGE.read_text())["config"]
    training = training_of(config, 8192)
    print(f"the model is built after {time.process_time():.0f} processor seconds", flush=True)
    began, used = time.perf_counter(), time.process_time()
    packs = drawn(8192, (2,), 1024, 4096 * PATCH)
    planner = Planner(training, ParallelPlan(), find_device("h100"), num_ranks, num_ranks, packs)
    found = planner.search()
    best = found.fitting[0]
    assert best.found is not None
    print(f"{num_ranks} ranks: {best}: {best.found}")
    return {
        f"ranks_{num_ranks}_processor_seconds": time.process_time() - used,
        f"ranks_{num_ranks}_seconds": time.perf_counter() - began,
        f"ranks_{num_ranks}_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
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
        figures |= large(given.ranks) if part == "large" else compared(part)
        print(figures)
    report(Result("plan_search", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
