"""The ``data`` node: data sets, the conversion of rows to samples, and packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from omnitrain.recipe.strict import Idle, Problem, Strict, short_for
from omnitrain.recipe.suggest import hint

Overlong = Literal["drop", "error", "split"]
RowFormat = Literal["alpaca", "sharegpt", "llama_factory", "ms_swift", "axolotl", "openai", "trl", "llava"]

# Keys of `data` and of its data sets that say how media are read -> the modalities of which they say it.
VISUAL_KEYS = {
    "fps": ("video",),
    "max_frames": ("video",),
    "min_pixels": ("image", "video"),
    "max_pixels": ("image", "video"),
}

CALLS = "tool_call"  # of a speaker whose text is a call of a tool, or a list of them
_NAMES = {
    "system": (),
    "developer": (),
    "user": ("human",),
    "assistant": ("gpt", "chatgpt", "bing", "bard", "bot", "model"),
    "tool": ("observation", "observations", "tool_response", "function", "ipython"),
    CALLS: ("function_call",),
}
ROLES = {name: role for role, names in _NAMES.items() for name in (role, *names)}  # speaker -> role


def _known(roles: dict[str, str]) -> dict[str, str]:
    if wrong := [role for speaker, role in roles.items() if role not in {speaker, *_NAMES}]:
        raise ValueError(f"found {wrong}, expected {', '.join(_NAMES)}, or the name of the speaker itself")
    return roles


class Columns(Strict):
    """Column names of a data set."""

    id: str = "id"
    """Unique string id of a row. Without this column, the id is SOURCE[POSITION]."""
    source: str = "task"
    """String column by which metrics are split. Without this column: the name of the data set."""
    messages: str = "messages"
    """Messages: role and content (OpenAI), or from and value (ShareGPT)."""
    images: str = "images"
    """Images of the row, in the order of its image parts."""
    audios: str = "audios"
    """Audio clips of the row, in the order of its audio parts."""
    videos: str = "videos"
    """Videos of the row, in the order of its video parts."""
    tools: str | None = "tools"
    """Tools that the assistant may call: a list of JSON schemas (OpenAI), or the list as JSON text. `null`: no column
    has any."""

    text: str | None = None
    """Text of a document to train on, in place of messages. A text longer than `pack_tokens` becomes several
    samples."""
    response: str | None = None
    """Text of an assistant's only message, in place of `messages`. The row's media come before."""
    prompt: str | list[str] | None = None
    """With `response`: text of the user's message, after the row's media; or several columns, whose texts become
    lines."""
    history: str | None = None
    """With `response`: earlier questions and answers, as in `[[question, answer], ...]`."""
    system: str | None = "system"
    """Text of a system message before the others; rows may have none. `null`: no column has any."""

    def unused(self) -> Iterator[Idle]:
        """Yield columns that the way in which rows are read does not use."""
        if self.response is None:
            for key in ("prompt", "history"):
                yield Idle(key, "but `response` is not set; set it to the column of the answers")
        for key in ("text", "response"):
            if getattr(self, key) is not None:
                yield Idle("messages", f"but `{key}` is set, so no messages are read; remove one of them")
        if self.text is not None:
            yield Idle("response", "but `text` is set, so rows are documents; remove one of them")
            for key in ("images", "audios", "videos", "tools", "system"):
                yield Idle(key, "but `text` is set, and documents have no media, tools and messages; remove it")

    @property
    def prompts(self) -> tuple[str, ...]:
        """The columns of the user's message."""
        return (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt or ())

    def names(self) -> list[str]:
        """Return the names of all columns."""
        others = self.model_dump(exclude={"prompt"}, exclude_none=True)
        return [*others.values(), *self.prompts]

    def of_media(self) -> dict[str, str]:
        """Return field -> column name for the media columns."""
        return {field: getattr(self, field) for field in ("images", "audios", "videos")}


