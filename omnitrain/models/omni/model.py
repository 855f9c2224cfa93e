"""``OmniModel``: encoders, a foundation model and decoders as one model with one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from omnitrain.checkpoint.model_files import remove_adapters
from omnitrain.checkpoint.store import set_default_modes
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.data.render.native import NativeInputs
from omnitrain.errors import UserError
from omnitrain.models.adapters.files import load_adapters, save_adapters, split_weights
from omnitrain.models.components.contract import StageContract
from omnitrain.models.components.model import ComponentModel
from omnitrain.models.components.outputs import FoundationOutput, OmniOutput, StatesApart
from omnitrain.models.components.protocols import ComponentAdapter, TensorFeatures
from omnitrain.models.contract.check import contract_of
from omnitrain.models.contract.stages import stage_contract_of
from omnitrain.models.contract.tiny_model import draws_in_training
from omnitrain.models.decoders.flow import FlowDecoder
from omnitrain.models.decoders.in_context import InContextDecoder
from omnitrain.models.decoders.of_foundation import decoder_of, give_back, take
from omnitrain.models.decoders.tokens import TokenDecoder
from omnitrain.models.discovery import config_nodes, native_inputs, refusing, rest_codecs
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.encoders.audio import AudioEncoder
from omnitrain.models.encoders.vision import VisionEncoder
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.foundation.sequence_slice import local_positions
from omnitrain.models.foundation.stage import StageCall
from omnitrain.models.hf.load import as_config, foundation_class, load_strictly, model_class, take_own_configs
from omnitrain.models.omni.encode import encode, filled_up, require_no_words
from omnitrain.models.omni.hf_batch import forward_of_batch, takes_any_argument
from omnitrain.models.omni.inference import Inference
from omnitrain.models.omni.save import save_whole
from omnitrain.models.omni.stage import StageInput, arrived_pack, handed_on
from omnitrain.models.omni.teacher import Teacher, require_plain_head
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.draws import seed_blocks, seed_foundation
from omnitrain.ops.host_values import reading_on_host, to_device
from omnitrain.ops.recompute import recompute_contexts
from omnitrain.ops.timing import SpanRecorder
from omnitrain.peers import is_spread, ranks_of
from omnitrain.recipe.component_configs import (
    AudioEncoderConfig,
    FlowDecoderConfig,
    InContextDecoderConfig,
    OmniConfig,
    TeacherConfig,
    TokenDecoderConfig,
    VisionEncoderConfig,
)
from omnitrain.torch_private import BatchNorm

# What says where from_pretrained finds the files, and how it downloads them.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# Arguments of save_pretrained that say nothing where all ranks save their own weights; a true `push_to_hub` does.
_FOR_ONE_PROCESS = {"is_main_process", "state_dict", "push_to_hub"}


class OmniModel(ComponentModel, fp32_modules=["tokenizer"]):  # of a decoder: rounded weights would make other codes
    """One model over packed sequences of text and media.

    Components are attributes by their names: ``foundation``, ``image_encoder``, ``audio_decoder``, ...

    Attributes:
        compute_device: device of its computations, if its parameters are on another device.
        takes_batches: whether :meth:`forward` takes batches of transformers; not after ``build_parallelize_model``.
        inference: runs it without backwards, on all ranks that it is spread over.
    """

    config_class = OmniConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True

    encode_recorder: SpanRecorder | None = None  # records the calls of components
    call_elements: Mapping[str, int] = MappingProxyType({})  # name of media in a pack -> most elements of a call

    def __init__(self, config: OmniConfig, components: dict[str, PreTrainedModel] | None = None) -> None:
        """Build from ``config`` with random weights, or around ready ``components`` (name -> model)."""
        encoders = {**(config.encoders or {}), **(config.teachers or {})}
        super().__init__(config, encoders, config.decoders or ())
        ready = components or {}
        self.compute_device: torch.device | None = None
        self._draws = False
        self.takes_batches = True
        self.inference = Inference()
        self._minimal_inputs: dict[str, tuple[TensorFeatures, tuple[int, ...]]] = {}
        self.foundation = ready.get("foundation") or _fresh(config.foundation or {}, foundation_class)
        # Sorted, as a saved config is: a loaded model must have its parameters in the order of the built one.
        for name, values in sorted({**encoders, **(config.decoders or {})}.items()):
            if hasattr(type(self), name) or name in vars(self):
                raise UserError(f"{name!r}: the model has an attribute of this name; choose another component name")
            part = ready.get(name)
            if values.get("of_foundation"):
                part = part or decoder_of(self.foundation, cast(TokenDecoderConfig, as_config(values)))
                take(self.foundation, part)
            self.add_module(name, part or _fresh(values, model_class))
        self.post_init()
        self.fit_heads_of_teachers()
        take_own_configs(self.children())
        for name in sorted({*self.encoder_names, *self.decoder_names}.difference(self.teachers)):
            use_omnitrain_attention(self.get_submodule(name))

    @property
    def device(self) -> torch.device:
        """The device of its inputs; offloaded parameters are in host memory."""
        return self.compute_device or super().device

    @cached_property
    def runner(self) -> FoundationRunner:
        """Runs the foundation by its contract; UserError: the check of it refused the foundation."""
        with refusing(f"model.foundation: {type(self.foundation).__name__} cannot be run"):
            runner = FoundationRunner(self.foundation, contract_of(self.foundation))
        self.find_draws()
        for name, decoder in self.decoders.items():
            if runner.why_causal and decoder.adapter().is_block:
                raise UserError(
                    f"model.decoders.{name}: the tokens of an image must see each other, but in "
                    f"{type(self.foundation).__name__} they cannot: {runner.why_causal}; set `flow.kind: head`"
                )
        for name in self.teachers:
            try:
                assert self.get_submodule(name).runner is not None  # checked before the model is sharded
                if name in self.compared:
                    require_plain_head(type(self.foundation).__name__, runner.contract)
            except UserError as error:
                raise UserError(f"model.teachers.{name}: {error}") from None
        runner.compared = {name: self.get_submodule(name) for name in self.compared}
        return runner

    def fit_heads_of_teachers(self) -> None:
        """Give the output layers of teachers with a divergence as many classes as the foundation's head has."""
        head: Any = self.foundation.get_output_embeddings()
        for name in self.teachers:
            self.get_submodule(name).fit_head(len(head.weight))

    @property
    def draws(self) -> bool:
        """Whether the foundation draws random numbers in training, such as those of dropout."""
        return self.runner is not None and self._draws  # a runner finds them when it is built

    def find_draws(self) -> None:
        """Look again whether the foundation draws random numbers in training, after modules were added to it."""
        if not self._draws and draws_in_training(self.foundation):
            self._draws = True
            seed_blocks(text_blocks(self.foundation))

    @cached_property
    def stage_contract(self) -> StageContract:
        """Where the foundation may be cut into pipeline stages. Read it first before the model is sharded."""
        return stage_contract_of(self.foundation, self.runner.contract)

    @classmethod
    def from_pretrained(cls, path: str, *args: Any, **kwargs: Any) -> OmniModel:
        """Load a saved omni model, a folder or Hub id, with its LoRA adapters; tensors that do not fit are an error.

        Other arguments are those of transformers. With ``output_loading_info``, transformers loads the model: tensors
        that do not fit are reported instead of raised, and LoRA adapters are not loaded. Raises UserError: there is no
        model at ``path``; WeightsError: names every tensor that does not fit.
        """
        if kwargs.get("output_loading_info"):
            return super().from_pretrained(path, *args, **kwargs)  # strict loading asks for it
        model = cast(OmniModel, load_strictly(cls, str(path), kwargs.pop("dtype", None), **kwargs))
        load_adapters(model, path, **{name: kwargs[name] for name in _WHERE if name in kwargs})
        return model

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write the config, whole weights, and LoRA adapters in peft's files, for :meth:`from_pretrained`.

        If the model is spread over ranks, all of them must call this with one folder alone; each writes some of the
        files (:func:`save_whole`). In one process, other arguments are those of transformers; with ``state_dict``, the
        calling rank writes its tensors as they are. Weights that were saved there are replaced. Raises UserError:
        arguments that this model does not take, such as ``push_to_hub`` with adapters; TrainingError: writing failed on
        another rank.
        """
        if kwargs.get("state_dict") is not None:
            super().save_pretrained(save_directory, *args, **kwargs)
            if kwargs.get("is_main_process", True):
                remove_adapters(Path(save_directory))
            return
        if kwargs.get("push_to_hub"):
            self._require_no_adapters()
        if is_spread(self):
            unknown = {f"a positional argument ({value!r})" for value in args} | (kwargs.keys() - _FOR_ONE_PROCESS)
            unknown |= {"push_to_hub"} if kwargs.get("push_to_hub") else set()
            if unknown:
                found = ", ".join(sorted(unknown))
                raise UserError(
                    f"save_pretrained of a model that is spread over ranks: found {found}; expected only a folder; "
                    "save it, load it in one process, and save it again from there"
                )
            with ranks_of(self) as peers:
                save_whole(self, Path(save_directory), peers)
        elif kwargs.get("is_main_process", True):
            whole = self.state_dict()
            weights, _ = split_weights(self, whole)
            # First, because a folder with the base's weights would count as a complete model.
            remove_adapters(Path(save_directory))
            save_adapters(self, Path(save_directory), whole)
            super().save_pretrained(save_directory, *args, **kwargs | {"state_dict": weights})
            set_default_modes(Path(save_directory).glob("*.safetensors"))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Upload config and weights to the Hub; return the commit's address. UserError: there are LoRA adapters."""
        self._require_no_adapters()
        return super().push_to_hub(*args, **kwargs)

    def _require_no_adapters(self) -> None:
        if self.adapter_names:
            raise UserError(
                f"found {len(self.adapter_names)} tensors of LoRA adapters, which transformers would not upload; call "
                "save_pretrained(FOLDER) without push_to_hub, then upload all of it: hf upload REPO FOLDER"
            )

    @property
    def foundation_components(self) -> Mapping[str, Sequence[str]]:
        """Component of the foundation -> names of its parameters in the foundation."""
        return self.runner.native.components

    @property
    def media_names(self) -> dict[str, tuple[str, ...]]:
        """Component -> the names that its media have in a pack, in the order in which components encode."""
        modalities = self.runner.native.interfaces
        names = {f"{NATIVE_PREFIX}{modality}": interface.component for modality, interface in modalities.items()}
        names |= {name: name for name in (*self.encoder_names, *self.decoder_names)}
        names |= {name: f"{name}.tower" for name in self.divided} | {name: name for name in self.reads}
        order = sorted(names)
        return {names[first]: tuple(name for name in order if names[name] == names[first]) for first in order}

    @property
    def media_of_data(self) -> dict[str, tuple[str, ...]]:
        """Encoder (a divided one is whole) or decoder -> the names that its media have in a pack of a loader."""
        whole = {tower: projector.removesuffix(".projector") for projector, tower in self.reads.items()}
        others = {*self.reads, *self.teachers}
        return {whole.get(name, name): media for name, media in self.media_names.items() if name not in others}

    def minimal_input(self, name: str) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the smallest features for one of :attr:`media_names`, and the tokens of each item, if known."""
        if name not in self._minimal_inputs:
            if name.startswith(NATIVE_PREFIX):
                interface = self.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)]
                self._minimal_inputs[name] = interface.minimal_input(), ()
            elif name in self.reads:
                self._minimal_inputs[name] = self.encoders[name.removesuffix(".projector")].minimal_rows(), (1,)
            else:
                self._minimal_inputs[name] = self.get_submodule(name).minimal_input()
        features, num_tokens = self._minimal_inputs[name]
        there = {key: to_device(tensor, self.device) for key, tensor in features.items()}
        self._minimal_inputs[name] = there, num_tokens
        return there, num_tokens

    @property
    def native_inputs(self) -> NativeInputs:
        """How to prepare the media that the foundation reads by itself, for the data workers; often none."""
        return native_inputs(self.runner.native)

    def media_adapters(self) -> tuple[dict[str, ComponentAdapter], dict[str, ComponentAdapter]]:
        """Return ``(readers, writers)``: the adapters of encoders and of decoders, for :class:`OmniProcessor`."""
        readers = {n: encoder.adapter() for n, encoder in self.encoders.items() if n not in self.teachers}
        return readers, {name: decoder.adapter() for name, decoder in self.decoders.items()}

    def give_back_decoders(self) -> None:
        """Put the modules of decoders that are the foundation's own back into it, as transformers has them."""
        for name in [name for name, decoder in self.decoders.items() if getattr(decoder.config, "of_foundation", None)]:
            give_back(self.foundation, self.decoders[name])
            delattr(self, name)
            self.decoder_names.remove(name)

    def train(self, mode: bool = True) -> OmniModel:
        """Set the mode; frozen batch norms keep their running statistics (:func:`rest_frozen_statistics`)."""
        super().train(mode)
        rest_frozen_statistics(self)
        if "runner" in vars(self):
            rest_codecs(self.foundation, self.runner.native)
        return self

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Recompute the layers of all components in the backward, as ``gradient_checkpointing`` of HF ``Trainer`` asks.

        ``activation_checkpointing_kwargs``: of torch's ``checkpoint``; ``options``: ``every_n_layers`` and ``offload``
        of transformers. Raises UserError: ``use_reentrant`` is true, or the model is parallelized.
        """
        given = {"use_reentrant": False, "context_fn": recompute_contexts} | (activation_checkpointing_kwargs or {})
        if given["use_reentrant"]:
            raise UserError("use_reentrant: found true; expected false: packed samples need contexts in the recompute")
        if not self.takes_batches:
            raise UserError(
                "gradient checkpointing of a parallelized model: set enable_gradient_checkpointing=True of "
                "build_parallelize_model, or `memory.recompute` of a component's plan"
            )
        super().activation_checkpointing_enable(given, **options)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a batch may have ``num_items_in_batch``, the divisor of its loss; HF ``Trainer`` reads this."""
        return bool(getattr(self.foundation, "accepts_loss_kwargs", takes_any_argument(self.foundation)))

    def forward(
        self,
        pack: Pack | EncodedPack | None = None,
        stage: StageInput | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **batch: Any,
    ) -> OmniOutput | ModelOutput | tuple[torch.Tensor, ...]:
        """Compute the losses of one packed micro-batch: encode the media, run the foundation, run the heads.

        Instead of a pack, it takes a batch of transformers by keyword, for HF ``Trainer`` and scripts, and runs the
        foundation's own forward (:func:`forward_of_batch`).

        Args:
            pack: samples end to end; see :class:`Pack` for shapes. An :class:`EncodedPack` has this rank's part in the
                micro-batch, too, so that all ranks call every component equally often.
            stage: the input of a pipeline stage, which runs its part of these steps; None: the whole model.
            input_ids: ``[B, T]`` int64.
            attention_mask: ``[B, T]``, 0 for padding.
            position_ids: in the form that the foundation takes.
            labels: ``[B, T]`` int64, not shifted; -100: nothing is predicted.
            **batch: further arguments of the foundation: ``pixel_values``, ``num_items_in_batch``, ...

        Returns:
            For a pack, an :class:`OmniOutput` with a :class:`LossTerm` of ``text`` and of each head that has targets in
            it; for a stage that is not the last, the tensors for the next one (:func:`handed_on`); for a batch, the
            foundation's output: ``loss``, ``logits``, ... Raises UserError: the foundation cannot run this pack, hides
            hidden states that a decoder reads, or does not take an argument; both a pack and a batch, or neither.
        """
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        batch = {**named, "labels": labels, **batch}
        if pack is None:
            return forward_of_batch(self, batch)
        found: Any = pack
        if not isinstance(found, (Pack, EncodedPack)):
            kind = type(found).__name__
            raise UserError(
                f"forward: found a {kind}; expected a Pack, or a batch by keyword: input_ids=..., labels=..."
            )
        if given := sorted(name for name, value in batch.items() if value is not None):
            raise UserError(f"forward: found a pack and {', '.join(given)}; expected a pack or a batch, not both")
        encoded = self.encode_media(pack, stage)
        output = self.run_foundation(encoded, stage)
        if isinstance(output, FoundationOutput):
            return self.run_heads(encoded, output)
        assert stage is not None
        states = with_zero_gradients(output, encoded.idle)
        return handed_on(self, encoded, states, stage.span.stop)

    def encode_media(self, pack: Pack | EncodedPack, stage: StageInput | None = None) -> EncodedPack:
        """First step of :meth:`forward`: encode media that have no features yet; of a sharded model: only inside it.

        A stage that is not the first takes the features that arrived.
        """
        given = filled_up(self, pack)
        if stage is not None:
            require_no_words(self, given.pack)
        if stage is not None and not stage.span.is_first:
            return arrived_pack(self, given, stage)
        at_end = () if stage is None else self.teachers  # the last stage reads them
        encoded = encode(self, given, self.media_names.keys() - at_end)
        seed_foundation()
        return encoded

    def run_foundation(self, encoded: EncodedPack, stage: StageInput | None = None) -> FoundationOutput | torch.Tensor:
        """Second step of :meth:`forward`: run the foundation over text and media.

        ``encoded``: features that a stage does not read (:attr:`stage_contract`) may be any tensors of the same shapes.
        ``stage``: the part to run; None: the whole foundation. Returns its output; of a stage that is not the last,
        ``[1, t, hidden]`` for the next one. Raises UserError: the foundation cannot be cut there.
        """
        call = None if stage is None else self.stage_of(stage)
        with reading_on_host(self.device) if encoded.native else nullcontext():  # the model's own code reads positions
            if call is None or call.span.is_last:
                return self.runner.text_loss(encoded, call)
            return self.runner.stage_output(encoded, call)

    def stage_of(self, stage: StageInput) -> StageCall:
        """Return a stage's call for :meth:`FoundationRunner.run`; UserError: the foundation cannot be cut there."""
        for cut in (stage.span.start, stage.span.stop):
            self.stage_contract.require(type(self.foundation).__name__, cut)
        return StageCall(stage.span, self.stage_contract, *stage.arrived[:1])

    def run_heads(self, encoded: EncodedPack, output: FoundationOutput) -> OmniOutput:
        """Third step of :meth:`forward`: the losses of all heads over the foundation's hidden states."""
        pack, sequence_slice, hidden = encoded.pack, encoded.sequence_slice, output.hidden
        idle = list(encoded.idle)
        losses, read = {}, {"text": pack.text_rows[local_positions(sequence_slice, pack.text_rows)[0]]}
        apart: dict[str, StatesApart] = {}
        for name in sorted({*encoded.labels, *encoded.heads}):
            if hidden is None:
                foundation = type(self.foundation).__name__
                raise UserError(f"{foundation} hides its last hidden states; no decoder can read them")
            if name in encoded.apart:
                apart[name] = _states_apart(encoded, hidden, name)
                continue
            index, positions = _places_of_targets(encoded, name)
            if len(index):
                read[name] = pack.targets[name].predicted_from[index]
                labels = encoded.labels[name][to_device(index, hidden.device)]
                losses[name] = self.decoders[name].lm_head(hidden[0, to_device(positions, hidden.device)], labels)
            else:
                idle.append(idle_head(self.decoders[name], hidden))
        text = replace(output.text, sum=with_zero_gradients(output.text.sum, idle))
        losses = {"text": text} | dict(output.compared) | losses
        for name in output.compared:
            tokens = pack.inputs[name].positions
            read[name] = tokens[local_positions(sequence_slice, tokens)[0]]
        return OmniOutput(losses, read, None if hidden is None else hidden.detach(), apart)


