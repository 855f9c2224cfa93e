"""What plain transformers computes for a row, sample by sample in one process; the optimizers written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig

from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.model import OmniModel
from tests.parallel.random_layouts.models import Example, bare, build_as_planned, foundation_of, is_family, parts_of
from tests.parallel.random_layouts.rows import Row
from tests.parallel.sections.test_teachers import distilled

RATE, MOMENTUM, DECAY, EPS, MAX_NORM = 0.02, 0.9, 0.1, 1e-3, 0.05
BETAS = (0.9, 0.95)
LOSS_WEIGHTS = {"text": 0.7}


@dataclass
class Outcome:
    """What a run of a row gave.

    Attributes:
        losses: of each step.
        norms: of the gradients of each step, before they are clipped.
        gradients: parameter -> its gradient in the first step; none without one.
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
        """Sum of each loss."""
        logits = self.foundation(**example.arguments, use_cache=False).logits[0]
        return {"text": _cross_entropy(logits, example)}


class PlainParts(nn.Module):
    """Towers, media tokenizers and a language model of transformers, and what omnitrain puts between them."""

    def __init__(self, row: Row, model: OmniModel) -> None:
        super().__init__()
        parts = parts_of(row)
        self.foundation = _fresh(parts["foundation"])
        for name in model.encoder_names:
            self.add_module(
                name, _fresh(parts["teachers"]["big"]) if name == "big" else PlainEncoder(model.encoders[name])
            )
        for name in model.decoder_names:
            self.add_module(name, PlainDecoder(model.decoders[name]))

    def forward(self, example: Example) -> dict[str, Tensor]:
        """Sum of each loss."""
        sample = example.sample
        ids = torch.from_numpy(sample.input_ids)
        embeds, targets = self.foundation.get_input_embeddings()(ids), dict[str, tuple[Tensor, Tensor]]()
        for span in sample.spans:
            part, positions = self.get_submodule(span.component), torch.from_numpy(span.positions)
            features = {name: torch.from_numpy(array) for name, array in span.item.features.items()}
            rows = part(features)
            if span.is_target:
                labels, rows = rows
                targets[span.component] = labels, positions
            embeds = embeds.index_copy(0, positions, rows)
        output = self.foundation(inputs_embeds=embeds[None], use_cache=False, output_hidden_states=True)
        hidden, logits = output.hidden_states[-1][0], output.logits[0]
        if hasattr(self, "big"):
            with torch.no_grad():
                teacher = self.big.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            rows = torch.from_numpy(sample.loss_mask)[1:].nonzero()[:, 0]
            text = distilled(logits[rows], ids[rows + 1], teacher[rows]).sum() if len(rows) else logits.sum() * 0
        else:
            text = _cross_entropy(logits, example)
        losses = {"text": text}
        for name, (labels, positions) in targets.items():
            losses[name] = losses.get(name, 0) + F.cross_entropy(
                hidden[positions - 1] @ self.get_submodule(name).head.weight.t(), labels, reduction="sum"
            )
        return losses


