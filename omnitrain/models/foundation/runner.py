"""Running an unmodified HF model by its contract: our rows in, our loss in its head, samples apart."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.data.sample import NATIVE_PREFIX
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.components.media_calls import Apart, MediaCall, media_calls
from omnitrain.models.components.outputs import FoundationOutput
from omnitrain.models.discovery import Discovery, MediaFeatures, check_rows, discover, override
from omnitrain.models.discovery.text_run import StopRunError, first_block
from omnitrain.models.foundation.in_forward import ForwardReader, require_length
from omnitrain.models.foundation.recurrent_segments import run_by_segment
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
from omnitrain.models.foundation.skipped_modules import call_what_is_left_out
from omnitrain.ops.attention import MaskSpec, PackedRow, RowPart, inside, use_omnitrain_attention
from omnitrain.ops.cpu.unread_rows import ReadRows, reading, skip_unread_rows
from omnitrain.ops.device import to_device
from omnitrain.ops.loss.cross_entropy import LossTerm, cross_entropy_rows, linear_cross_entropy
from omnitrain.ops.patch_forward import own_forward

Head = Callable[[Tensor, nn.Module], Tensor]


@dataclass(frozen=True)
class InsertedEmbeddings:
    """Rows that take the place of token embeddings.

    Attributes:
        positions: ``[n]`` int64 into the flattened batch ``[B * T]``; on the host.
        rows: ``[n, hidden]``.
    """

    positions: Tensor
    rows: Tensor


@dataclass(frozen=True)
class EncodedMedia:
    """All media of a pack, encoded.

    Attributes:
        native: modality -> rows for the foundation's own placeholders, in the order of these.
        inserted: rows of attached components.
    """

    native: dict[str, MediaFeatures] = field(default_factory=dict)
    inserted: list[InsertedEmbeddings] = field(default_factory=list)


class FoundationRunner:
    """Runs a HF causal language model, multimodal or not, as its contract says.

    Attributes:
        model: the HF model, unmodified.
        contract: what the check found out about it.
        native: the modalities that it reads by itself.
        in_forward: those of which only its own forward makes rows.
        own_attention: classes of models in it that do not ask for the registered attention.
        loss_backend: of :func:`linear_cross_entropy`.
    """

    def __init__(self, model: PreTrainedModel, contract: Contract, *, native: Discovery | None = None) -> None:
        """Attach to ``model``.

        Args:
            model: the HF model; its attention, and the classes that the contract names, are replaced.
            contract: by which it is run.
            native: what :func:`discover` found in it, where that is known.
        """
        self.model = model
        self.contract = contract
        self.native: Discovery = native or discover(model)  # with the model's own attention still
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._parameters = frozenset(parameters)
        self.loss_backend = "auto"  # of linear_cross_entropy
        self.in_forward = ForwardReader(model, self.native.in_forward, contract.beyond_text)
        self.own_attention: tuple[str, ...] = ()
        if self.contract.attention == "omnitrain":
            self.own_attention = use_omnitrain_attention(model)
        run_by_segment(model, self.contract.segmented)
        call_what_is_left_out(model, [kind for kind in self.contract.skipped_modules if not kind.problem])

    def skip_unread_rows(self) -> Counter[str]:
        """From now on, what the contract calls row-local computes only rows that a loss reads.

        Returns:
            Class name -> number of such modules.
        """
        return skip_unread_rows(self.model, self.contract.row_local)

    def encode(self, pack: Pack) -> dict[str, MediaFeatures]:
        """Rows of all media of a pack that the model reads by itself, made by its own feature methods.

        Returns:
            Modality -> rows in the order of their placeholders. Modalities with one placeholder are one.

        Raises:
            UserError: the model has no such modality, or makes another number of rows than there are placeholders.
        """
        batches = {name: batch for name, batch in pack.inputs.items() if name.startswith(NATIVE_PREFIX)}
        calls = {name: self.calls(pack, name) for name in batches}
        rows = {
            name: MediaFeatures.cat([self.encode_call(name, call) for call in made]) for name, made in calls.items()
        }
        return self.joined(rows, {name: batch.positions for name, batch in batches.items()})

    def calls(self, pack: Pack, name: str) -> list[MediaCall]:
        """The calls that the items of a modality (``foundation.image``, ...) in a pack ask for; often one, or none."""
        if name not in pack.inputs:
            return []
        return list(media_calls(pack.inputs[name], pack.info.ids, apart=self.apart.get(name)))

    @property
    def apart(self) -> dict[str, Apart]:
        """Modalities (``foundation.image``, ...) whose calls may not have two samples or two items; often none."""
        samples: dict[str, Apart] = {NATIVE_PREFIX + modality: "samples" for modality in self.contract.by_sample}
        return samples | {NATIVE_PREFIX + m: "items" for m, port in self.native.ports.items() if not port.items_stack}

    def encode_call(self, name: str, call: MediaCall) -> MediaFeatures:
        """Rows of one call of a modality (``foundation.image``, ...), in the order of its items; see :meth:`encode`."""
        modality = name.removeprefix(NATIVE_PREFIX)
        port = self.native.ports.get(modality)
        if port is None:
            reason = self.native.refused.get(modality, f"it reads {sorted(self.native.ports) or 'only text'}")
            raise UserError(f"{type(self.model).__name__} has no {modality} input that can be trained: {reason}")
        rows = port.encode(self.model, call.items.features)
        if len(rows.counts) == len(call.samples):
            check_rows(modality, call.items.num_tokens, rows.counts, call.samples)
        else:  # the tower does not say which rows are whose
            check_rows(modality, [sum(call.items.num_tokens)], [rows.main.size(0)], [", ".join(call.samples)])
        return rows

    def joined(self, rows: Mapping[str, MediaFeatures], positions: Mapping[str, Tensor]) -> dict[str, MediaFeatures]:
        """Rows by name, put together as :meth:`encode` returns them. ``positions``: the tokens that they fill."""
        by_token: dict[int, list[str]] = {}
        for name in rows:
            by_token.setdefault(self.native.ports[name.removeprefix(NATIVE_PREFIX)].token_id, []).append(name)
        native = {}
        for names in by_token.values():
            together = _end_to_end([rows[name] for name in names])
            order = torch.cat([positions[name] for name in names]).argsort()
            native[names[0].removeprefix(NATIVE_PREFIX)] = together.at(order)
        return native

    def one_batch(self, encoded: Sequence[Mapping[str, MediaFeatures]]) -> dict[str, MediaFeatures]:
        """What :meth:`encode` made of several packs, for one batch that has a row for each of them.

        Prompts may differ in modality and still share a placeholder, so rows are joined by that.
        """
        by_token: dict[int, list[tuple[str, MediaFeatures]]] = {}
        for modality, rows in (item for media in encoded for item in media.items()):
            by_token.setdefault(self.native.ports[modality].token_id, []).append((modality, rows))
        return {entries[0][0]: _end_to_end([rows for _, rows in entries]) for entries in by_token.values()}

    def text_loss(self, pack: Pack, media: EncodedMedia | None = None, part: RowPart | None = None) -> FoundationOutput:
        """The language-model loss of a pack and the last hidden states.

        After :meth:`skip_unread_rows`, the hidden states of tokens that no head of this pack reads are not the model's.

        Args:
            pack: the micro-batch.
            media: encoded, those for the tokens of ``part``.
            part: the tokens to run the model over; losses and hidden states are of these. None: all of them.

        Raises:
            UserError: several samples in a pack of a model that cannot keep them apart.
        """
        if not self.contract.packs and len(pack.info.lengths) > 1:
            raise UserError(
                f"{type(self.model).__name__} cannot run several samples in one row: {self.contract.why_unpacked}"
            )
        if part is not None:
            self.in_forward.require_whole_row(pack)
        run = self._loss_in_head if self.contract.head == "inside" else self._loss_on_logits
        own = pack if part is None else cut_pack(pack, part)
        row = self.row_of(pack, part)
        read = to_device(local_positions(part, pack.read_rows)[1], own.input_ids.device)
        with reading(None if pack.forward_inputs else ReadRows(read, own.num_tokens)):
            term, hidden = run(own, media or EncodedMedia(), row)
        return FoundationOutput(replace(term, sum=self.in_forward.with_zero_gradients(term.sum)), hidden)

    def _loss_in_head(self, pack: Pack, media: EncodedMedia, row: PackedRow | None) -> tuple[LossTerm, Tensor]:
        """Logits of the supervised rows only, chunk by chunk."""
        made: list[tuple[LossTerm, Tensor]] = []

        def head(hidden: Tensor, lm_head: Any) -> Tensor:
            require_length(pack, hidden)
            term = linear_cross_entropy(
                hidden[0, to_device(pack.text_rows, hidden.device)],
                lm_head.weight,
                pack.text_labels,
                getattr(lm_head, "bias", None),
                count=pack.text_labels.numel(),
                backend=self.loss_backend,
            )
            made.append((term, hidden))
            return hidden  # as logits; of all outputs, its gradient is the first to come, with media or without

        self.run_pack(pack, media, head, row)
        (result,) = made
        return result

    def _loss_on_logits(self, pack: Pack, media: EncodedMedia, row: PackedRow | None) -> tuple[LossTerm, Tensor | None]:
        """What the model makes of the supervised rows' logits; of all logits where it does not call its head."""
        states: list[Tensor] = []
        text_rows = to_device(pack.text_rows, pack.input_ids.device)

        def head(hidden: Tensor, lm_head: Any) -> Tensor:
            require_length(pack, hidden)
            states.append(hidden)
            logits: Tensor = lm_head.forward(hidden[:, text_rows])
            return logits

        logits = self.run_pack(pack, media, head, row).logits[0]
        supervised = logits if states else logits[text_rows]
        term = cross_entropy_rows(supervised, pack.text_labels, count=pack.text_labels.numel())
        return term, states[0] if states else None

    def row_of(self, pack: Pack, part: RowPart | None) -> PackedRow | None:
        """Where samples share a row, or ranks; from the host's side, so that no device is waited for."""
        if part is None and (pack.forward_inputs or not self.contract.packs):
            return None
        borders = (0, *accumulate(pack.info.lengths))
        return PackedRow(borders, part, None if part is None else cache(partial(self._whole_masks, pack, borders)))

    @torch.no_grad()
    def _whole_masks(self, pack: Pack, borders: tuple[int, ...]) -> list[MaskSpec]:
        """The masks that the model asks for over a whole pack: of a forward that ends at its first block.

        Its embeddings are zeros that take no memory, and no collective runs: hooks of the model itself are left out.
        """
        embedding: Any = self.model.get_input_embeddings()
        nothing = pack.input_ids.new_zeros(1, 1, 1, dtype=embedding.weight.dtype)
        row = PackedRow(borders)
        arguments = self._taken(_of_pack(pack), row, pack.input_ids.device)
        with (
            first_block(self.model).register_forward_pre_hook(_stop, prepend=True),
            _forward_replaced(embedding, lambda ids: nothing.expand(*ids.shape, embedding.weight.size(1))),
            inside(row),
            suppress(StopRunError),
        ):
            self.model.forward(input_ids=pack.input_ids, **arguments)
        return row.masks

    def run_pack(self, pack: Pack, media: EncodedMedia, head: Head, row: PackedRow | None = None) -> Any:
        """One forward over a pack, or over a part of one; see :meth:`run`."""
        return self.run(pack.input_ids, head=head, media=media, arguments=_of_pack(pack), row=row)

    def run(
        self,
        input_ids: Tensor,
        *,
        head: Head,
        media: EncodedMedia,
        arguments: Mapping[str, Any],
        row: PackedRow | None = None,
    ) -> Any:
        """One forward of the HF model with ``head(hidden, lm_head)`` in place of its language-model head.

        The replacement runs inside the model's forward: no logits of all rows are made, and the head's weight is where
        a sharding of the model puts it.

        Args:
            input_ids: ``[B, T]``; arbitrary under inserted rows.
            head: gets the hidden states ``[B, T, hidden]`` and the head; what it returns is the head's output.
            media: encoded media.
            arguments: further ones of the model's forward; those that it does not take are left out.
            row: the samples in a packed row, and what of it ``input_ids`` are; None: every row of the batch is one
                sample.

        Returns:
            The model's own output.
        """
        taken = self._taken(arguments, row, input_ids.device)
        lm_head: Any = self.model.get_output_embeddings()
        with ExitStack() as stack:
            stack.enter_context(_forward_replaced(lm_head, lambda hidden: head(hidden, lm_head)))
            if media.inserted:
                embedding: Any = self.model.get_input_embeddings()
                stack.enter_context(_forward_replaced(embedding, _inserting(embedding, input_ids, media.inserted)))
            if media.native:
                taken |= stack.enter_context(override(self.model, self.native.ports, media.native))
            if row is not None:
                stack.enter_context(inside(row))
            return self.model(input_ids=input_ids, **taken)

    def _taken(self, arguments: Mapping[str, Any], row: PackedRow | None, device: torch.device) -> dict[str, Any]:
        """Those that the model's forward takes, with the borders of a packed row."""
        given = dict(arguments)
        if row is not None:
            cu_seqlens = torch.tensor(row.borders, dtype=torch.int32).to(device, non_blocking=True)
            longest = max(stop - start for start, stop in pairwise(row.borders))
            given |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            given |= {"max_length_q": longest, "max_length_k": longest}
        return {name: value for name, value in given.items() if self._takes_any or name in self._parameters}