class DataSource(Strict):
    """One data set."""

    path: str
    """Files of data (parquet, Arrow, JSON Lines, JSON, csv, tar shards or text), as a path, a URL, a glob, a range
    `{00..12}` or a folder; or a Hub data set id."""
    name: str | None = None
    """Name in metrics. Unset: the file name without its suffix, with its folder if several file names are equal."""
    split: str = "train"
    """Split to use if `path` is a Hub data set."""
    subset: str | None = None
    """Subset (configuration) to use if `path` is a Hub data set."""
    revision: str | None = None
    """Branch, tag or commit to use if `path` is a Hub data set."""
    streaming: bool = False
    """Read a Hub data set as it arrives, row by row in its order, and do not download it first."""
    copy_parquet: bool = False
    """Copy parquet files into the cache of HF `datasets` first. Rows are then shuffled over the whole data set, and not
    over a few row groups at a time."""
    read_seconds: float = Field(60.0, gt=0)
    """Seconds in which a file, or a part of it, must arrive from a URL, all tries together. A row that misses them is
    skipped."""
    sample_seconds: float | None = Field(120.0, gt=0)
    """Seconds in which a row must become a sample: its media read, decoded and prepared. A row that misses them is
    skipped for the rest of the run. null: no limit."""
    weight: float = Field(1.0, ge=0)
    """Relative share of this source among all drawn samples, or their tokens (`weights_by`). 0: it is drawn only in
    `stages` that give it a weight."""
    epochs: float | None = Field(None, gt=0)
    """How often the rows are drawn; then the other sources share its draws. Unset: no limit."""
    overlong: Overlong | None = None
    """What to do with a sample that does not fit into a pack. Unset: `overlong` of `data`."""
    limit: int | None = Field(None, ge=1)
    """Use only this number of rows, from the first. Unset: all."""
    format: RowFormat | None = None
    """Format of the rows. It names their columns; `columns` may rename them. Unset: that of `columns`; without a column
    of messages, a format is recognised by its columns."""
    columns: Columns = Field(default_factory=Columns)
    """Column names."""
    roles: Annotated[dict[str, str], AfterValidator(_known)] = Field(default_factory=dict)
    """Speaker in the data -> `system`, `developer`, `user`, `assistant`, `tool`, or `tool_call` (its text is a call);
    or the same name again, if the chat template knows it. Usual speakers need no entry."""
    media_markers: list[Literal["image", "audio", "video"]] | None = None
    """Modalities that texts mark with `<image>`, `<audio>` or `<video>`, as in LLaVA's data. Unset: none, or those that
    a format marks and the data has columns for."""
    media_folder: str | None = None
    """Folder or URL that media paths are relative to. Unset: the working folder; for a folder with a file `metadata.*`
    of rows, this folder."""
    encoders: list[str] | None = Field(None, min_length=1)
    """Encoders that read its media. Unset: all of their modality."""
    decoders: list[str] | None = Field(None, min_length=1)
    """Decoders that write the media of its answers. Needed for modalities of two decoders."""
    fps: float | None = Field(None, gt=0)
    """Frames to read from a second of its videos. Unset: `fps` of `data` or of the encoder."""
    max_frames: int | None = Field(None, ge=1)
    """Most frames to read from each of its videos. Unset: that of `data` or of the encoder."""
    min_pixels: int | None = Field(None, ge=1)
    """Least pixels of its images and frames. Unset: that of `data`, or the HF processor's."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of its images and frames. Unset: that of `data`, or the HF processor's."""

    def idle(self) -> Iterator[Idle]:
        """Yield roles of documents, and columns that the way in which rows are read does not use."""
        if self.format is not None:
            return  # its columns are known when the data are read
        yield from (Idle(f"columns.{key}", why) for key, why in self.columns.unused())
        if self.columns.text is not None:
            yield Idle("roles", "but `columns.text` is set, so no messages are read; remove it")


CHAT_TEXTS = ("system", "user", "assistant", "end", "separator")  # in ChatFormat; the rest are start tokens