def _places_of_targets(encoded: EncodedPack, name: str) -> tuple[Tensor, Tensor]:
    """Which tokens of a decoder this rank predicts, and from which of its hidden states: ``[m]`` int64 each."""
    return local_positions(encoded.sequence_slice, _predicted_from(encoded.pack, name))


def _predicted_from(pack: Pack, name: str) -> Tensor:
    """``[n]`` int64: of each token of a decoder the token from whose state it is predicted; none without targets."""
    return pack.targets[name].predicted_from if name in pack.targets else pack.text_rows[:0]


def _states_apart(encoded: EncodedPack, hidden: Tensor, name: str) -> StatesApart:
    """The hidden states from which other ranks predict the tokens of a decoder."""
    index, positions = _places_of_targets(encoded, name)
    predicted_from = _predicted_from(encoded.pack, name)
    whole = hidden.new_zeros(len(predicted_from), hidden.size(-1))
    states = whole.index_copy(0, to_device(index, hidden.device), hidden[0, to_device(positions, hidden.device)])
    return StatesApart(states, index, predicted_from[index])


def idle_head(decoder: Any, hidden: Tensor) -> Tensor:
    """Call a decoder's head without targets. ``hidden``: any ``[1, T, hidden]``; returns a scalar.

    It has a backward even where the decoder is frozen: ranks with targets gather its weights there.
    """
    states = hidden[0, :1].detach().requires_grad_()
    return decoder.lm_head(states, to_device(decoder.minimal_labels(), hidden.device)).sum


