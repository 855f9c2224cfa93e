"""Run an unmodified HF model by its contract: insert features, compute the loss in its head, keep samples apart."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.components.outputs import Apart, FoundationOutput, media_calls
from omnitrain.models.discovery import Discovery, MediaFeatures, check_rows, discover, override, rest_codecs
from omnitrain.models.discovery.text_run import StopRunError, first_block, text_blocks
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.in_forward import ForwardReader, require_length
from omnitrain.models.foundation.recurrent_segments import run_by_segment
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
from omnitrain.models.foundation.skipped_modules import call_skipped_modules
from omnitrain.models.foundation.stage import StageCall, StagedBlocks
from omnitrain.models.foundation.zeros_in_step import GivesZeros
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.attention.packed_context import PackedSequence, SequenceSlice, inside, seeing_blocks
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.ops.cpu.unread_rows import ReadRows, reading, skip_unread_rows
from omnitrain.ops.host_values import to_device
from omnitrain.ops.loss.cross_entropy import cross_entropy_rows, linear_cross_entropy
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.ops.loss.token_functions import TokenFunction
from omnitrain.ops.patch_forward import wrapped_forward

Head = Callable[[Tensor, nn.Module], Tensor]


class FoundationRunner:
    """Runs an HF causal language model, multimodal or not, by its contract."""

    def __init__(self, model: PreTrainedModel, contract: Contract, *, native: Discovery | None = None) -> None:
        """Replace the attention of ``model`` and the forwards that the contract names; ``native``: None: discovered."""
        self.model, self.contract = model, contract
        self.native: Discovery = native or discover(model)  # before we replace the model's attention
        rest_codecs(model, self.native)
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._parameters = frozenset(parameters)
        self.loss_backend = "auto"  # of linear_cross_entropy
        self.loss_function: TokenFunction | None = None  # of the text; None: cross entropy
        self.token_metrics: Mapping[str, TokenFunction] = {}  # of the predicted text tokens
        self.compared: Mapping[str, Any] = {}  # teacher (``Teacher``) by name, whose divergence is a loss of the text
        self._writes_words = any(interface.are_words for interface in self.native.interfaces.values())
        self.in_forward = ForwardReader(model, self.native.in_forward, contract.beyond_text)
        self.own_attention: tuple[str, ...] = ()  # classes of models that do not use the registered attention
        if self.contract.attention == "omnitrain":
            self.own_attention = use_omnitrain_attention(model)
        run_by_segment(model, self.contract.segmented)
        found = [skipped for skipped in self.contract.skipped_modules if not skipped.problem]
        self.give_zeros: list[GivesZeros] = list(call_skipped_modules(model, found))  # often nothing does
        if self.in_forward.modalities:
            self.give_zeros.append(self.in_forward)

    @cached_property
    def blocks(self) -> StagedBlocks:
        """The layers of the text decoder: finding them visits all modules."""
        return StagedBlocks(text_blocks(self.model))

    @property
    def why_causal(self) -> str:
        """Why no token can see a later one, whatever the masks are; empty: it can."""
        if self.contract.attention != "omnitrain":
            return "it has attention code of its own"
        is_recurrent = self.contract.segmented or not self.has_keys_alone
        return "it has recurrent layers" if is_recurrent else ""

    @property
    def has_keys_alone(self) -> bool:
        """Whether its layers keep keys and values, and no other state."""
        layers = DynamicCache(config=self.model.config).layers
        return {*map(type, layers)} <= {DynamicLayer, DynamicSlidingWindowLayer}

    def skip_unread_rows(self) -> Counter[str]:
        """Let tokenwise modules compute only tokens that a loss reads; return class name -> number of these modules."""
        return skip_unread_rows(self.model, self.contract.tokenwise)

    def encode(self, pack: Pack) -> dict[str, MediaFeatures]:
        """Return modality -> features of a pack's media that the model reads by itself; see :meth:`encode_call`."""
        batches = {name: batch for name, batch in pack.inputs.items() if name.startswith(NATIVE_PREFIX)}
        features = {
            name: MediaFeatures.cat([self.encode_call(name, call) for call in self.calls(pack, name)])
            for name in batches
        }
        return self.joined(features, {name: batch.positions for name, batch in batches.items()})

    def calls(self, pack: Pack, name: str, most_elements: int | None = None) -> list[MediaGroup]:
        """Return the items of each call for a modality (``foundation.image``, ...); see :func:`media_calls`."""
        if name not in pack.inputs:
            return []
        return list(media_calls(pack.inputs[name], apart=self.apart.get(name), most_elements=most_elements))

    @property
    def apart(self) -> dict[str, Apart]:
        """Modalities (``foundation.image``, ...) -> whether a call takes one sample or one item; often empty."""
        apart: dict[str, Apart] = {NATIVE_PREFIX + modality: "samples" for modality in self.contract.by_sample}
        for modality, interface in self.native.interfaces.items():
            if not interface.items_stack:
                apart[NATIVE_PREFIX + modality] = "items"
        return apart

    def encode_call(self, name: str, items: MediaGroup) -> MediaFeatures:
        """Run a modality's call; UserError: it is unread, or features and placeholders differ."""
        modality = name.removeprefix(NATIVE_PREFIX)
        interface = self.native.interfaces.get(modality)
        if interface is None:
            reason = self.native.refused.get(modality, f"it reads {sorted(self.native.interfaces) or 'only text'}")
            raise UserError(f"{type(self.model).__name__} cannot be trained with {modality} inputs: {reason}")
        features = interface.encode(self.model, items.features)
        if len(features.counts) == len(items.samples):
            check_rows(modality, items.num_tokens, features.counts, items.samples)
        else:  # the output has no pieces per item, so only the sum can be checked
            check_rows(modality, [sum(items.num_tokens)], [features.main.size(0)], [", ".join(items.samples)])
        return features

    def joined(
        self, features: Mapping[str, MediaFeatures], positions: Mapping[str, Tensor]
    ) -> dict[str, MediaFeatures]:
        """Join features of calls as :meth:`encode`; ``positions``: modality -> ``[n]`` int64, the replaced tokens."""
        native = {}
        for group in self._by_placeholder(features.items()):
            order = torch.cat([positions[name] for name, _ in group]).argsort()
            native[group[0][0].removeprefix(NATIVE_PREFIX)] = _end_to_end(group).at(order)
        return native

    def one_batch(self, encoded: Sequence[Mapping[str, MediaFeatures]]) -> dict[str, MediaFeatures]:
        """Join results of :meth:`encode` for a batch with one row per pack, by placeholder: modalities may share it."""
        groups = self._by_placeholder(item for media in encoded for item in media.items())
        return {group[0][0]: _end_to_end(group) for group in groups}

    def _by_placeholder(
        self, features: Iterable[tuple[str, MediaFeatures]]
    ) -> Iterable[list[tuple[str, MediaFeatures]]]:
        groups: dict[int, list[tuple[str, MediaFeatures]]] = {}
        for name, each in features:
            groups.setdefault(self.native.interfaces[name.removeprefix(NATIVE_PREFIX)].token_id, []).append(
                (name, each)
            )
        return groups.values()

    def text_loss(self, encoded: EncodedPack, stage: StageCall | None = None) -> FoundationOutput:
        """Compute the language-model loss of a pack and the last hidden states; not of tokens that no loss reads.

        ``encoded``: with features for the tokens of its slice. ``stage``: the last one of a pipeline. Raises UserError:
        the model cannot keep several samples apart, or the foundation's own forward reads a sample that ranks share or
        a stage gets.
        """
        with self._local(encoded, stage) as (local, packed):
            output = self._loss(local, lambda head: self.run_pack(local, head, packed, stage))
        text = replace(output.text, sum=self.in_forward.with_zero_gradients(output.text.sum))
        return output._replace(text=text)

    def stage_output(self, encoded: EncodedPack, stage: StageCall) -> Tensor:
        """Run a stage that is not the last, as :meth:`text_loss`; return the states ``[1, t, hidden]`` for the next."""
        with self._local(encoded, stage) as (local, packed):
            hidden: Tensor = self.run_pack(local, _unreached, packed, stage)
        return self.in_forward.with_zero_gradients(hidden)

    @contextmanager
    def _local(
        self, encoded: EncodedPack, stage: StageCall | None
    ) -> Iterator[tuple[EncodedPack, PackedSequence | None]]:
        """Context of a forward over a pack: its tokens on this rank, and the sequence that samples or ranks share."""
        pack, sequence_slice = encoded.pack, encoded.sequence_slice
        if not self.contract.packs and len(pack.info.lengths) > 1:
            raise UserError(
                f"{type(self.model).__name__} cannot run several samples in one pack: {self.contract.why_unpacked}"
            )
        if sequence_slice is not None:
            self.in_forward.require_whole_sequence(pack)
        if stage is not None:
            self.in_forward.require_whole_model(pack)
        local = pack if sequence_slice is None else cut_pack(pack, sequence_slice)
        read = to_device(local_positions(sequence_slice, pack.read_rows)[1], local.input_ids.device)
        read_rows = None if pack.forward_inputs else ReadRows(read, local.num_tokens)
        with reading(read_rows), seeing_blocks(pack.block_ids):
            yield replace(encoded, pack=local), self.packed_sequence_of(pack, sequence_slice)

    def _loss(self, encoded: EncodedPack, run: Callable[[Head], Any]) -> FoundationOutput:
        """The loss, inside the head chunk by chunk, or on logits of supervised tokens; and the hidden states."""
        pack, taught = encoded.pack, encoded.teachers
        states: list[Tensor] = []
        terms: list[LossTerm] = []
        compared: dict[str, LossTerm] = {}
        untouched: list[Tensor] = []  # logits, before the forward writes over them
        text_rows, labels = to_device(pack.text_rows, pack.input_ids.device), pack.text_labels
        of_all = {name: given for name, (_, given) in taught.items() if len(given) == len(labels)}
        how: dict[str, Any] = {"function": self.loss_function, "metrics": self.token_metrics, "teachers": of_all}

        def head(hidden: Tensor, lm_head: Any) -> Tensor:
            require_length(pack, hidden)
            states.append(hidden)
            if self.contract.head != "inside":
                logits: Tensor = lm_head.forward(hidden[:, text_rows])
                untouched.extend([logits[0].clone()] * self._writes_words)
                return logits
            weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
            options = how | {"count": labels.numel(), "backend": self.loss_backend}
            rows = hidden[0, text_rows]
            terms.append(linear_cross_entropy(rows, weight, labels, bias, **options))
            for name in self.compared:  # in one order on all ranks, which sum over shared classes
                if name not in taught:
                    continue
                tokens, given = taught[name]
                own = rows if name in of_all else hidden[0, to_device(tokens, hidden.device)]
                compared[name] = self.compared[name].divergence(given, own, weight, bias)
            return hidden  # in place of logits; its gradient is always the first to arrive, with media or without

        output = run(head)
        if self.contract.head == "inside":
            (term,), (hidden,) = terms, states
            return FoundationOutput(term, hidden, compared)
        logits = output.logits[0] if states else output.logits[0][text_rows]  # all logits: the head was not called
        if untouched:
            logits = _unmasked(logits, untouched[0], labels)
        term = cross_entropy_rows(logits, labels, count=labels.numel(), **how)
        return FoundationOutput(term, states[0] if states else None)

    def packed_sequence_of(self, pack: Pack, sequence_slice: SequenceSlice | None) -> PackedSequence | None:
        """Describe a sequence that samples or ranks share; None for others. Uses only host values."""
        if sequence_slice is None and (pack.forward_inputs or not self.contract.packs):
            return None
        return self.sequence(pack.info.lengths, pack.input_ids, _of_pack(pack), sequence_slice)

    def sequence(
        self,
        lengths: Sequence[int],
        input_ids: Tensor,
        arguments: Mapping[str, Any],
        sequence_slice: SequenceSlice | None,
    ) -> PackedSequence:
        """Describe samples of these lengths, end to end; ``input_ids`` ``[1, T]`` and ``arguments`` are of all tokens.

        ``sequence_slice``: those of this rank; None: all.
        """
        offsets = (0, *accumulate(lengths))
        masks = None if sequence_slice is None else cache(partial(self._whole_masks, input_ids, arguments, offsets))
        return PackedSequence(offsets, sequence_slice, masks)

    @torch.no_grad()
    def _whole_masks(self, input_ids: Tensor, arguments: Mapping[str, Any], offsets: tuple[int, ...]) -> list[MaskSpec]:
        """The masks over a whole sequence, by a forward that stops at the first block, without hooks or collectives."""
        embedding: Any = self.model.get_input_embeddings()
        zero = input_ids.new_zeros(1, 1, 1, dtype=embedding.weight.dtype)
        packed = PackedSequence(offsets)
        accepted = self._accepted(arguments, packed, input_ids.device)
        with (
            first_block(self.model).register_forward_pre_hook(_stop, prepend=True),
            wrapped_forward(embedding, lambda ids: zero.expand(*ids.shape, embedding.weight.size(1))),
            inside(packed),
            suppress(StopRunError),
        ):
            self.model.forward(input_ids=input_ids, **accepted)
        return packed.masks

    def run_pack(
        self,
        encoded: EncodedPack,
        head: Head,
        packed: PackedSequence | None = None,
        stage: StageCall | None = None,
    ) -> Any:
        """Run one forward over a pack, or over a slice of it; see :meth:`run`."""
        pack = encoded.pack
        return self.run(
            with_words(pack.input_ids, encoded.words),
            head=head,
            native=encoded.native,
            inserted=encoded.inserted,
            arguments=_of_pack(pack),
            packed=packed,
            stage=stage,
        )

    def run(
        self,
        input_ids: Tensor,
        *,
        head: Head,
        arguments: Mapping[str, Any],
        native: Mapping[str, MediaFeatures] = MappingProxyType({}),
        inserted: Sequence[tuple[Tensor, Tensor]] = (),
        packed: PackedSequence | None = None,
        stage: StageCall | None = None,
    ) -> Any:
        """Run one forward of the HF model with ``head(hidden, lm_head)`` instead of its language-model head.

        ``head`` runs inside the forward, where FSDP has gathered its weight, on ``[B, T, hidden]``. ``input_ids``:
        ``[B, T]``; arbitrary at inserted features. ``arguments`` that the forward does not accept are ignored.
        ``native``, ``inserted``: features, as of :class:`EncodedPack`.
        ``packed``: the sequence that ``input_ids`` has, or has a slice of; None: each row is one sample. ``stage``:
        None: the whole model. Returns the model's output; of a stage that is not the last, the hidden states for the
        next one.
        """
        accepted = self._accepted(arguments, packed, input_ids.device)
        lm_head: Any = self.model.get_output_embeddings()
        with ExitStack() as stack:
            stack.enter_context(wrapped_forward(lm_head, lambda hidden: head(hidden, lm_head)))
            if stage is not None:
                native, inserted = stage.media(native), inserted if stage.embeds else []
                stack.enter_context(stage.inside(self.model, self.blocks))
            if inserted:
                embedding: Any = self.model.get_input_embeddings()
                stack.enter_context(wrapped_forward(embedding, _inserting(embedding, input_ids, inserted)))
            if native:
                accepted |= stack.enter_context(override(self.model, self.native.interfaces, native))
            if packed is not None:
                stack.enter_context(inside(packed))
            return self.model(input_ids=input_ids, **accepted)

    def _accepted(
        self, arguments: Mapping[str, Any], packed: PackedSequence | None, device: torch.device
    ) -> dict[str, Any]:
        """The arguments that the model's forward accepts, including ``cu_seqlens`` of a packed sequence."""
        values = dict(arguments)
        if packed is not None:
            cu_seqlens = torch.tensor(packed.offsets, dtype=torch.int32).to(device, non_blocking=True)
            longest = max(stop - start for start, stop in pairwise(packed.offsets))
            values |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            values |= {"max_length_q": longest, "max_length_k": longest}
        return {name: value for name, value in values.items() if self._takes_any or name in self._parameters}


