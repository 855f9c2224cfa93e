"""The ``model`` node: a checkpoint, or the components of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from omnitrain.recipe.hf_config import check_hf_config_keys, check_hf_processor_keys
from omnitrain.recipe.strict import Idle, Problem, Strict, short_for


class HFSource(Strict):
    """Origin of a HuggingFace model: pretrained weights (``path``) or random weights from a ``config``."""

    path: str | None = None
    """Hub id or local folder of a pretrained model."""
    config: Annotated[dict[str, Any], BeforeValidator(check_hf_config_keys)] | None = None
    """Keys of a HF config with `model_type`. The model starts from random weights."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, unless it has exactly one source."""
        if (self.path is None) == (self.config is None):
            given = "both" if self.path is not None else "neither"
            yield (), f"give exactly one of `path` (pretrained weights) and `config` (random weights), found {given}"


Source = Annotated[HFSource, short_for("path", str, str | HFSource)]


class Projector(Strict):
    """Maps a tower's features to the foundation's hidden size."""

    kind: Literal["linear", "mlp", "pixel_shuffle"] = "mlp"
    """`linear`: one layer; `mlp`: two layers with GELU; `pixel_shuffle`: merges `factor` x `factor` neighbouring
    patches (for audio: `factor` neighbouring frames) into one feature, then an MLP."""
    factor: int = Field(2, ge=1)
    """Merge factor of `pixel_shuffle`; the other kinds do not merge."""

    def idle(self) -> Iterator[Idle]:
        """Yield the key that the kind does not use."""
        if self.kind != "pixel_shuffle":
            yield Idle("factor", f"but `kind: {self.kind}` merges nothing; remove it, or set `kind: pixel_shuffle`")


class Encoder(Strict):
    """A tower that reads a modality, and its projector into the foundation."""

    tower: Source
    """The HF vision or audio tower. A string is short for {path: ...}."""
    more_towers: list[Source] = Field(default_factory=list)
    """More HF vision towers, which read the same images, with their own processors. Their features of a patch are
    joined to those of `tower`, before the projector."""
    projector: Projector = Field(default_factory=Projector)
    """Maps the tower's features to the foundation's hidden size."""
    fps: float | None = Field(None, gt=0)
    """Frames to read from a second of a video. Unset: all, up to `max_frames`."""
    max_frames: int = Field(32, ge=1)
    """Most frames to read from a video. Of longer videos, they are evenly spaced in time."""
    min_pixels: int | None = Field(None, ge=1)
    """Least pixels of an image or frame, which is enlarged. Unset: the HF processor's own."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of an image or frame, which is reduced. Unset: the HF processor's own."""
    processor: Annotated[str | dict[str, Any] | None, BeforeValidator(check_hf_processor_keys)] = None
    """The HF image processor or feature extractor: a folder, a Hub id, or its arguments. Unset: the one saved with the
    tower, or one derived from the tower's config."""


class Flow(Strict):
    """How a decoder writes latents: by a flow from noise."""

    kind: Literal["head", "in_context"] = "head"
    """`head`: latent by latent, by a small velocity network on each hidden state; `in_context`: all latents of an image
    at once, by the foundation, in which they see each other."""
    patch_size: int = Field(1, ge=1)
    """Side of the square of the tokenizer's latents that is one token."""
    width: int = Field(256, ge=1)
    """Width of the network of `head`."""
    depth: int = Field(3, ge=1)
    """Number of residual blocks of the network of `head`."""
    num_steps: int = Field(16, ge=1)
    """Euler steps from noise to latents, in generation."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys of the network that the kind does not have."""
        if self.kind == "in_context":
            for key in ("width", "depth"):
                yield Idle(key, "but with `kind: in_context` the foundation is the network; remove it")


class Decoder(Strict):
    """A modality that the model writes as tokens of a frozen tokenizer: codes, or latents."""

    tokenizer: Source | None = None
    """The frozen media tokenizer. Codes: a HF VQ model (Janus, Emu3, Chameleon VQ) for images; a HF codec (EnCodec,
    DAC, Mimi) or omnitrain's mel-VQ for audio. Latents: an AutoencoderKL of diffusers, or omnitrain's patches of
    pixels. A string is short for {path: ...}. Unset: the one of the foundation, with the embedding and the head that
    the foundation has for its codes (Janus)."""
    image_size: int | None = Field(None, ge=1)
    """Side of the square target images, in pixels. Images only. Unset: the only size of the tokenizer (Janus)."""
    image_sizes: list[Annotated[str, Field(pattern=r"^[1-9]\d*x[1-9]\d*$")]] = Field(default_factory=list)
    """Sizes of the target images, `WIDTHxHEIGHT` in pixels, in place of `image_size`. Each image gets the nearest one,
    and the model writes its size first. Needs the VQ model of Emu3."""
    num_frames: int | None = Field(None, ge=1)
    """Frames of each target video, evenly spaced in time; a shorter one repeats some. Each is an image of `image_size`.
    Set: the decoder writes films."""
    fps: float = Field(8.0, gt=0)
    """Frames per second of the films that it writes."""
    num_codebooks: int = Field(1, ge=1)
    """Number of codebooks of a residual codec to model, flattened in time order."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens to generate for one item."""
    flow: Flow = Field(default_factory=Flow)
    """How a tokenizer's latents are predicted. Codes do not use it."""

    def idle(self) -> Iterator[Idle]:
        """Yield the one size, if there are several, and the rate of images."""
        if self.image_sizes:
            yield Idle("image_size", "but `image_sizes` has the sizes; remove one of the two")
        if self.num_frames is None:
            yield Idle("fps", "but without `num_frames` the decoder writes no films; set it, or remove `fps`")