def with_zero_gradients(term: Tensor, idle: Iterable[Tensor]) -> Tensor:
    """Return ``term`` with a gradient of zero for all inputs of ``idle``."""
    zeros = [tensor.float().sum() * 0.0 for tensor in idle]
    return term + torch.stack(zeros).sum() if zeros else term


def _fresh(values: dict[str, Any], class_of: Callable[[PreTrainedConfig], type[PreTrainedModel]]) -> PreTrainedModel:
    config = as_config(values)
    for node in config_nodes(config):
        node.dtype = None  # the requested dtype applies to every sub-config; ignore the saved one
    return class_of(config)(config)


AutoModel.register(OmniConfig, OmniModel)
for _config, _model in (
    (VisionEncoderConfig, VisionEncoder),
    (AudioEncoderConfig, AudioEncoder),
    (TeacherConfig, Teacher),
    (TokenDecoderConfig, TokenDecoder),
    (FlowDecoderConfig, FlowDecoder),
    (InContextDecoderConfig, InContextDecoder),
):
    AutoModel.register(_config, _model)


def rest_frozen_statistics(model: nn.Module) -> None:
    """Put frozen BatchNorm layers into evaluation mode, so that a forward does not change their statistics."""
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.weight is not None and not module.weight.requires_grad:
            module.eval()
