"""Non-padding tokens per second: omnitrain's packs against the collators of HF ``Trainer``.

The samples are the quickstart's training rows as ``OmniProcessor`` makes them: their token ids (media are placeholder
ids) and their loss masks. All sides train the same plain Qwen3 from the same weights with the same fused AdamW, the
same clipping and as many data workers, in fp32 on one thread:

- ``omnitrain``: ``Trainer.fit`` on packs of ``data.pack_tokens``, metrics and progress included;
- ``hf_padded``: ``DataCollatorForSeq2Seq``, padded to the longest of the batch;
- ``hf_grouped``: the same over ``train_sampling_strategy="group_by_length"``;
- ``hf_flattened``: ``DataCollatorWithFlattening``, samples end to end in one row, attention by sdpa.

A sample counts as many tokens on all sides. No loss reads its last one: ``Trainer.fit`` does not give it to the model,
the collators do. HF neither logs nor saves. Its batch size is ``pack_tokens / mean length``, so that a step has about
as many tokens on all sides. Each run of a round has a fresh process, as a user's run has: no side finds the memory, the
threads or the caches that another left behind. Its clock runs from the end of the warm-up to the end of the last step.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from harness import HF_QUIET, QUICKSTART, Around, Result, in_turn, parser, report, settle, start
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from omnitrain.data.loading.loader import LoaderOptions, StepLoader
from omnitrain.data.packing.pack import IGNORED
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.sources.rows import RowSource
from omnitrain.models.omni.build import build_foundation_model
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe
from omnitrain.train.metrics.display import console
from omnitrain.train.trainer import Trainer

FORMULA = (
    "ratio = median over rounds of (omnitrain / best of hf_padded, hf_grouped, hf_flattened), "
    "each = tokens of the samples trained, without padding / seconds"
)
HF_SIDES = ("hf_padded", "hf_grouped", "hf_flattened")
WARM_UP = 2  # steps of a run before its clock starts


def quickstart_samples(recipe: Recipe, limit: int | None) -> tuple[list[Sample], Any]:
    """Training samples without their media, and the tokenizer; ``limit``: that many rows, evenly spread."""
    _, processor = build_from_recipe(recipe)
    rows = RowSource(recipe.data.train[0])
    stride = max(1, len(rows) // limit) if limit else 1
    made = [processor.sample(rows[index], index) for index in range(0, len(rows), stride)]
    samples = [dataclasses.replace(sample, spans=()) for sample in made if isinstance(sample, Sample)]
    assert len(samples) == len(made), [sample for sample in made if isinstance(sample, Rejected)]
    assert len({sample.id for sample in samples}) == len(samples)
    return samples, processor.tokenizer


def foundation_recipe(folder: str) -> Recipe:
    """The quickstart without encoders and decoders, over one row of text that such a model accepts at its start."""
    row = {"id": "0", "task": "text", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    Dataset.from_list([row]).to_parquet(f"{folder}/text.parquet")
    data = [f"data.train=[{{path: {folder}/text.parquet}}]", "data.heldout=[]"]
    parts = ["model.encoders={}", "model.decoders={}", "evaluation=null", f"output_dir={folder}/run"]
    return Recipe.load(QUICKSTART, data + parts)


class ReadySamples:
    """Replaces a processor: its "rows" are samples already."""

    def sample(
        self,
        row: Sample,
        index: int = 0,
        max_tokens: int | None = None,
        *,
        without_tail: bool = False,
        **options: object,
    ) -> Sample:
        """Return ``row`` with its index in the data order."""
        return dataclasses.replace(row.without_tail() if without_tail else row, index=index)


class Marked(Around):
    """Notes when the trainer asks for each step (it has then finished the one before) and how long its samples are."""

    def __init__(self, loader: StepLoader, lengths: Mapping[str, int]) -> None:
        super().__init__(loader)
        self.lengths = lengths
        self.asked: list[float] = []
        self.tokens: list[int] = []

    def __iter__(self) -> Iterator[StepBatch]:
        steps = iter(self.loader)
        while True:
            self.asked.append(time.perf_counter())
            step = next(steps)
            self.tokens.append(sum(self.lengths[sample] for pack in step.packs for sample in pack.info.ids))
            yield step


def run_omnitrain(recipe: Recipe, samples: list[Sample], steps: int, seed: int) -> float:
    """Return the tokens per second of ``fit``."""
    # One step more than is measured: the clock stops when it is asked for.
    train = recipe.train.model_copy(update={"steps": WARM_UP + steps + 1})
    trainer = Trainer(recipe.model_copy(update={"train": train}))
    then = step_planner(trainer.model, trainer.ranks.rendezvous)
    without_tails = trainer.model.runner.contract.without_tails
    options = LoaderOptions(seed=seed, without_tails=without_tails, then=then)
    loader = StepLoader([samples], ReadySamples(), recipe.data, options)
    marked = Marked(loader, {sample.id: len(sample) for sample in samples})
    trainer.loader = marked
    trainer.fit()
    seconds = marked.asked[WARM_UP + steps] - marked.asked[WARM_UP]
    return sum(marked.tokens[WARM_UP : WARM_UP + steps]) / seconds


class StepEnds(TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())


def run_hf(
    collator: Any, sampling: str, recipe: Recipe, examples: list[dict[str, Any]], steps: int, seed: int
) -> float:
    """Return the tokens per second of HF ``Trainer`` with ``collator``, without padding."""
    torch.manual_seed(recipe.train.seed)
    model = build_foundation_model(dict(recipe.model.foundation.config))
    model.set_attn_implementation("sdpa")
    batches: list[dict[str, torch.Tensor]] = []
    model.register_forward_pre_hook(lambda _, __, batch: batches.append(batch), with_kwargs=True)
    ends = StepEnds()
    arguments = _arguments(recipe, examples, WARM_UP + steps, sampling, seed)
    trainer = transformers.Trainer(model, arguments, collator, examples, callbacks=[ends])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # Flattened batches have neither padding nor a mask.
    tokens = sum(
        int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches[WARM_UP:]
    )
    return tokens / (ends.times[-1] - ends.times[WARM_UP - 1])


def _arguments(
    recipe: Recipe, examples: list[dict[str, Any]], steps: int, sampling: str, seed: int
) -> TrainingArguments:
    optimizer, mean = recipe.train.optimizer, fmean(len(example["input_ids"]) for example in examples)
    return TrainingArguments(
        output_dir=recipe.output_dir,
        max_steps=steps,
        per_device_train_batch_size=round(recipe.data.pack_tokens / mean),
        train_sampling_strategy=sampling,
        optim="adamw_torch_fused",
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.max_grad_norm,
        dataloader_num_workers=recipe.data.workers,
        dataloader_prefetch_factor=8,
        dataloader_pin_memory=False,
        **HF_QUIET,
        use_cpu=True,
        seed=seed,
    )


def in_a_fresh_process(run: Callable[[], float]) -> float:
    """Return the result of ``run`` in a process forked from one that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["padding"])
    with ProcessPoolExecutor(1, context, initializer=_begin) as pool:
        return pool.submit(run).result()