class TeacherSource(Strict):
    """A frozen language model that reads the samples as the foundation does, with the foundation's tokenizer."""

    path: str
    """Hub id or local folder of a causal language model."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = None
    """Adds a loss of the text: the divergence of the foundation's predictions from the teacher's. Unset: a function of
    `train.losses` or `train.metrics` reads the teacher's last hidden states."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both. The divergence is multiplied by its square, so gradients keep their size."""
    top_k: int | None = Field(None, ge=1)
    """Number of the teacher's most likely classes to compare; all others count as one class. Unset: all classes."""
    weight: float = Field(1.0, ge=0)
    """Weight of the divergence in the total loss; `train.loss_weights.text` is that of the cross entropy."""
    sources: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the data sources whose samples it reads. Unset: those of all sources."""

    def idle(self) -> Iterator[Idle]:
        """Yield the keys that only a divergence reads."""
        for key in ("temperature", "top_k", "weight", "sources") if self.divergence is None else ():
            yield Idle(key, "but there is no `divergence`, which reads it; set it, or remove this key")


class Ops(Strict):
    """Implementation of each operation; `auto`: the fastest measured one on the device."""

    attention: Literal["auto", "flash", "varlen", "sdpa", "flex", "reference"] = "auto"
    """Attention over packs. Naming a backend that does not support a layer is an error."""
    rms_norm: Literal["auto", "torch", "fused", "liger"] = "auto"
    """RMSNorm. `fused`: a custom backward; the forward has the same bits. `auto` uses it on CPU."""
    swiglu: Literal["auto", "torch", "liger"] = "auto"
    """Activation and product of a gated MLP with SiLU."""
    rotary: Literal["auto", "torch", "fused", "liger"] = "auto"
    """Rotary positions of query and key. `fused`: same bits with a custom backward; `auto` uses it on CPU."""
    patch_embed: Literal["auto", "torch", "linear"] = "auto"
    """Convolutions whose kernel equals their stride. `linear`: compute them as one matrix product."""
    unread_rows: Literal["auto", "torch", "skip"] = "auto"
    """Tokens whose last hidden state no loss reads. `skip`: after the last layer that mixes tokens, do not compute
    them; `auto` does so on CPU."""
    experts: Literal["auto", "torch", "grouped_mm", "batched_mm", "sonicmoe", "deepgemm"] = "auto"
    """Experts of a layer. `torch`: omnitrain's implementation; the others are functions of transformers."""
    cross_entropy: Literal["auto", "torch", "compiled", "liger"] = "auto"
    """Softmax of the loss inside the head, which always processes the logits in chunks. `compiled`: in place, by
    torch.compile; `auto` uses it on CUDA."""


class Model(Strict):
    """The omni model: a checkpoint, or its components."""

    checkpoint: str | None = None
    """Folder of a saved omni model. It contains the whole model, so give no other parts."""
    foundation: Source | None = None
    """The language model. A string is short for {path: ...}."""
    tokenizer: str | None = None
    """Folder or Hub id of the text tokenizer. Unset: the one saved with the foundation."""
    encoders: dict[str, Encoder] = Field(default_factory=dict)
    """Component name -> encoder."""
    decoders: dict[str, Decoder] = Field(default_factory=dict)
    """Component name -> decoder."""
    teachers: dict[
        Annotated[str, Field(pattern=r"^[a-z]\w*$")],
        Annotated[TeacherSource, short_for("path", str, str | TeacherSource)],
    ] = Field(default_factory=dict)
    """Component name -> teacher. A string is short for {path: ...}. It is not saved with the model."""
    freeze: list[str] = Field(default_factory=list)
    """Components or modules that do not train: `foundation`, `image_encoder.tower`, ... A name that matches nothing is
    an error."""
    ops: Ops = Field(default_factory=Ops)
    """Implementations of operations during training."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield the node, unless it has either a checkpoint or parts, each with a name of its own."""
        parts = [name for name in ("foundation", "tokenizer", "encoders", "decoders") if getattr(self, name)]
        if self.checkpoint is not None and parts:
            yield (), f"`checkpoint` already contains the whole model; remove {parts}"
        if self.checkpoint is None and self.foundation is None:
            yield (), "give `checkpoint` (a saved omni model) or `foundation` (a language model)"
        if taken := sorted(self.teachers.keys() & {"foundation", *self.encoders, *self.decoders}):
            yield (), f"`teachers`: {taken[0]!r} is the name of another component; choose another one"
