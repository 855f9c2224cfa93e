"""The nodes ``train`` (the training loop, the optimizer, experts, tracking, compilation) and ``evaluation``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from omnitrain.recipe.functions import FunctionName
from omnitrain.recipe.strict import Idle, Problem, Strict, short_for

# In a line of metrics.jsonl, by its path.
_LOSS = re.compile(r"(heldout\.)?(heads\.[^.]+\.)?loss")
_MEASURED = re.compile(rf"{_LOSS.pattern}|(heldout\.)?metrics\.[^.]+\.[^.]+|scores\.[^.]+")


def _a_loss(path: str) -> str:
    if _LOSS.fullmatch(path) is None:
        raise ValueError("expected `loss`, `heads.HEAD.loss`, `heldout.loss` or `heldout.heads.HEAD.loss`")
    return path


def _measured(path: str) -> str:
    if _MEASURED.fullmatch(path) is None:
        raise ValueError(
            "expected `loss`, `heads.HEAD.loss` or `metrics.NAME.HEAD`, or one of them with `heldout.` before it, or "
            "`scores.NAME`"
        )
    return path


class EarlyStopping(Strict):
    """End of a run when a metric stops improving."""

    metric: Annotated[str, AfterValidator(_measured)]
    """The metric of metrics.jsonl: `loss`, `heads.HEAD.loss` or `metrics.NAME.HEAD`, or one of them with `heldout.`
    before it, such as `heldout.loss`; or `scores.NAME`, with `evaluation.every`."""
    patience: int = Field(3, ge=1)
    """End the run after so many measurements in a row without improvement of the best one."""
    min_delta: float = Field(0.0, ge=0)
    """Least change that counts as an improvement."""
    mode: Literal["min", "max"] = "min"
    """`min`: lower is better; `max`: higher is better."""


class Optimizer(Strict):
    """AdamW or Muon with fp32 state, linear warm-up, cosine or linear decay (Loshchilov & Hutter 2019, 2017)."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of hidden layers, experts included, and AdamW for the others (embeddings, heads,
    norms, biases)."""
    state: Literal["float32", "int8"] = "float32"
    """Format of AdamW's two moments. `int8`: 8 bits per value, in blocks of 256 with one scale, a quarter of the
    memory; needs torchao."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum."""
    learning_rate: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    learning_rates: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict
    )
    """Component, module or parameter -> its own peak learning rate. If several names match a parameter, the longest
    path wins."""
    warmup_steps: int = Field(100, ge=0)
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the schedule after the warm-up."""
    final_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate of `cosine` and `linear`, as a fraction of the peak."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, on all but norms and biases."""
    weight_decays: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict
    )
    """Component, module or parameter -> its own weight decay. If several names match a parameter, the longest path
    wins."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip the global gradient norm to this; null: never."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, if Muon should have AdamW's state."""
        if self.kind == "muon" and self.state == "int8":
            yield (), "`state: int8` with `kind: muon`, whose momentum is fp32; use one of the two"

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that the schedule and the optimizer do not use."""
        if self.kind == "adamw":
            yield Idle("momentum", "but `kind: adamw` does not use it; remove it, or use `muon`")
        if self.schedule == "constant":
            yield Idle("final_ratio", "but `schedule: constant` never decays; remove it, or use `cosine` or `linear`")


class EMA(Strict):
    """Exponential moving average of the trained weights, fp32 and sharded like them."""

    decay: float = Field(0.999, gt=0, lt=1)
    """Weight of the average before the step; the weights after the step have the rest."""


class Compile(Strict):
    """``torch.compile`` of the foundation's blocks."""

    enabled: bool | Literal["auto"] = True
    """Compile each block, once for all lengths; if it is recomputed, its forward and its recompute. `auto`: on CUDA,
    where the plan allows it and a compiler is there. Needs a C++ compiler on CPU."""
    max_recompiles: int = Field(8, ge=0)
    """Stop the run after more recompiles than this."""

    def idle(self) -> Iterator[Idle]:
        """Yield the key that is unused without compilation."""
        if not self.enabled:
            yield Idle("max_recompiles", "but nothing is compiled; remove it, or set `enabled: true`")


