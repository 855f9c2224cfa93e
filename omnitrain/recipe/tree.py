"""The recipe: one typed tree that YAML files, ``key.sub=value`` overrides and Python all spell.

Every field has a description; ``omnitrain schema`` prints them as JSON schema. Unknown keys are errors
(:mod:`omnitrain.recipe.load` names the nearest valid one).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from omnitrain.recipe.hf_config import check_hf_config_keys
from omnitrain.recipe.hf_processor import check_hf_processor_keys
from omnitrain.recipe.located import located
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan
from omnitrain.recipe.plugins import import_plugin
from omnitrain.recipe.strict import Strict
from omnitrain.recipe.suggest import hint


class HFSource(Strict):
    """Where a HuggingFace model comes from: pretrained weights (``path``) or a fresh one from ``config``."""

    path: str | None = Field(None, description="Hub id or local folder of a pretrained model.")
    config: Annotated[dict[str, Any], BeforeValidator(check_hf_config_keys)] | None = Field(
        None, description="Keys of a HF config with `model_type`; the model starts from random weights."
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> HFSource:
        if (self.path is None) == (self.config is None):
            given = "both" if self.path is not None else "neither"
            raise ValueError(
                f"give exactly one of `path` (pretrained weights) and `config` (a fresh model), found {given}"
            )
        return self


def _path_shorthand(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[HFSource, BeforeValidator(_path_shorthand, json_schema_input_type=str | HFSource)]


class Projector(Strict):
    """Maps a tower's rows to the foundation's hidden size."""

    kind: Literal["linear", "mlp", "pixel_shuffle"] = Field(
        "mlp",
        description="`linear`: one layer; `mlp`: two layers with GELU; `pixel_shuffle`: merges `factor` x `factor` "
        "neighbouring patches (for audio: `factor` neighbouring frames) into one row, then an MLP.",
    )
    factor: int = Field(2, ge=1, description="Merge factor of `pixel_shuffle`; unused by the other kinds.")


class Encoder(Strict):
    """A tower that reads a modality, and its projector into the foundation."""

    tower: Source = Field(description="The HF vision or audio tower. A string is short for {path: ...}.")
    projector: Projector = Field(default_factory=Projector, description="From the tower's rows to the foundation.")
    max_frames: int = Field(32, ge=1, description="Frames read from a video; longer ones are sampled evenly.")
    processor: Annotated[str | dict[str, Any] | None, BeforeValidator(check_hf_processor_keys)] = Field(
        None,
        description="The HF image processor or feature extractor: a folder or Hub id, or its arguments. Unset: the one "
        "saved beside the tower, or one derived from the tower's config.",
    )


class Decoder(Strict):
    """A modality the model writes, as the discrete tokens of a frozen tokenizer."""

    tokenizer: Source = Field(
        description="The frozen media tokenizer: a HF VQ model (Janus, Emu3, Chameleon VQ) for images; a HF codec "
        "(EnCodec, DAC, Mimi) or omnitrain's mel-VQ for audio. A string is short for {path: ...}."
    )
    image_size: int | None = Field(None, ge=1, description="Side of the square target images, pixels. Images only.")
    num_codebooks: int = Field(1, ge=1, description="Codebooks of a residual codec to model, flattened in time order.")
    max_tokens: int = Field(1024, ge=1, description="Generation of one item stops here at the latest, tokens.")


class Ops(Strict):
    """Which implementation runs an operation; `auto`: the fastest that was measured on the device."""

    attention: Literal["auto", "flash", "varlen", "sdpa", "flex", "reference"] = Field(
        "auto", description="Attention over packed rows. A backend that cannot honour a layer is an error."
    )
    rms_norm: Literal["auto", "torch", "fused", "liger"] = Field(
        "auto", description="RMSNorm. `fused`: a backward of its own, same bits forward; `auto` takes it on CPU."
    )
    swiglu: Literal["auto", "torch", "liger"] = Field("auto", description="The product in a gated MLP with SiLU.")
    rotary: Literal["auto", "torch", "liger"] = Field("auto", description="Rotary positions of query and key.")
    patch_embed: Literal["auto", "torch", "linear"] = Field(
        "auto", description="Convolutions whose kernel is their stride. `linear`: as one matrix product."
    )
    unread_rows: Literal["auto", "torch", "skip"] = Field(
        "auto",
        description="Rows whose last hidden state no loss reads. `skip`: what follows the last mixing of rows is not "
        "computed for them; `auto` does so on CPU.",
    )
    experts: Literal["auto", "torch", "grouped_mm", "batched_mm", "sonicmoe", "deepgemm"] = Field(
        "auto", description="Experts of a layer. `torch`: ours; the others are functions of transformers."
    )
    cross_entropy: Literal["auto", "torch", "liger"] = Field(
        "auto", description="Softmax of the loss inside the head, which goes over the logits in chunks in any case."
    )


class Model(Strict):
    """The omni model: a checkpoint of one, or its parts."""

    checkpoint: str | None = Field(None, description="Folder of a saved omni model; then no parts may be given.")
    foundation: Source | None = Field(None, description="The language model. A string is short for {path: ...}.")
    tokenizer: str | None = Field(None, description="Text tokenizer folder or Hub id. Unset: beside the foundation.")
    encoders: dict[str, Encoder] = Field(default_factory=dict, description="Component name -> encoder.")
    decoders: dict[str, Decoder] = Field(default_factory=dict, description="Component name -> decoder.")
    freeze: list[str] = Field(
        default_factory=list,
        description="Components or sub-modules that do not train: `foundation`, `image_encoder.tower`, ... A name "
        "that matches nothing is an error.",
    )
    ops: Ops = Field(default_factory=Ops, description="Implementations of operations in training.")

    @model_validator(mode="after")
    def _checkpoint_or_parts(self) -> Model:
        parts = [name for name in ("foundation", "tokenizer", "encoders", "decoders") if getattr(self, name)]
        if self.checkpoint is not None and parts:
            raise ValueError(f"`checkpoint` already holds the whole model; remove {parts}")
        if self.checkpoint is None and self.foundation is None:
            raise ValueError("give `checkpoint` (a saved omni model) or `foundation` (a language model)")
        return self


class Columns(Strict):
    """Names of the columns in the data."""

    id: str = Field("id", description="Unique string id of a row; rows without the column are named by position.")
    source: str = Field("task", description="String column by which metrics are split; absent: the data set's name.")
    messages: str = Field("messages", description="Chat messages, OpenAI style: role, content parts (type, text).")
    images: str = Field("images", description="Images of the row, in the order of its image parts.")
    audios: str = Field("audios", description="Audio clips of the row, in the order of its audio parts.")
    videos: str = Field("videos", description="Videos of the row, in the order of its video parts.")


class DataSource(Strict):
    """One data set."""

    path: str = Field(description="Parquet file, glob of parquet files, folder of them, or a Hub data set id.")
    name: str | None = Field(None, description="Name in metrics. Unset: the file's stem.")
    split: str = Field("train", description="Split to take when `path` is a Hub data set.")
    weight: float = Field(1.0, gt=0, description="Share of this source among all samples drawn (relative).")
    columns: Columns = Field(default_factory=Columns, description="Column names.")


class ChatFormat(Strict):
    """How a conversation becomes text; only what follows `assistant` up to and with `end` is trained on."""

    system: str = Field("<|im_start|>system\n", description="Opens a system message.")
    user: str = Field("<|im_start|>user\n", description="Opens a user message.")
    assistant: str = Field("<|im_start|>assistant\n", description="Opens an assistant message.")
    end: str = Field("<|im_end|>", description="Closes every message; ends generation.")
    separator: str = Field("\n", description="Follows `end`.")
    image: str = Field("<|image|>", description="Start token of an image, read or written.")
    audio: str = Field("<|audio|>", description="Start token of an audio clip, read or written.")
    video: str = Field("<|video|>", description="Start token of a video.")


class ProcessorArguments(Strict):
    """Further arguments of every call of a HF processor, for each of its parts."""

    images_kwargs: dict[str, Any] = Field(default_factory=dict, description="For the image processor.")
    videos_kwargs: dict[str, Any] = Field(default_factory=dict, description="For the video processor.")
    audio_kwargs: dict[str, Any] = Field(default_factory=dict, description="For the feature extractor.")


class Data(Strict):
    """Data sets, how rows become samples, how samples become packs."""

    train: list[DataSource] = Field(min_length=1, description="Training data sets, mixed by weight.")
    heldout: list[DataSource] = Field(default_factory=list, description="Evaluation data sets.")
    chat: ChatFormat | None = Field(
        None, description="The chat format. Unset: the one saved with `model.checkpoint`, else the defaults below."
    )
    processor: str | None = Field(
        None,
        description="Folder or Hub id of a HF processor (or tokenizer), whose chat template renders the conversations. "
        "Unset: the foundation's own, where the foundation reads media by itself or `chat` is unset.",
    )
    processor_arguments: ProcessorArguments = Field(
        default_factory=lambda: ProcessorArguments(), description="Further arguments of every call of the HF processor."
    )
    audio_in_video: bool = Field(
        False, description="Read videos together with their sound, where the HF processor can."
    )
    max_frames: int = Field(
        128,
        ge=1,
        description="Frames decoded from a video at most, evenly spaced, before the HF processor samples its own.",
    )
    pack_tokens: int = Field(4096, ge=1, description="Length of a packed micro-batch, tokens; never padded.")
    overlong: Literal["drop", "error"] = Field(
        "drop", description="A sample longer than `pack_tokens`: `drop` (counted and listed) or `error`."
    )
    packing_buffer: int = Field(64, ge=1, description="Samples held back to choose from when filling a pack.")
    cached_samples: int = Field(
        0, ge=0, description="Prepared samples that each worker keeps: data that fits is decoded once, not every epoch."
    )
    workers: int = Field(
        1,
        ge=0,
        description="Background processes: one makes packs, the others prepare rows for it; a single one does both.",
    )

    @model_validator(mode="after")
    def _one_chat_format(self) -> Data:
        texts = {"system", "user", "assistant", "end", "separator"}
        if self.processor is not None and self.chat is not None and (given := texts & self.chat.model_fields_set):
            raise ValueError(f"`processor` brings a chat template of its own; remove {sorted(given)} from `chat`")
        return self


class Optimizer(Strict):
    """AdamW with fp32 state, linear warm-up, cosine decay (Loshchilov & Hutter 2019, 2017)."""

    learning_rate: float = Field(3e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(100, ge=0, description="Steps of linear warm-up from 0.")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="Shape after the warm-up.")
    final_ratio: float = Field(0.1, ge=0, le=1, description="Last learning rate of `cosine`, as a share of the peak.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay, on matrices only.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="Decay rates of the two moments."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Global gradient norm is clipped to this; null: never.")


class Compile(Strict):
    """``torch.compile`` of the foundation's blocks."""

    enabled: bool = Field(True, description="Compile each block, once for all lengths. Needs a C++ compiler on CPU.")
    max_recompiles: int = Field(8, ge=0, description="More recompiles than these stop the run.")


