"""Find the interface of one modality: the inputs of its feature method, and the form in which the forward takes it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from omnitrain.models.discovery.features import MediaFeatures, RowLayout, describe, flatten, row_numbers, watched
from omnitrain.models.discovery.interface import WORDS, ModalityInterface, method_name, methods_replaced
from omnitrain.models.discovery.model_errors import failure_of_model
from omnitrain.models.discovery.parameter_reads import ParameterReads, float_tensors
from omnitrain.models.discovery.placeholders import token_ids
from omnitrain.models.discovery.probe_inputs import MAIN_ARGUMENTS, ProbeInput, candidates
from omnitrain.models.discovery.text_run import (
    StopRunError,
    called_with,
    feature_hosts,
    first_block,
    separate_decoder,
    text_arguments,
    typed,
    watching,
)
from omnitrain.torch_private import tree_iter

_MOST_ROWS = 20_000


class WrongGuessError(Exception):
    """A guess about the model was wrong; the message says why."""


class InterfaceSearch:
    """Tries guesses for one modality on the model itself."""

    def __init__(self, model: PreTrainedModel, modality: str) -> None:
        self.model, self.modality, self.method = model, modality, method_name(modality)
        self.hosts = feature_hosts(model, modality)
        self.host = self._caller()
        self.forward_names = tuple(inspect.signature(type(model).forward).parameters)

    def find(self) -> ModalityInterface | str:
        """Return the interface of the modality (with an empty component name), or the reason why none was found."""
        known, first = MAIN_ARGUMENTS[self.modality], next(iter(self._parameters()), "")
        main = next((name for name in (first, *known) if name in self.forward_names and name in known), None)
        if main is None:
            return f"its forward takes none of {', '.join(known)}"
        accepted = tuple(dict.fromkeys((*self.forward_names, *self._parameters())))
        reasons: dict[str, None] = {}
        for probe in dict.fromkeys(candidates(self.model.config, self.modality, main, accepted)):
            try:
                return self._port_with(probe)
            except WrongGuessError as reason:
                reasons[str(reason)] = None
        return f"the model accepted no tiny input: {'; '.join(reasons)[:600]}"

    def _port_with(self, probe: ProbeInput) -> ModalityInterface:
        features = typed(self.model, probe.make([0, 1]))
        with _guess(""), ParameterReads(self.model) as reads:
            call = self._captured(features)
            reads.names.clear()
            output = getattr(self.model.get_submodule(self.host), self.method)(**call, return_dict=True)
        if not any(isinstance(value, Tensor) for value in tree_iter(_values(output))):
            raise WrongGuessError(f"{self.method} returned {type(output).__name__}")
        bindings, constants = self._bindings(call, features)
        if probe.variable and {name for name, _ in bindings.values()} <= {probe.main}:
            raise WrongGuessError("items differ in size, but no argument gives their sizes")
        layout, token = self._layout(features, output)
        items = [replace(probe, variable=False).make(numbers) for numbers in ([0], [1], [0, 1])]
        interface = ModalityInterface(
            modality=self.modality,
            component="",
            token_id=token,
            host=self.host,
            overridden=tuple(self.hosts),
            arguments=tuple(name for name in probe.names if name in self.forward_names),
            bindings=bindings,
            constants=constants,
            trigger={},
            layout=layout,
            probe=probe,
            parameters=tuple(sorted(reads.names)),
            items_are_independent=True,
            items_stack=all(torch.equal(torch.cat([items[0][k], items[1][k]]), both) for k, both in items[2].items()),
            minimal_rows=0,
            called_by_number=(),
        )
        interface = self._with_independence(self._with_trigger(interface, features, output), output)
        one, two = self._calls(interface, interface.probe_items(1)[0]), self._calls(interface, interface.probe_batch(2))
        uneven = tuple(sorted(name for name in one & two if one[name] != two[name]))
        return replace(interface, called_by_number=uneven, are_words=self._are_words(interface))

    def _caller(self) -> str:
        for host in self.hosts:
            functions = vars(type(self.model.get_submodule(host))).items()
            plain = [inspect.unwrap(f) for name, f in functions if callable(f) and not name.endswith("_features")]
            if any(self.method in function.__code__.co_names for function in plain if inspect.isfunction(function)):
                return host
        return self.hosts[-1]

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(inspect.unwrap(getattr(type(self.model.get_submodule(self.host)), self.method)))

    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(list(self._signature.parameters.items())[1:])

    def _captured(self, features: Mapping[str, Tensor]) -> dict[str, Any]:
        caught: dict[str, Any] = {}

        def catch(*args: Any, **kwargs: Any) -> Any:
            caught.update(self._signature.bind(None, *args, **kwargs).arguments)
            raise StopRunError

        token = next(token_ids(self.model.config, self.modality, self._vocabulary()), None)
        with suppress(StopRunError), methods_replaced(self.model, self.hosts, self.method, catch):
            self.model(**self._forward(token, 4, features))
        if not caught:
            raise RuntimeError(f"the forward does not call {self.method}")
        known = self._parameters()
        return {name: caught[name] for name in known if caught.get(name) is not None and name != "kwargs"}

    def _bindings(
        self, call: Mapping[str, Any], features: Mapping[str, Tensor]
    ) -> tuple[dict[str, tuple[str, bool]], dict[str, Any]]:
        bindings: dict[str, tuple[str, bool]] = {}
        constants: dict[str, Any] = {}
        for parameter, value in call.items():
            if not isinstance(value, Tensor):
                constants[parameter] = value
            elif (source := _source(value, features)) is not None:
                bindings[parameter] = source
            elif self._parameters()[parameter].default is inspect.Parameter.empty:
                raise WrongGuessError(f"{self.method} reads {parameter!r}, which is not an argument of the medium")
        return bindings, constants

    def _layout(self, features: Mapping[str, Tensor], output: Any) -> tuple[RowLayout, int]:
        """The layout that the forward accepts instead of the method's own output, and the placeholder token."""
        reasons: dict[str, None] = {}
        for token in token_ids(self.model.config, self.modality, self._vocabulary()):
            for rows in dict.fromkeys(row_numbers(output, list(_values(output)))):
                if not 0 < rows < _MOST_ROWS:
                    continue
                try:
                    return self._layout_of(features, output, token, rows), token
                except WrongGuessError as reason:
                    reasons[str(reason)] = None
        raise WrongGuessError("; ".join(reasons) or "the config names no placeholder token")

    def _layout_of(self, features: Mapping[str, Tensor], output: Any, token: int, rows: int) -> RowLayout:
        passed, fields = watched(output)
        with _guess(f"forward with {rows} features: "):
            expected = self._decoder_inputs(token, rows, features, passed)
        for joined in (True, False):
            layout = describe(output, fields, rows, joined=joined)
            if layout is None:
                break
            with suppress(WrongGuessError), _guess(f"forward with {rows} flat features: "):
                if self._takes(layout, output, expected, token, rows, features):
                    return layout
        raise WrongGuessError(f"the forward does not replace its placeholders by {rows} unchanged features")

    def _takes(
        self,
        layout: RowLayout,
        output: Any,
        expected: Sequence[Tensor],
        token: int,
        rows: int,
        features: Mapping[str, Tensor],
    ) -> bool:
        """Whether features in this layout reach the decoder like the method's own output, each at its placeholder."""
        flat = flatten(output, layout)
        if flat.main.size(0) != rows:
            return False
        if not _same(expected, self._decoder_inputs(token, rows, features, flat.as_output())):
            return False
        changed = flat.with_tensors([flat.main + 1, *flat.tensors()[1:]], flat.counts)
        inputs = self._decoder_inputs(token, rows, features, changed.as_output())
        return any(_num_changed(a, b) >= rows for a, b in zip(expected, inputs, strict=True))

    def _decoder_inputs(self, token: int, rows: int, features: Mapping[str, Tensor], output: Any) -> list[Tensor]:
        """All floating-point inputs of the text decoder when the method returns ``output``."""
        with methods_replaced(self.model, self.hosts, self.method, lambda *args, **kwargs: output):
            core = separate_decoder(self.model) or first_block(self.model)  # gets the embeddings unchanged
            return float_tensors(called_with(self.model, core, self._forward(token, rows, features)))

    def _forward(self, token: int | None, rows: int, features: Mapping[str, Tensor]) -> dict[str, Any]:
        arguments = text_arguments(self.model, self.modality, token, rows)
        if "position_ids" in self.forward_names:
            ids = arguments["input_ids"]
            arguments["position_ids"] = torch.arange(ids.size(1), device=ids.device)[None]
        return arguments | {name: value for name, value in features.items() if name in self.forward_names}

    def _vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.size(0)

    def _with_trigger(
        self, interface: ModalityInterface, features: Mapping[str, Tensor], output: Any
    ) -> ModalityInterface:
        """Add the smallest arguments for which the forward calls the feature method."""
        rows = flatten(output, interface.layout)
        expected = self._decoder_inputs(interface.token_id, rows.main.size(0), features, output)
        minimal = {name: value for name, value in interface.minimal_input().items() if name in self.forward_names}
        main = interface.probe.main
        for trigger in ({main: torch.empty(0)}, {main: minimal[main]}, minimal):
            with suppress(WrongGuessError), _guess("forward without media: "):
                arguments = typed(self.model, trigger)
                if _same(
                    expected, self._decoder_inputs(interface.token_id, rows.main.size(0), arguments, rows.as_output())
                ):
                    return replace(interface, trigger={name: value.cpu() for name, value in arguments.items()})
        raise WrongGuessError("no argument makes the forward take features that were computed before")

    def _with_independence(self, interface: ModalityInterface, output: Any) -> ModalityInterface:
        """Add whether items are independent: of any size, of equal size, or not. ``output``: of the first two items."""
        apart, together = self._encoded(interface, interface.probe_items(2)), [flatten(output, interface.layout)]
        if interface.probe.variable and not _same_rows(apart, together):
            interface = replace(interface, probe=replace(interface.probe, variable=False))
            apart, together = (
                self._encoded(interface, interface.probe_items(2)),
                self._encoded(interface, [interface.probe_batch(2)]),
            )
        minimal_rows = apart[0].main.size(0) if apart else 0
        return replace(interface, items_are_independent=_same_rows(apart, together), minimal_rows=minimal_rows)

    def _calls(self, interface: ModalityInterface, features: dict[str, Tensor]) -> Counter[str]:
        """Module with parameters -> number of its calls; empty if the tower refuses the input."""
        counts: Counter[str] = Counter()
        modules = [
            (name, module) for name, module in self.model.named_modules() if any(True for _ in module.parameters())
        ]
        with watching(modules, before=lambda name, *_: counts.update([name])):
            return counts if self._encoded(interface, [features]) else Counter()

    def _are_words(self, interface: ModalityInterface) -> bool:
        """Whether the features are rows of the token embeddings."""
        embedding = self.model.get_input_embeddings()
        with suppress(WrongGuessError), _guess(""), ParameterReads(self.model):
            minimal = typed(self.model, interface.minimal_input())
            ids = interface.words(self.model, lambda: interface.encode(self.model, minimal)).side[WORDS]
            return torch.equal(embedding(ids), interface.encode(self.model, minimal).main)
        return False

    def _encoded(self, interface: ModalityInterface, inputs: Sequence[dict[str, Tensor]]) -> list[MediaFeatures]:
        """The features of each input; empty if the tower refuses one (a size it accepts only with a larger one)."""
        try:
            with _guess(""), ParameterReads(self.model):
                return [interface.encode(self.model, typed(self.model, features)) for features in inputs]
        except WrongGuessError:
            return []