class ExpertsBalance(Strict):
    """Load balancing and recorded routing of a mixture-of-experts model."""

    loss: Literal["none", "sample", "previous_step", "micro_batch"] = "none"
    """Load balancing loss of the experts, per layer: `sample`: within each sample; `previous_step`: against the shares
    of the previous step; both give the same result on any layout. `micro_batch`: the loss of transformers, which
    depends on how samples are packed and distributed."""
    weight: float = Field(0.001, ge=0)
    """Weight of the load balancing loss in the total loss."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the squared log-sum-exp of the routers' scores in the total loss."""
    bias_rate: float = Field(0.0, ge=0)
    """Change per step of the bias with which a router selects experts, towards experts with fewer tokens. Only for
    routers that have such a bias (DeepSeek-V3)."""
    record: str | None = None
    """Folder to write the selected experts of each sample's tokens to."""
    replay: str | None = None
    """Folder of an earlier `record`. Tokens of the recorded samples go to the recorded experts."""

    def idle(self) -> Iterator[Idle]:
        """Yield the weight if there is no loss."""
        if self.loss == "none":
            yield Idle("weight", "but `loss: none` adds no loss; remove it, or set `loss`")

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, if a replayed routing is recorded again."""
        if self.record is not None and self.replay is not None:
            why = "a replayed routing is already recorded; remove one"
            yield (), f"`record` and `replay` exclude each other: {why}"


class Trace(Strict):
    """Traces of single steps."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Optimizer steps, from 1, in which every rank writes a Chrome trace to `trace/`: when it ran each action of the
    schedule, when its experts computed, which exchanges were in transit, when it waited for them and for data, and when
    it updated the weights."""


class Track(Strict):
    """Experiment trackers that receive the metrics, in addition to `metrics.jsonl`."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Trackers to log to; install the matching package. TensorBoard writes to `tensorboard/`."""
    project: str = "omnitrain"
    """Project name in wandb and Trackio."""
    name: str | None = None
    """Run name in wandb and Trackio. Unset: the name of `output_dir`."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that only wandb and trackio use."""
        if not {"wandb", "trackio"} & set(self.to):
            for key in ("project", "name"):
                yield Idle(key, "but only wandb and trackio use it, and `to` contains neither; remove it")


class Save(Strict):
    """Checkpoints: when a run saves, and which of them stay. It always saves at its end."""

    every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Steps between two checkpoints. `auto`: every ten minutes, or less often if saving takes longer than 30 seconds;
    null: save only at the end."""
    background: bool = True
    """A process of its own writes checkpoints before the end, of a copy in host memory, while training goes on; false:
    training waits for them."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Save after every multiple of so many steps, too, and keep these checkpoints forever."""
    keep_best: Annotated[str, AfterValidator(_a_loss)] | None = None
    """Also keep the checkpoint with the lowest value of this loss of metrics.jsonl: `loss`, `heads.HEAD.loss`,
    `heldout.loss` or `heldout.heads.HEAD.loss`."""

    def idle(self) -> Iterator[Idle]:
        """Yield the key that is unused if only the end is saved."""
        if self.every is None:
            yield Idle("keep_best", "but `every: null` saves only at the end; remove it, or set `every`")