def _of_pack(pack: Pack) -> dict[str, Any]:
    if pack.forward_inputs:
        return {"use_cache": False, **pack.forward_inputs, **pack.token_inputs}
    return {"position_ids": pack.position_ids, "use_cache": False, **pack.token_inputs}


def _stop(*_: Any) -> None:
    raise StopRunError


def _end_to_end(parts: Sequence[MediaFeatures]) -> MediaFeatures:
    """Rows for one placeholder, in the layout of the first part."""
    return MediaFeatures.cat([replace(rows, layout=parts[0].layout) for rows in parts])


def _inserting(embedding: Any, input_ids: Tensor, inserted: Sequence[InsertedEmbeddings]) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        embeds: Tensor = embedding.forward(ids)
        if ids.shape != input_ids.shape:  # a token looked up on its own, such as a placeholder
            return embeds
        length = ids.size(1)
        for part in inserted:  # the result is no view: a compiled first block would differ from the others by that
            where = (to_device(part.positions // length, ids.device), to_device(part.positions % length, ids.device))
            embeds = embeds.index_put(where, part.rows.to(embeds.dtype))
        return embeds

    return forward


@contextmanager
def _forward_replaced(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, the module's forward is another one, inside of which it is what it was."""
    own = vars(module).get("forward")

    def replaced(value: Tensor) -> Tensor:
        with own_forward(module, own):
            return forward(value)

    with own_forward(module, replaced):
        yield