def _begin() -> None:
    multiprocessing.set_start_method(None, force=True)  # data workers start as in a user's run, not by this server
    settle()
    console.quiet = True


def measure(rounds: int, steps: int, limit: int | None, folder: str) -> Result:
    """Measure all four sides in turn, each round with another order of the data."""
    quickstart = Recipe.load(QUICKSTART)
    samples, tokenizer = quickstart_samples(quickstart, limit)
    recipe = foundation_recipe(folder)
    examples = [
        {"input_ids": s.input_ids.tolist(), "labels": np.where(s.loss_mask, s.input_ids, IGNORED).tolist()}
        for s in samples
    ]
    padded = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)
    hf = partial(run_hf, recipe=recipe, examples=examples, steps=steps)
    runs = {
        "omnitrain": partial(run_omnitrain, recipe, samples, steps),
        "hf_padded": partial(hf, padded, "random"),
        "hf_grouped": partial(hf, padded, "group_by_length"),
        "hf_flattened": partial(hf, DataCollatorWithFlattening(), "random"),
    }
    speeds: dict[str, list[float]] = {side: [] for side in runs}
    for index in range(rounds):
        for side in in_turn(tuple(runs), index):
            speeds[side].append(in_a_fresh_process(partial(runs[side], seed=index)))
    ratios = [ours / max(theirs) for ours, *theirs in zip(*speeds.values(), strict=True)]
    return Result(
        name="padding",
        formula=FORMULA,
        figures={
            "ratio": median(ratios),
            **{f"{side}_tokens_per_second": median(values) for side, values in speeds.items()},
            "mean_length": fmean(map(len, samples)),
        },
        rounds={**speeds, "ratio": ratios},
    )


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=30)
    options.add_argument("--samples", type=int, help="take only so many of the training samples")
    given = start(options)
    with tempfile.TemporaryDirectory() as folder:
        report(measure(given.rounds, given.steps, given.samples, folder), given.json)


if __name__ == "__main__":
    main()