@contextmanager
def _guess(where: str) -> Iterator[None]:
    """Raise a :class:`WrongGuessError` for any exception of the model's code."""
    try:
        yield
    except WrongGuessError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise WrongGuessError(f"{where}{failure_of_model(error)}") from error


def _values(output: Any) -> dict[str, Any]:
    return {**vars(output), **output} if isinstance(output, ModelOutput) else {"": output}


def _source(value: Tensor, features: Mapping[str, Tensor]) -> tuple[str, bool] | None:
    """The name of the argument that a tensor is (by identity or by value), and whether it is inverted."""
    for name, feature in features.items():
        if value is feature:
            return name, False
    for name, feature in features.items():
        if value.shape != feature.shape or value.dtype != feature.dtype:
            continue
        if torch.equal(value, feature):
            return name, False
        if value.dtype == torch.bool and torch.equal(value, ~feature):
            return name, True
    return None


def _same(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    return len(expected) == len(got) and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def _same_rows(apart: Sequence[MediaFeatures], together: Sequence[MediaFeatures]) -> bool:
    if not apart or not together:
        return False
    for a, b in zip(MediaFeatures.cat(apart).tensors(), MediaFeatures.cat(together).tensors(), strict=True):
        tolerance = 1e-4 if b.dtype == torch.float32 else 2e-2
        scale = float(b.abs().max()) if b.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=10 * tolerance, atol=tolerance * scale):
            return False
    return True


def _num_changed(a: Tensor, b: Tensor) -> int:
    return int((a != b).reshape(-1, a.size(-1)).any(-1).sum()) if a.shape == b.shape and a.ndim else 0