def _fresh(values: Mapping[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(**values)
    return foundation_class(config)(config).train()


class PlainEncoder(nn.Module):
    """A tower and a projector that joins 2 x 2 patches, or two frames."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        config = AutoConfig.for_model(**encoder.config.tower)
        self.tower = type(encoder.tower)(config).train()
        self.projector = copy.deepcopy(encoder.projector)
        self.is_vision = hasattr(encoder, "time_projector")
        if self.is_vision:
            self.time_projector = copy.deepcopy(encoder.time_projector)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        factor = self.projector.factor
        if not self.is_vision:
            frames = self.tower(features["input_features"]).last_hidden_state  # [chunks, frames, width]
            frames = F.pad(frames, (0, 0, 0, -frames.size(1) % factor))
            joined = frames.reshape(frames.size(0), -1, factor * frames.size(2))
            kept = [chunk[:rows] for chunk, rows in zip(joined, features["num_rows"].tolist(), strict=True)]
            return self.projector.layers(torch.cat(kept))
        pixels, index = features["pixel_values"], features["frame_index"]
        rows = []
        for frame, number in zip(pixels, index.tolist(), strict=True):
            patches = self.tower(pixel_values=frame[None]).last_hidden_state[0]
            side = math.isqrt(len(patches))
            grid = patches.view(side, side, -1)
            joined = [
                torch.cat([grid[y + dy, x + dx] for dy in range(factor) for dx in range(factor)])
                for y in range(0, side, factor)
                for x in range(0, side, factor)
            ]
            rows.append(self.projector.layers(torch.stack(joined)) + self._time(number))
        return torch.cat(rows)

    def _time(self, number: int) -> Tensor:
        width = self.time_projector.weight.size(1)
        if number < 0:
            return self.time_projector(torch.zeros(width))
        angles = number * torch.exp(torch.arange(width // 2) * (-math.log(1e4) / (width // 2)))
        return self.time_projector(torch.cat([angles.sin(), angles.cos()]))


class PlainDecoder(nn.Module):
    """An embedding of the codes of a frozen media tokenizer, and a head."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.tokenizer = copy.deepcopy(decoder.tokenizer)
        self.embedding, self.head = copy.deepcopy(decoder.embedding), copy.deepcopy(decoder.head)
        self._encode = copy.deepcopy(decoder.codec)
        self._ends = not decoder.codec.fixed_length

    @torch.no_grad()
    def codes(self, features: Mapping[str, Tensor]) -> Tensor:
        codes = self._encode.encode(features, (int(self._encode.fixed_length or 0),))
        return torch.cat([codes, codes.new_tensor([self._encode.num_codes])]) if self._ends else codes

    def forward(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = self.codes(features)
        return labels, self.embedding(labels)


def _cross_entropy(logits: Tensor, example: Example) -> Tensor:
    labels = torch.where(torch.from_numpy(example.sample.loss_mask), torch.from_numpy(example.sample.input_ids), -100)
    return F.cross_entropy(logits[:-1].float(), labels[1:], ignore_index=-100, reduction="sum")


class Reference:
    """The plain model of a row, and its parameters under the names that omnitrain has for them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.ours = build_as_planned(row)
        if is_family(row):
            self.plain = PlainFamily(row)
        else:
            without = bare(row)
            self.plain = PlainParts(row, without)
            weights = {_in_plain(name): value for name, value in without.state_dict().items()}
            missing = self.plain.load_state_dict(weights, strict=False)
            if "big" in self.ours.encoder_names:
                self.plain.big.load_state_dict(self.ours.get_submodule("big").model.state_dict())
            assert not missing.unexpected_keys and all("big" in name for name in missing.missing_keys), missing
        self.values = {name: parameter.detach().clone() for name, parameter in self.ours.named_parameters()}
        self.trained = {name for name, parameter in self.ours.named_parameters() if parameter.requires_grad}
        self.scale = 2.0  # alpha / rank
        self.transposed = {
            name: bool(getattr(self.ours.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
            for name in self.ours.renamed
        }

    def effective(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain model's parameters: matrices with adapters have ``scale * B A`` added."""
        adapters = set(self.ours.adapter_names)
        base_of = {names[0]: base for base, names in self.ours.renamed.items()}
        found = {}
        for name, value in values.items():
            if name in adapters:
                continue
            base = base_of.get(name, name)
            if len(names := self.ours.renamed.get(base, ())) == 3:
                a, b = (values[adapter] for adapter in names[1:])
                delta = self.scale * (b @ a)
                value = value + (delta.mT if self.transposed[base] and delta.ndim == 3 else delta)
            found[_in_plain(base)] = value
        return found

    def step(self, values: Mapping[str, Tensor], examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of a step, sample by sample; each loss is divided by its count over all samples."""
        leaves = {name: value.clone().requires_grad_(name in self.trained) for name, value in values.items()}
        counts = {"text": sum(int(example.sample.loss_mask[1:].sum()) for example in examples)}
        for example in examples:
            for span in example.sample.spans:
                if span.is_target:
                    counts[span.component] = counts.get(span.component, 0) + span.item.num_tokens
        total = 0.0
        for example in examples:
            sums = functional_call(self.plain, self.effective(leaves), (example,))
            weights = LOSS_WEIGHTS if "weights" in self.row.words else {}
            losses = [weights.get(name, 1.0) * sums[name] / counts[name] for name in sums if counts[name]]
            loss = torch.stack(losses).sum() if losses else None
            if loss is not None:
                total += loss.item()
            if loss is not None and loss.requires_grad:
                loss.backward()
        return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def train(self, steps: Sequence[Sequence[Example]], nudge: int | None = None) -> Outcome:
        """All steps. ``nudge``: a seed; each weight begins at one of its two neighbours."""
        values = {name: value.clone() for name, value in self.values.items()}
        if nudge is not None:
            values = nudged(values, nudge)
        before = {name: value.clone() for name, value in values.items()}
        outcome, state = Outcome(), dict[str, dict[str, Tensor]]()
        for number, examples in enumerate(steps):
            loss, gradients = self.step(values, examples)
            if "again" in self.row.words:
                gradients = {name: 2 * gradient for name, gradient in gradients.items()}
            if not outcome.losses:
                outcome.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
            norm = (
                torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
                if gradients
                else torch.zeros(())
            )
            outcome.losses.append(loss)
            outcome.norms.append(float(norm))
            factor = min(1.0, MAX_NORM / (float(norm) + 1e-6)) if "clip" in self.row.words else 1.0
            for name, gradient in gradients.items():
                self._update(name, values[name], gradient * factor, state.setdefault(name, {}))
        outcome.moved = {name: values[name] - before[name] for name in self.trained}
        return outcome

    def _update(self, name: str, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        if self.row.optimizer == "sgd":
            state["m"] = state["m"] * MOMENTUM + gradient if "m" in state else gradient
            value -= RATE * state["m"]
        elif self.row.optimizer == "muon" and self.is_hidden_matrix(name):
            state["m"] = torch.lerp(state.get("m", torch.zeros_like(gradient)), gradient, 1 - MOMENTUM)
            direction = orthogonal(torch.lerp(gradient, state["m"], MOMENTUM))
            value *= 1 - RATE * DECAY
            value -= 0.2 * RATE * math.sqrt(max(value.shape[-2:])) * direction
        else:
            state["t"] = state.get("t", torch.zeros(())) + 1
            for key, beta, power in (("m", BETAS[0], gradient), ("v", BETAS[1], gradient.square())):
                state[key] = state.get(key, torch.zeros_like(gradient)) * beta + (1 - beta) * power
            first, second = (
                state[key] / (1 - beta ** float(state["t"])) for key, beta in zip("mv", BETAS, strict=True)
            )
            value *= 1 - RATE * (DECAY if value.ndim >= 2 else 0.0)
            value -= RATE * first / (second.sqrt() + EPS)

    def is_hidden_matrix(self, name: str) -> bool:
        """Whether a parameter is the matrix of a linear layer or of experts, and neither embedding, head nor adapter."""
        if name in self.ours.adapter_names or "decoder" in name.partition(".")[0]:
            return False
        base = next((b for b, names in self.ours.renamed.items() if names[0] == name), name)
        owner, _, weight = _in_plain(base).rpartition(".")
        module = self.plain.get_submodule(owner)
        if module in (self.plain.foundation.get_output_embeddings(), self.plain.foundation.get_input_embeddings()):
            return False
        is_experts = weight in ("gate_up_proj", "down_proj") and self.values[name].ndim == 3
        return (weight == "weight" and isinstance(module, nn.Linear)) or is_experts


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton and Schulz's iteration of Jordan et al., five times."""
    wide = matrices if matrices.size(-2) <= matrices.size(-1) else matrices.mT
    x = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrices.size(-2) <= matrices.size(-1) else x.mT


def nudged(values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each number at its next larger or smaller one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in values.items():
        up = torch.rand(value.shape, generator=generator) < 0.5
        found[name] = (
            torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))
            if value.is_floating_point()
            else value
        )
    return found


def _in_plain(name: str) -> str:
    return name.replace("big.model.", "big.")