class Train(Strict):
    """Settings of the training loop."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data, in place of `steps`. An epoch draws as many rows as all data sets have
    together."""
    packs_per_step: int = Field(1, ge=1)
    """Packs per optimizer step, of all ranks together. The data-parallel ranks divide them."""
    samples_per_step: int | None = Field(None, ge=1)
    """Samples per optimizer step, summed over all ranks, in place of `packs_per_step`: the number of packs that have
    about so many."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the data order and sampling."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, ..."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype of components whose plan does not set one; weights that train are fp32. `auto`: bf16 on CUDA, fp32
    on CPU."""
    cpu_threads: int | None = Field(None, ge=1)
    """Threads per operation on CPU. Unset: torch's default."""
    loss_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """`text` or the name of a decoder -> weight of its mean loss in the total. Unset: 1."""
    losses: dict[str, FunctionName] = Field(default_factory=dict)
    """`text` or the name of a decoder -> your own loss in place of cross entropy: `FILE.py:FUNCTION` or
    `MODULE:FUNCTION`. It takes logits `[n, classes]` and labels `[n]`, and returns the losses of the tokens `[n]`."""
    metrics: dict[Annotated[str, Field(pattern=r"^\w+$")], FunctionName] = Field(default_factory=dict)
    """Name -> your own metric: `FILE.py:FUNCTION` or `MODULE:FUNCTION`, a function like those of `losses`.
    metrics.jsonl has its mean over the predicted tokens of each head."""
    callbacks: list[FunctionName] = Field(default_factory=list)
    """Your own callbacks: `FILE.py:CLASS` or `MODULE:CLASS`, subclasses of `omnitrain.Callback` (or functions that
    return one), made without arguments on every rank."""
    early_stopping: EarlyStopping | None = None
    """End the run early if a metric stops improving. Unset: never."""
    log_every: int = Field(10, ge=1)
    """Steps between two lines of metrics.jsonl, and of printed progress if the output is no terminal."""
    save: Save = Field(default_factory=Save)
    """Checkpoints before the end of the run, and which of them stay."""
    stop_seconds: float = Field(600, gt=0)
    """Seconds that the ranks of `--nproc` have after Ctrl-C to finish the step and save."""
    stall_seconds: float | None = Field(600, gt=0)
    """If no rank makes progress for this time, end the run and name the rank that the others wait for; null: never."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer and schedule."""
    ema: EMA | None = None
    """Keep a moving average of the trained weights, for `evaluation.ema` and `export --ema`. Unset: none."""
    experts: ExpertsBalance = Field(default_factory=ExpertsBalance)
    """Routers of mixture-of-experts models."""
    track: Track = Field(default_factory=Track)
    """Experiment trackers that receive the metrics."""
    flops: bool | Literal["auto"] = "auto"
    """Count the FLOPs of each step, and write them and their share of the device's peak (MFU) to metrics.jsonl. `auto`:
    on CUDA."""
    trace: Trace = Field(default_factory=Trace)
    """Steps to trace in detail."""
    report: bool = True
    """Write report.html at the end of the run."""
    compile: Annotated[Compile, short_for("enabled", bool | str, bool | Literal["auto"] | Compile)] = Field(
        default_factory=lambda: Compile(enabled=False)
    )
    """`torch.compile` of the foundation's blocks. `true`, `false` or `auto` is short for {enabled: ...}."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that others make useless."""
        if self.epochs is not None:
            yield Idle("steps", "but `epochs` decides how long the run is; remove one of the two")
        if self.samples_per_step is not None:
            yield Idle("packs_per_step", "but `samples_per_step` decides how large a step is; remove one of the two")

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, if steps are traced that do not exist."""
        if beyond := [str(step) for step in self.trace.steps if step > self.steps and self.epochs is None]:
            last = f"the last step is {self.steps}; name earlier steps, or raise `steps`"
            yield (), f"`trace.steps`: found {', '.join(beyond)}, but {last}"


class Sampling(Strict):
    """Sampling of the next token."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int | None = Field(None, ge=1)
    """Sample from the k most likely tokens."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability mass."""

    guidance: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Scale of classifier-free guidance (Ho & Salimans 2022): logits are `u + guidance * (c - u)`, where `c` are those
    of the prompt and `u` those without its condition. 1: those of the prompt alone."""

    size: str | None = None
    """Size of the images, one of the decoder's `image_sizes`; for `text`, of images that are words (Emu3). Unset: the
    model chooses."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that greedy decoding does not use."""
        if self.temperature == 0:
            for key in ("top_k", "top_p"):
                yield Idle(key, "but `temperature: 0` takes the most likely token; remove it, or raise `temperature`")


class Evaluation(Strict):
    """Held-out loss and generated answers at the end of a run, and during it."""

    every: int | None = Field(None, ge=1)
    """Steps between two evaluations with generated answers and scores during the run. Unset: only at the end."""
    loss_every: int | None = Field(None, ge=1)
    """Steps between two held-out losses in metrics.jsonl. Unset: as often as `every`, and at the end."""
    examples_per_source: int | None = Field(None, ge=1)
    """Number of held-out rows per source. Unset: all."""
    batch_size: int = Field(64, ge=1)
    """Number of prompts to generate for at once."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum length of an answer, text and media tokens together."""
    sampling: dict[str, Sampling] = Field(default_factory=dict)
    """`text` or the name of a decoder -> how its tokens are sampled. Unset: greedy."""
    ema: bool = False
    """Evaluate the averages of `train.ema` in place of the weights."""
    scorer: FunctionName | None = None
    """`FILE.py:FUNCTION` or `MODULE:FUNCTION`. The function takes the list of answers and returns {name: number}.
    Unset: exact match of the text, per source."""
    saved_samples: int = Field(4, ge=0)
    """Number of generated answers per source to write to `samples/`."""