class ChatFormat(Strict):
    """Text format of a conversation; only the text after `assistant`, up to and including `end`, is trained."""

    system: str = "<|im_start|>system\n"
    """Text before a system message."""
    user: str = "<|im_start|>user\n"
    """Text before a user message."""
    assistant: str = "<|im_start|>assistant\n"
    """Text before an assistant message."""
    end: str = "<|im_end|>"
    """Token after every message; ends generation."""
    separator: str = "\n"
    """Text after `end`."""
    image: str = "<|image|>"
    """Start token of an image in a prompt or an answer."""
    audio: str = "<|audio|>"
    """Start token of an audio clip in a prompt or an answer."""
    video: str = "<|video|>"
    """Start token of a video."""
    starts: dict[str, str] = Field(default_factory=dict)
    """Decoder -> start token of its items, in place of that of their modality. Needed for two decoders of one."""

    def start_of(self, modality: str, component: str) -> str:
        """Return the start token of an item: that of its decoder, if it has its own, or of its modality."""
        return self.starts.get(component) or str(getattr(self, modality))


class ProcessorArguments(Strict):
    """Additional arguments of every call of a HF processor, by its components."""

    images_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the image processor."""
    videos_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the video processor."""
    audio_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the feature extractor."""


class Stage(Strict):
    """Weights of the training data sets from a step on."""

    from_step: int = Field(ge=1)
    """Number of steps before the stage begins."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Name of a training data set -> its weight. The others keep the weight they had."""


def source_names(sources: Sequence[DataSource]) -> list[str]:
    """Return the name of each source, or the shortest end of its path that no other source has."""
    paths = list(dict.fromkeys(Path(source.path) for source in sources if source.name is None))
    return [source.name or _end_of(Path(source.path), paths) for source in sources]


def _end_of(path: Path, paths: Sequence[Path]) -> str:
    """Return the stem of ``path`` with as many parent folders as make it unique among ``paths``."""
    for depth in range(1, len(path.parts) + 1):
        ends = [(*one.parts[:-1], one.stem)[-depth:] for one in (path, *paths)]
        if ends.count(ends[0]) == 2:  # `paths` contains `path` itself
            return "/".join(ends[0])
    return path.name


Chance = Annotated[float, Field(ge=0, le=1)]


class ConditionDropout(Strict):
    """Chances that a sample whose answer has media is trained without its condition: all that is not the assistant's.

    Each is drawn from the seed and the sample's position in the data order.
    """

    whole: Chance = 0.0
    """Chance that a sample loses its whole condition. `guidance` compares with such prompts."""
    text: Chance = 0.0
    """Chance that it loses the texts, and keeps media."""
    image: Chance = 0.0
    """Chance that it loses the images."""
    audio: Chance = 0.0
    """Chance that it loses the sounds."""
    video: Chance = 0.0
    """Chance that it loses the videos."""