def with_words(input_ids: Tensor, words: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ids ``[B, T]`` with words (:attr:`EncodedPack.words`) in the place of placeholders."""
    for positions, ids in words:
        flat = input_ids.flatten().index_copy(0, to_device(positions, input_ids.device), ids)
        input_ids = flat.view_as(input_ids)
    return input_ids


def _of_pack(pack: Pack) -> dict[str, Any]:
    if pack.forward_inputs:
        return {"use_cache": False, **pack.forward_inputs, **pack.token_inputs}
    return {"position_ids": pack.position_ids, "use_cache": False, **pack.token_inputs}


def _unmasked(logits: Tensor, untouched: Tensor, labels: Tensor) -> Tensor:
    """Logits ``[n, classes]``; in rows whose label the forward forbids (a code of media), no token is forbidden."""
    forbidden = logits == torch.finfo(logits.dtype).min
    rows = forbidden.gather(1, labels[:, None])
    return torch.where(forbidden & rows, untouched, logits)


def _stop(*_: Any) -> Any:
    raise StopRunError


def _unreached(*_: Any) -> Any:
    raise AssertionError("a stage that is not the last must not reach the head")


def _end_to_end(group: Sequence[tuple[str, MediaFeatures]]) -> MediaFeatures:
    """Concatenate the features for one placeholder, in the layout of the first."""
    return MediaFeatures.cat([replace(features, layout=group[0][1].layout) for _, features in group])


def _inserting(
    embedding: Any, input_ids: Tensor, inserted: Sequence[tuple[Tensor, Tensor]]
) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        embeds: Tensor = embedding.forward(ids)
        if ids.shape != input_ids.shape:  # the model looks up a single token, such as a placeholder
            return embeds
        length = ids.size(1)
        for positions, features in inserted:  # no view, or torch.compile would compile the first block separately
            where = (to_device(positions // length, ids.device), to_device(positions % length, ids.device))
            embeds = embeds.index_put(where, features.to(embeds.dtype))
        return embeds

    return forward