def _compile_shorthand(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class ExpertsBalance(Strict):
    """The routers of a mixture-of-experts model: what keeps them balanced, and whose decisions they take."""

    loss: Literal["none", "sample", "previous_step", "micro_batch"] = Field(
        "none",
        description="Loss for the balance of experts, per layer: within each sample (`sample`), or against the shares "
        "of the step before (`previous_step`); both are the same on any layout. `micro_batch` is that of transformers, "
        "which depends on how samples are packed and spread.",
    )
    weight: float = Field(0.001, ge=0, description="Of that loss in the total.")
    z_weight: float = Field(0.0, ge=0, description="Of the squared log-sum-exp of the routers' scores in the total.")
    bias_rate: float = Field(
        0.0,
        ge=0,
        description="How far the bias by which a router chooses moves per step, towards experts with fewer tokens. "
        "For routers that have one, such as DeepSeek-V3's.",
    )
    record: str | None = Field(None, description="Folder to which the experts of each sample's tokens are written.")
    replay: str | None = Field(
        None,
        description="Folder of an earlier `record`: tokens of samples in it go to the experts written there.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> ExpertsBalance:
        if self.record is not None and self.replay is not None:
            raise ValueError("`record` and `replay` exclude each other: what is taken is known already; remove one")
        return self


class Trace(Strict):
    """What is written down of single steps."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list,
        description="Optimizer steps, from 1, of which every rank writes a Chrome trace to `trace/`: when its experts "
        "computed, what was on its way, and when they waited for it.",
    )


class Train(Strict):
    """The loop."""

    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    micro_batches: int = Field(1, ge=1, description="Packs per optimizer step, over all ranks.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights, the data order and sampling.")
    device: str = Field("auto", description="`auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, ...")
    cpu_threads: int | None = Field(None, ge=1, description="Threads of one operation on CPU. Unset: torch's default.")
    loss_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="`text` or a decoder's name -> weight of its mean loss in the total. Unset: 1.",
    )
    log_every: int = Field(10, ge=1, description="Steps between two lines of metrics.jsonl.")
    save_every: int | None = Field(None, ge=1, description="Steps between two checkpoints. Unset: only the last.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")
    stop_seconds: float = Field(
        600,
        gt=0,
        description="After Ctrl-C, ranks of `--nproc` have so long to finish the step and save.",
    )
    stall_seconds: float | None = Field(
        600, gt=0, description="Where no rank moves on for so long, the run ends and names the one behind; null: never."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Optimizer and schedule.")
    experts: ExpertsBalance = Field(default_factory=ExpertsBalance, description="Routers of experts.")
    trace: Trace = Field(default_factory=Trace, description="Steps that are written down in detail.")
    compile: Annotated[Compile, BeforeValidator(_compile_shorthand, json_schema_input_type=bool | Compile)] = Field(
        default_factory=lambda: Compile(enabled=False),
        description="`torch.compile` of the foundation's blocks. `true` or `false` is short for {enabled: ...}.",
    )


class Sampling(Strict):
    """How the next token is drawn."""

    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_k: int | None = Field(None, ge=1, description="Keep the k most likely tokens.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the smallest set with this probability mass.")


class Evaluation(Strict):
    """Held-out loss and generated answers at the end of a run."""

    examples_per_source: int | None = Field(None, ge=1, description="Held-out rows per source. Unset: all.")
    batch_size: int = Field(64, ge=1, description="Prompts generated together.")
    max_new_tokens: int = Field(256, ge=1, description="Longest answer, text and media tokens together.")
    sampling: dict[str, Sampling] = Field(
        default_factory=dict, description="`text` or a decoder's name -> how its tokens are drawn. Unset: greedy."
    )
    scorer: str | None = Field(
        None,
        description="`FILE.py:FUNCTION` or `MODULE:FUNCTION`, called with the list of answers, returns {name: number}. "
        "Unset: exact match of text, per source.",
    )
    saved_samples: int = Field(4, ge=0, description="Generated answers per source written to `samples/`.")


class Recipe(Strict):
    """Everything a run needs. The resolved recipe is saved with every run and runs again as it is."""

    # The first field, and so imported before any other is validated: model types may be a plugin's.
    plugins: list[Annotated[str, AfterValidator(import_plugin)]] = Field(
        default_factory=list,
        description="Modules of yours (`MODULE` or `FILE.py`) that register classes; imported before all else.",
    )
    output_dir: str = Field("runs/default", description="Folder of the run: recipe, metrics, checkpoints, evaluation.")
    model: Model = Field(description="The omni model.")
    data: Data = Field(description="Data sets and packing.")
    train: Train = Field(default_factory=Train, description="The training loop.")
    parallel: ParallelPlan = Field(default_factory=ParallelPlan, description="How components lie on many ranks.")
    evaluation: Evaluation | None = Field(None, description="Evaluation at the end. Unset: none.")

    @model_validator(mode="after")
    def _heads_exist(self) -> Recipe:
        if self.model.checkpoint is None:
            self.check_heads(self.model.decoders)
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Recipe:
        if self.evaluation is not None and not self.data.heldout:
            raise ValueError("`evaluation` needs `data.heldout`: name the held-out data, or remove `evaluation`")
        return self

    @model_validator(mode="after")
    def _compiles_what_it_runs(self) -> Recipe:
        plan = self.parallel.of(FOUNDATION)
        if not self.train.compile.enabled:
            return self
        if plan.recompute in ("full", "selective"):
            raise ValueError(
                f"`train.compile` with `recompute: {plan.recompute}` of the foundation, under which torch compiles "
                "nothing; use one of the two"
            )
        if plan.activation_offload:
            raise ValueError(
                "`train.compile` with `activation_offload` of the foundation: compiled blocks cannot offload "
                "activations yet; use one of the two"
            )
        if plan.compile is not None:
            raise ValueError(
                f"`train.compile` is set, and the foundation's plan says `compile: {str(plan.compile).lower()}`; set "
                "it in one place"
            )
        return self

    def check_heads(self, decoders: Iterable[str]) -> None:
        """Names under ``train.loss_weights`` and ``evaluation.sampling`` must be ``text`` or one of ``decoders``.

        Raises:
            ValidationError: every name that is not, with the nearest that is.
        """
        heads = {"text", *decoders}
        weights, sampling = self.train.loss_weights, self.evaluation.sampling if self.evaluation else {}
        named: dict[tuple[str, ...], Any] = {("train", "loss_weights", name): value for name, value in weights.items()}
        named |= {("evaluation", "sampling", name): rule for name, rule in sampling.items()}
        problems = [
            located(f"unknown name; {hint(path[-1], heads)}", path, value)
            for path, value in named.items()
            if path[-1] not in heads
        ]
        if problems:
            raise ValidationError.from_exception_data("Recipe", problems)

    @classmethod
    def load(cls, path: str, overrides: list[str] | None = None) -> Recipe:
        """Read a YAML recipe.

        Args:
            path: YAML file, or the name of a shipped recipe (``quickstart``).
            overrides: ``key.sub=value`` strings; values are YAML.

        Raises:
            RecipeError: every problem at once, each with its path and, for unknown keys, the nearest valid key.
        """
        from omnitrain.recipe.load import load_recipe

        return load_recipe(path, overrides)