class Data(Strict):
    """Data sets, the conversion of rows to samples, and packing."""

    train: list[DataSource] = Field(min_length=1)
    """Training data sets, mixed by weight."""
    weights_by: Literal["samples", "tokens"] = "samples"
    """Whether weights are shares of the samples or of their tokens. `tokens`: the mean length of each source's first 64
    samples turns its weight into a share of samples."""
    stages: list[Stage] = Field(default_factory=list)
    """Other weights from given steps on."""
    heldout: list[DataSource] = Field(default_factory=list)
    """Evaluation data sets."""
    chat: ChatFormat | None = None
    """The chat format. Unset: the one saved with `model.checkpoint`, or the defaults below."""
    condition_dropout: Annotated[ConditionDropout, short_for("whole", int | float, float | ConditionDropout)] = Field(
        default_factory=lambda: ConditionDropout()
    )
    """Train some samples whose answers have media without their condition, for `guidance` of generation. A number is
    short for {whole: ...}."""
    processor: str | None = None
    """Folder or Hub id of a HF processor (or tokenizer) whose chat template renders the conversations. Unset: the
    foundation's own processor, if the foundation reads media itself or `chat` is unset."""
    processor_arguments: ProcessorArguments = Field(default_factory=lambda: ProcessorArguments())
    """Additional arguments for every call of the HF processor."""
    audio_in_video: bool = False
    """Read videos together with their sound, if the HF processor supports it."""
    fps: float | None = Field(None, gt=0)
    """Frames to read from a second of a video. Unset: those of the HF processor, 2 for one that reads `fps` and has
    none."""
    max_frames: int | None = Field(None, ge=1)
    """Most frames to read from a video, evenly spaced in time. Unset: the HF processor's own limit, or 768."""
    min_pixels: int | None = Field(None, ge=1)
    """Least pixels of an image or frame, which is enlarged. Unset: the HF processor's own."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of an image or frame, which is reduced. Unset: the HF processor's own."""
    pack_tokens: int = Field(4096, ge=1)
    """Maximum length of a pack (one micro-batch), in tokens. Packs are not padded."""
    pack_elements: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Encoder -> maximum number of input elements that it reads in a pack, such as values of pixels. Encoders without
    an entry have no limit."""
    overlong: Overlong = "drop"
    """What to do with a sample that does not fit into a pack: `drop` (skip, count and list it), `error`, or `split`
    (cut the conversation between turns). `overlong` of a data set comes first."""
    packing_buffer: int = Field(64, ge=1)
    """Number of samples to choose from when filling a pack."""
    cached_samples: int = Field(0, ge=0)
    """Number of prepared samples that each worker caches. Data that fits is decoded once instead of once per epoch."""
    workers: int = Field(1, ge=0)
    """Background processes: one makes packs, the others prepare rows for it. A single process does both, except for
    rows with media, which one more process prepares (`sample_seconds`)."""

    def idle(self) -> Iterator[Idle]:
        """Yield weights of data sets that are not mixed, and chat texts that a chat template replaces."""
        if len(self.train) == 1:
            for key in ("train.0.weight", "weights_by", "stages"):
                yield Idle(key, "but there is only one training data set; remove it")
        for index in range(len(self.heldout)):
            yield Idle(f"heldout.{index}.weight", "but held-out data sets are not mixed; remove it")
            yield Idle(f"heldout.{index}.overlong", "but held-out samples that are too long are skipped; remove it")
            yield Idle(f"heldout.{index}.epochs", "but held-out data sets are read once; remove it")
        if self.processor is not None:
            for key in CHAT_TEXTS:
                yield Idle(f"chat.{key}", "but `processor` has its own chat template; remove it")

    def contradictions(self) -> Iterator[Problem]:
        """Yield weights of unknown sources, stages that are not in order, stages and sources without any draw."""
        names, weights = source_names(self.train), self.stage_weights()
        for number, stage in enumerate(self.stages):
            for name in stage.weights:
                if name not in names:
                    yield ("stages", number, "weights", name), f"unknown data set; {hint(name, names)}"
        for number, (earlier, later) in enumerate(pairwise(self.stages), 1):
            if later.from_step <= earlier.from_step:
                before = f"found {later.from_step}, but the stage before begins at {earlier.from_step}"
                yield ("stages", number, "from_step"), f"{before}; put them in order"
        for number, of_stage in enumerate(weights):
            if not any(of_stage):
                at = ("stages", number - 1, "weights") if number else ("train", 0, "weight")
                yield at, "all weights are 0; expected one above 0"
        for number, of_source in enumerate(zip(*weights, strict=True)):
            if not any(of_source):
                why = "no stage has another weight for it; remove the data set, or name it in `stages`"
                yield ("train", number, "weight"), f"found 0.0, and {why}"
        yield from self._endless()

    def _endless(self) -> Iterator[Problem]:
        for kind, sources in (("train", self.train), ("heldout", self.heldout)):
            for number, source in enumerate(sources):
                is_endless, why = source.streaming and source.limit is None, "a streamed data set has no known length"
                if is_endless and source.epochs is not None:
                    yield (kind, number, "epochs"), f"{why}, which `epochs` needs; set `limit`"
                if is_endless and kind == "heldout":
                    yield (kind, number, "streaming"), f"{why}, which evaluation needs; set `limit`"

    def overlong_of_sources(self) -> list[Overlong]:
        """Return what to do with samples that are too long, for each training data set."""
        return [source.overlong or self.overlong for source in self.train]

    def stage_weights(self) -> list[list[float]]:
        """Return the weight of each training data set, for the first stage and each of ``stages``."""
        names, weights = source_names(self.train), [[source.weight for source in self.train]]
        for stage in self.stages:
            before = zip(names, weights[-1], strict=True)
            weights.append([stage.weights.get(name, weight) for name, weight in before])
        return weights
