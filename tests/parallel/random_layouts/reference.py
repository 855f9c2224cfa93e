"""What plain transformers computes for a row, sample by sample in one process, with the optimizers written out."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig
from transformers.modeling_utils import local_torch_dtype

from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rounding import nudge
from tests.parallel.random_layouts.models import Example, bare, build_as_planned, foundation_of, is_family, parts_of
from tests.parallel.random_layouts.rows import TRAINED, Row
from tests.parallel.sections.test_teachers import distilled

RATE, MOMENTUM, BETAS, DECAY, EPS = 0.02, 0.9, (0.9, 0.95), 0.1, 1e-3
MAX_NORM = 0.05
LOSS_WEIGHTS = {"text": 0.7}


@dataclass
class Outcome:
    """What a run of a row gave.

    Attributes:
        losses: of each step.
        norms: of the gradients of each step, before they are clipped.
        gradients: parameter -> its gradient in the first step; nothing without one.
        moved: parameter -> its weight after the last step less that before the first.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)


class PlainFamily(nn.Module):
    """A model of transformers."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.foundation = foundation_of(row).train()

    def forward(self, example: Example) -> dict[str, Tensor]:
        """Return the sum of each loss."""
        media = {name: _like(self.foundation.dtype, tensor) for name, tensor in example.arguments.items()}
        return {"text": _cross_entropy(self.foundation(**media, use_cache=False).logits[0], example)}


class PlainParts(nn.Module):
    """Towers, media tokenizers and a language model of transformers, and what omnitrain puts between them."""

    def __init__(self, row: Row, model: OmniModel) -> None:
        super().__init__()
        parts = parts_of(row)
        self.foundation = _fresh(parts["foundation"])
        self.big = _fresh(parts["teachers"]["big"]) if "teachers" in parts else None
        for name in parts["encoders"]:
            self.add_module(name, PlainEncoder(model.encoders[name]))
        for name in parts["decoders"]:
            self.add_module(name, PlainDecoder(model.decoders[name]))
        weights = {name.replace("big.model.", "big."): value for name, value in model.state_dict().items()}
        if self.big is not None:  # a model's state leaves its teachers out
            weights |= {f"big.{name}": value for name, value in model.get_submodule("big").model.state_dict().items()}
        self.load_state_dict(weights)

    def forward(self, example: Example) -> dict[str, Tensor]:
        """Return the sum of each loss."""
        sample = example.sample
        ids = torch.from_numpy(sample.input_ids)
        embeds = self.foundation.get_input_embeddings()(ids)
        targets = list[tuple[str, Tensor, Tensor]]()
        for span in sample.spans:
            part, positions = self.get_submodule(span.component), torch.from_numpy(span.positions)
            rows = part({name: torch.from_numpy(array) for name, array in span.item.features.items()})
            if span.is_target:
                labels, rows = rows
                targets.append((span.component, labels, positions))
            embeds = embeds.index_copy(0, positions, rows)
        output = self.foundation(inputs_embeds=embeds[None], use_cache=False, output_hidden_states=True)
        hidden, logits = output.hidden_states[-1][0], output.logits[0]
        losses: Counter[str] = Counter()
        losses["text"] = self._taught(example, logits) if self.big is not None else _cross_entropy(logits, example)
        for name, labels, positions in targets:
            codes = self.get_submodule(name).head(hidden[positions - 1])
            losses[name] += F.cross_entropy(codes.float(), labels, reduction="sum")
        return losses

    def _taught(self, example: Example, logits: Tensor) -> Tensor:
        ids = torch.from_numpy(example.sample.input_ids)
        rows = torch.from_numpy(example.sample.loss_mask)[1:].nonzero()[:, 0]
        with torch.no_grad():
            teacher = self.big.eval().model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return distilled(logits[rows].float(), ids[rows + 1], teacher[rows].float()).sum()


class PlainEncoder(nn.Module):
    """A tower and a projector that joins 2 x 2 patches, or two frames of sound."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.tower = type(encoder.tower)(AutoConfig.for_model(**encoder.config.tower)).train()
        self.projector, self.factor = copy.deepcopy(encoder.projector), encoder.projector.factor
        self.time_projector = copy.deepcopy(getattr(encoder, "time_projector", None))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of an item."""
        if self.time_projector is None:
            return self._sound(features["input_features"], features["num_rows"])
        frames = zip(features["pixel_values"], features["frame_index"].tolist(), strict=True)
        return torch.cat([self._frame(pixels) + self._time(index) for pixels, index in frames])

    def _sound(self, chunks: Tensor, num_rows: Tensor) -> Tensor:
        frames = self.tower(_like(self.tower.dtype, chunks)).last_hidden_state
        frames = F.pad(frames, (0, 0, 0, -frames.size(1) % self.factor))
        joined = frames.reshape(frames.size(0), -1, self.factor * frames.size(2))
        kept = [chunk[:rows] for chunk, rows in zip(joined, num_rows.tolist(), strict=True)]
        return self.projector.layers(torch.cat(kept))

    def _frame(self, pixels: Tensor) -> Tensor:
        patches = self.tower(pixel_values=_like(self.tower.dtype, pixels)[None]).last_hidden_state[0]
        side, step = math.isqrt(len(patches)), range(self.factor)
        grid = patches.view(side, side, -1)
        corners = [(y, x) for y in range(0, side, self.factor) for x in range(0, side, self.factor)]
        joined = [torch.cat([grid[y + down, x + right] for down in step for right in step]) for y, x in corners]
        return self.projector.layers(torch.stack(joined))

    def _time(self, index: int) -> Tensor:
        weight = self.time_projector.weight
        half = weight.size(1) // 2
        angles = index * torch.exp(torch.arange(half) * (-math.log(1e4) / half))
        waves = torch.cat([angles.sin(), angles.cos()]) if index >= 0 else torch.zeros(2 * half)
        return self.time_projector(waves.to(weight.dtype))


class PlainDecoder(nn.Module):
    """An embedding of the codes of a frozen media tokenizer, and a head."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.tokenizer = copy.deepcopy(decoder.tokenizer)
        self.embedding, self.head = copy.deepcopy(decoder.embedding), copy.deepcopy(decoder.head)
        self._codec = [copy.deepcopy(decoder.codec)]  # in a list: its tokenizer is no second module

    @torch.no_grad()
    def forward_codes(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the codes of an item; those of sound end with a class of their own."""
        (codec,) = self._codec
        if (length := codec.length(())) is not None:
            return codec.encode(features, (length,))
        codes = codec.encode(features, ())
        return torch.cat([codes, codes.new_tensor([codec.num_codes])])

    def forward(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the labels and the embeddings of an item."""
        labels = self.forward_codes(features)
        return labels, self.embedding(labels)


def _fresh(values: Mapping[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(**values)
    return foundation_class(config)(config).train()


def _like(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cross_entropy(logits: Tensor, example: Example) -> Tensor:
    labels = torch.where(torch.from_numpy(example.sample.loss_mask), torch.from_numpy(example.sample.input_ids), -100)
    return F.cross_entropy(logits[:-1].float(), labels[1:], ignore_index=-100, reduction="sum")


class Reference:
    """The plain model of a row, and its parameters by the names that omnitrain has for them.

    Attributes:
        values: name -> the first value of the parameter, fp32.
        trained: names of those that train.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self._dtype = torch.float32 if row.precision == "fp32" else torch.bfloat16
        ours = build_as_planned(row)
        with local_torch_dtype(self._dtype):
            self.plain = PlainFamily(row) if is_family(row) else PlainParts(row, bare(row))
        self.values = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
        self.trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
        self._adapters, self._renamed = set(ours.adapter_names), dict(ours.renamed)
        for name, module in self.plain.named_modules():
            if isinstance(module, nn.BatchNorm1d) and f"{name}.weight" not in self.trained:
                module.eval()  # frozen batch normalizations use the statistics that were loaded
        self._base = {names[0]: base for base, names in ours.renamed.items()}
        self._is_transposed = {
            base: bool(getattr(ours.get_submodule(base.rpartition(".")[0]), "is_transposed", False))
            for base in ours.renamed
        }

    def train(self, steps: Sequence[Sequence[Example]], draw: int | None = None) -> Outcome:
        """Run all steps. ``draw``: a seed; each weight begins at one of its two neighbours."""
        values = {name: value.clone() for name, value in self.values.items()}
        if draw is not None:
            nudge(values, lambda _: self._dtype, draw)
        before = {name: value.clone() for name, value in values.items()}
        outcome, states = Outcome(), dict[str, dict[str, Tensor]]()
        for examples in steps:
            loss, gradients = self.step(values, examples)
            if "again" in self.row.words:
                gradients = {name: 2 * gradient for name, gradient in gradients.items()}
            outcome.gradients = outcome.gradients if outcome.losses else dict(gradients)
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            factor = min(1.0, MAX_NORM / (norm + 1e-6)) if "clip" in self.row.words else 1.0
            for name, gradient in gradients.items():
                self._update(name, values[name], gradient * factor, states.setdefault(name, {}))
        outcome.moved = {name: values[name] - before[name] for name in self.trained}
        return outcome

    def step(self, values: Mapping[str, Tensor], examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients: each loss is its sum over the samples, divided by its count over all of them."""
        leaves = {name: value.clone().requires_grad_(name in self.trained) for name, value in values.items()}
        counts = Counter({"text": sum(int(example.sample.loss_mask[1:].sum()) for example in examples)})
        for span in (span for example in examples for span in example.sample.spans if span.is_target):
            counts[span.component] += span.item.num_tokens
        weights = LOSS_WEIGHTS if "weights" in self.row.words else {}
        total = 0.0
        for example in examples:
            sums = functional_call(self.plain, self._effective(leaves), (example,))
            parts = [weights.get(name, 1.0) * sums[name] / counts[name] for name in sums if counts[name]]
            if parts:
                loss = torch.stack(parts).sum()
                total += loss.item()
                if loss.requires_grad:
                    loss.backward()
        return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def _effective(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain model's parameters: matrices with adapters have ``alpha / rank * B A`` added."""
        lora, found = TRAINED[self.row.trained].adapters, dict[str, Tensor]()
        for name, value in values.items():
            base = self._base.get(name, name)
            if len(adapters := self._renamed.get(base, ())[1:]) == 2:
                a, b = (values[adapter] for adapter in adapters)
                delta = lora.alpha / lora.rank * (b @ a)
                value = value + (delta.mT if self._is_transposed[base] and delta.ndim == 3 else delta)
            if name not in self._adapters:
                found[base.replace("big.model.", "big.")] = value.to(self._dtype)
        return found

    def _update(self, name: str, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        if self.row.optimizer == "sgd":
            state["m"] = state["m"] * MOMENTUM + gradient if state else gradient
            value -= RATE * state["m"]
        elif self.row.optimizer == "muon" and self._is_hidden_matrix(name):
            state["m"] = torch.lerp(state.get("m", torch.zeros_like(gradient)), gradient, 1 - MOMENTUM)
            direction = orthogonal(torch.lerp(gradient, state["m"], MOMENTUM))
            value *= 1 - RATE * DECAY
            value -= 0.2 * RATE * math.sqrt(max(value.shape[-2:])) * direction
        else:
            state["t"] = state.get("t", torch.zeros(())) + 1
            corrected = list[Tensor]()
            for key, beta, power in (("m", BETAS[0], gradient), ("v", BETAS[1], gradient.square())):
                state[key] = state.get(key, torch.zeros_like(gradient)) * beta + (1 - beta) * power
                corrected.append(state[key] / (1 - beta ** float(state["t"])))
            value *= 1 - RATE * (DECAY if self._decays(name) else 0.0)
            value -= RATE * corrected[0] / (corrected[1].sqrt() + EPS)
            if self.row.optimizer == "int8":
                state["m"], state["v"] = in_8_bits(state["m"], signed=True), in_8_bits(state["v"], signed=False)

    def _decays(self, name: str) -> bool:
        """Whether it is no bias and no norm, whatever its shape."""
        owner, _, weight = self._base.get(name, name).rpartition(".")
        is_adapter = name in self._adapters
        is_norm = not is_adapter and "norm" in type(self.plain.get_submodule(owner)).__name__.lower()
        return self.values[name].ndim >= 2 and not is_norm and (is_adapter or "bias" not in weight.split("_"))

    def _is_hidden_matrix(self, name: str) -> bool:
        """Whether it is the matrix of a linear layer or of experts; no embedding, head or adapter."""
        if name in self._adapters or "decoder" in name.partition(".")[0]:
            return False
        owner, _, weight = self._base.get(name, name).rpartition(".")
        module, foundation = self.plain.get_submodule(owner), self.plain.foundation
        if module in (foundation.get_output_embeddings(), foundation.get_input_embeddings()):
            return False
        is_experts = weight in ("gate_up_proj", "down_proj") and self.values[name].ndim == 3
        return is_experts or (weight == "weight" and isinstance(module, nn.Linear))


def in_8_bits(values: Tensor, *, signed: bool) -> Tensor:
    """What torchao keeps of a whole tensor's moment."""
    from torchao.optim.subclass_8bit import OptimState8bit

    if values.numel() < 4096 or values.numel() % 256:
        return values
    kept = OptimState8bit.zeros(values.shape, signed, 256)
    kept.copy_(values)
    return kept.dequantize()


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton and Schulz's iteration of Jordan et al., five times."""
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x
