"""Components and ports of a HuggingFace multimodal model, found by tiny runs of its own methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.native.placeholders import (
    MODALITY_CODES,
    TokenExtras,
    extra_arguments,
    special_ids,
    token_ids,
    video_marks,
)
from omnitrain.models.native.port import NativePort, method_name
from omnitrain.models.native.positions import PositionFunction, config_json, own_function
from omnitrain.models.native.probe import MAIN_ARGUMENTS, ProbeInput, candidates
from omnitrain.models.native.rows import NativeRows, RowLayout, Watched, describe, flatten, row_numbers
from omnitrain.models.native.touch import ParameterReads, leaves

MODALITIES = ("image", "video", "audio")
FOUNDATION = "foundation"


@dataclass(frozen=True)
class Discovery:
    """What a model is made of.

    Attributes:
        ports: modality -> how its rows are made and taken.
        components: name -> names of its parameters; ``foundation`` has all that no other component reads.
        num_parameters: component -> number of its parameters' elements, each counted once.
        shared: names of parameters that a feature method reads, but that belong to the text model (embeddings of
            image codes); they stay in ``foundation``.
        refused: modality -> why its rows cannot be made apart from the forward.
        positions: position ids of a sample.
        extras: per-token arguments of a sample.
    """

    ports: dict[str, NativePort]
    components: dict[str, tuple[str, ...]]
    num_parameters: dict[str, int]
    shared: tuple[str, ...]
    refused: dict[str, str]
    positions: PositionFunction
    extras: TokenExtras

    @property
    def token_ids(self) -> dict[str, int]:
        """Modality -> id of its placeholder token."""
        return {modality: port.token_id for modality, port in self.ports.items()}


def discover(model: PreTrainedModel) -> Discovery:
    """Run every feature method of a model once on a tiny input, and see what it reads and makes.

    The model is left as it was. It may be on the meta device.

    Args:
        model: a causal language model of transformers, with or without other modalities.
    """
    ports: dict[str, NativePort] = {}
    refused: dict[str, str] = {}
    with _undisturbed(model):
        text = _text_parameters(model)
        for modality in MODALITIES:
            if not _hosts(model, modality):
                continue
            found = _Search(model, modality).port()
            if isinstance(found, str):
                refused[modality] = found
            else:
                ports[modality] = found
        extras = _extras(model, ports)
        positions = _positions(model, ports, extras)
    return _grouped(model, ports, refused, text, positions, extras)


def _extras(model: PreTrainedModel, ports: Mapping[str, NativePort]) -> TokenExtras:
    names = extra_arguments(type(model))
    tokens = {modality: port.token_id for modality, port in ports.items()}
    extras = TokenExtras(names, tokens, video_marks(model.config, tokens))
    return replace(extras, marks_answer=bool(names) and _zeros_open_the_prompt(model, names))


def _zeros_open_the_prompt(model: PreTrainedModel, names: tuple[str, ...]) -> bool:
    """With all types zero, the mask lets the first token see the second: the types tell prompt from answer."""
    ids = torch.tensor([plain_ids(model, 4)], device=input_device(model))
    with _attention(model, "eager"):  # the implementation whose masks are plain tensors
        given = _decoder_call(model, input_ids=ids, attention_mask=torch.ones_like(ids), **_zeros(names, ids))
    masks = [value for value in leaves(given) if isinstance(value, Tensor) and value.ndim == 4]
    return any(bool(m[0, 0, 0, 1]) if m.dtype == torch.bool else float(m[0, 0, 0, 1]) == 0.0 for m in masks)


def _zeros(names: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    return {name: torch.zeros_like(ids) for name in names}


def _decoder_call(model: PreTrainedModel, **arguments: Any) -> dict[str, Any]:
    """Keyword arguments with which the model's forward calls its text decoder; the forward ends there.

    Empty where it does not get that far (a forward that cannot do without an image).
    """
    caught: dict[str, Any] = {}

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        caught.update(kwargs)
        raise _Stop

    decoder = _separate_decoder(model)
    if decoder is None or decoder is model:
        return caught
    handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with ParameterReads(model):
            model(**arguments, use_cache=False)
    except Exception:  # _Stop, or the model's own refusal
        return caught
    finally:
        handle.remove()
    return caught


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    every = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in every if isinstance(config, PreTrainedConfig)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _positions(model: PreTrainedModel, ports: Mapping[str, NativePort], extras: TokenExtras) -> PositionFunction:
    """The model's own function where it has one, and how it counts where it has none."""
    given = _default_positions(model)
    start = int(given.min()) if given is not None and given.numel() else 0
    if own_function(model) is None:
        return PositionFunction(type(model), None, start=start)
    function = PositionFunction(type(model), config_json(model.config), start=start)
    axes = given.size(0) if given is not None and given.ndim == 3 else 0
    for modality in MODALITIES:
        port = ports.get(modality)
        if port is not None and not axes:
            axes = _axes_with(model, function, port, extras)
    return replace(function, axes=axes)


def _default_positions(model: PreTrainedModel) -> Tensor | None:
    """Positions that the text decoder gets for a text-only sample, if the model makes them itself."""
    ids = torch.tensor([plain_ids(model, 4)], device=input_device(model))
    zeros = _zeros(extra_arguments(type(model)), ids)
    found = _decoder_call(model, input_ids=ids, attention_mask=torch.ones_like(ids), **zeros).get("position_ids")
    return found if isinstance(found, Tensor) else None


def _axes_with(model: PreTrainedModel, function: PositionFunction, port: NativePort, extras: TokenExtras) -> int:
    with ParameterReads(model):
        item = port.minimal_input()
        typed = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in item.items()}
        rows = port.encode(model, {k: v.to(input_device(model)) for k, v in typed.items()}).main.size(0)
    plain = plain_ids(model, 4)
    ids = np.array([*plain[:2], *[port.token_id] * rows, *plain[2:]])
    try:
        positions = function(ids, item, extras(ids))
    except UserError:
        return 0
    return positions.shape[0] if positions.ndim == 2 else 0


def _grouped(
    model: PreTrainedModel,
    ports: dict[str, NativePort],
    refused: dict[str, str],
    text: set[str],
    positions: PositionFunction,
    extras: TokenExtras,
) -> Discovery:
    """Modalities whose methods read common parameters are one component, named after the first of them."""
    owned = {modality: [name for name in port.parameters if name not in text] for modality, port in ports.items()}
    component: dict[str, str] = {}
    for modality, names in owned.items():
        mates = [other for other in component if set(owned[other]) & set(names)]
        component[modality] = component[mates[0]] if mates else f"{modality}_encoder"
        component |= dict.fromkeys(
            (m for m in component if component[m] in {component[o] for o in mates}), component[modality]
        )
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    components = {
        name: tuple(sorted({p for m in component if component[m] == name for p in owned[m]}, key=order.__getitem__))
        for name in dict.fromkeys(component.values())
    }
    taken = {name for names in components.values() for name in names}
    everything = {FOUNDATION: tuple(name for name in order if name not in taken), **components}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    read = {name for port in ports.values() for name in port.parameters}
    return Discovery(
        ports={modality: replace(port, component=component[modality]) for modality, port in ports.items()},
        components=everything,
        num_parameters={name: sum(sizes[p] for p in names) for name, names in everything.items()},
        shared=tuple(name for name in order if name in read & text),
        refused=refused,
        positions=positions,
        extras=extras,
    )


def _text_parameters(model: PreTrainedModel) -> set[str]:
    """Parameters of the text model: its embeddings, its head and, where it is a module of its own, its decoder."""
    parts: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (decoder := _separate_decoder(model)) is not None:
        parts.append(decoder)
    ids = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def _separate_decoder(model: PreTrainedModel) -> nn.Module | None:
    """The text decoder, unless it is a module that holds the towers, too."""
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module) or any(_hosts_in(decoder, modality) for modality in MODALITIES):
        return None
    return decoder


def _hosts(model: nn.Module, modality: str) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(type(module), method_name(modality))]


def _hosts_in(module: nn.Module, modality: str) -> bool:
    return any(hasattr(type(inner), method_name(modality)) for inner in module.modules())


class _Stop(Exception):
    """Ends a forward at the point of interest."""


class _Search:
    """Looks for the port of one modality."""

    def __init__(self, model: PreTrainedModel, modality: str) -> None:
        self.model, self.modality, self.method = model, modality, method_name(modality)
        self.hosts = _hosts(model, modality)
        self.host = self._caller()
        self.forward_names = tuple(inspect.signature(type(model).forward).parameters)
        self.failures: list[str] = []

    def port(self) -> NativePort | str:
        """The port, or why there is none."""
        main = self._main()
        if main is None:
            return f"its forward takes none of {', '.join(MAIN_ARGUMENTS[self.modality])}"
        accepted = tuple(dict.fromkeys((*self.forward_names, *self._method_parameters())))
        tried: set[ProbeInput] = set()
        for probe in candidates(self.model.config, self.modality, main, accepted):
            if probe in tried:
                continue
            tried.add(probe)
            port = self._port_with(probe)
            if port is not None:
                return port
        reasons = "; ".join(dict.fromkeys(self.failures))
        return f"no tiny input was accepted: {reasons[:600]}"

    def _port_with(self, probe: ProbeInput) -> NativePort | None:
        features = self._typed(probe.make([0, 1]))
        try:
            call = self._captured(features)
            reads = ParameterReads(self.model)
            with reads:
                output = self._call(call)
        except Exception as error:  # any failure of the model's own code on a guess means: not this guess
            return self._fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if not any(isinstance(value, Tensor) for value in leaves(_values(output))):
            return self._fail(f"{self.method} returned {type(output).__name__}")
        bound = self._bindings(call, features)
        if isinstance(bound, str):
            return self._fail(bound)
        bindings, constants = bound
        read = {name for name, _ in bindings.values()}
        if probe.variable and read <= {probe.main}:
            return self._fail("items of different sizes without an argument that tells their sizes")
        found = self._layout(features, output)
        if found is None:
            return None
        layout, token = found
        port = NativePort(
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
        )
        return self._completed(port, output)

    def _completed(self, port: NativePort, output: Any) -> NativePort | None:
        """With the smallest trigger that works, and the fact whether items are independent."""
        rows = flatten(output, port.layout)
        minimal = self._typed(port.minimal_input())
        minimal = {name: value for name, value in minimal.items() if name in self.forward_names}
        main = port.probe.main
        given = {name: value for name, value in self._typed(port.probe_batch(2)).items() if name in self.forward_names}
        expected = self._decoder_inputs(port.token_id, rows.main.size(0), given, output)
        triggers: list[dict[str, Tensor]] = [{main: torch.empty(0, dtype=minimal[main].dtype)}, {main: minimal[main]}]
        for trigger in [*triggers, minimal]:
            try:
                got = self._decoder_inputs(port.token_id, rows.main.size(0), trigger, rows.as_output())
            except Exception as error:
                self._fail(f"forward with {', '.join(trigger)}: {type(error).__name__}: {error}"[:160])
                continue
            if _same(expected, got):
                port = replace(port, trigger={name: value.cpu() for name, value in trigger.items()})
                return self._with_independence(port)
        return self._fail("no argument makes the forward take rows made before")

    def _with_independence(self, port: NativePort) -> NativePort:
        """Items of any sizes are independent, or those of equal sizes, or none."""
        if self._independent(port):
            return port
        equal = replace(port, probe=replace(port.probe, variable=False))
        if port.probe.variable and self._independent(equal):
            return equal
        return replace(equal, items_are_independent=False)

    def _independent(self, port: NativePort) -> bool:
        try:
            with ParameterReads(self.model):
                together = port.encode(self.model, self._typed(port.probe_batch(2)))
                apart = NativeRows.cat([port.encode(self.model, self._typed(item)) for item in port.probe_items(2)])
        except Exception:  # a size that only passes beside a larger one
            return False
        return all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
            for a, b in zip(apart.tensors(), together.tensors(), strict=True)
        )

    # What the method is called with -----------------------------------------------------------------------------------

    def _caller(self) -> str:
        """The module whose forward uses the method; the others hand the call on."""
        for name in self.hosts:
            if self._uses(type(self.model.get_submodule(name))):
                return name
        return self.hosts[-1]

    def _uses(self, kind: type) -> bool:
        functions = (
            inspect.unwrap(f) for key, f in vars(kind).items() if callable(f) and not key.endswith("_features")
        )
        return any(self.method in f.__code__.co_names for f in functions if inspect.isfunction(f))

    def _method_parameters(self) -> dict[str, inspect.Parameter]:
        function = inspect.unwrap(getattr(type(self.model.get_submodule(self.host)), self.method))
        return dict(list(inspect.signature(function).parameters.items())[1:])

    def _main(self) -> str | None:
        known = MAIN_ARGUMENTS[self.modality]
        first = next(iter(self._method_parameters()), "")
        return next((name for name in (first, *known) if name in self.forward_names and name in known), None)

    def _captured(self, features: Mapping[str, Tensor]) -> dict[str, Any]:
        """Arguments with which the forward calls the method."""
        caught: dict[str, Any] = {}

        def catch(*args: Any, **kwargs: Any) -> Any:
            signature = inspect.signature(inspect.unwrap(getattr(type(module), self.method)))
            caught.update(signature.bind(None, *args, **kwargs).arguments)
            raise _Stop

        module = self.model.get_submodule(self.host)
        given = {name: value for name, value in features.items() if name in self.forward_names}
        with suppress(_Stop), self._returning(catch), ParameterReads(self.model):
            self.model(**self._text(next(self._tokens(), None), 4), **given, use_cache=False)
        if not caught:
            raise RuntimeError(f"the forward does not call {self.method}")
        names = self._method_parameters()
        return {name: value for name, value in caught.items() if name in names and value is not None} | {
            name: value for name, value in (caught.get("kwargs") or {}).items() if name in features
        }

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        rest = {name: value for name, value in arguments.items() if name != "kwargs"}
        return getattr(self.model.get_submodule(self.host), self.method)(**rest, return_dict=True)

    def _bindings(
        self, call: Mapping[str, Any], features: Mapping[str, Tensor]
    ) -> tuple[dict[str, tuple[str, bool]], dict[str, Any]] | str:
        bindings: dict[str, tuple[str, bool]] = {}
        constants: dict[str, Any] = {}
        for parameter, value in call.items():
            if parameter == "kwargs":
                continue
            if not isinstance(value, Tensor):
                constants[parameter] = value
                continue
            source = _source(value, features)
            if source is not None:
                bindings[parameter] = source
            elif self._method_parameters()[parameter].default is inspect.Parameter.empty:
                return f"{self.method} reads {parameter!r}, which is not an argument of the medium"
        return bindings, constants

    # What the forward takes -------------------------------------------------------------------------------------------

    def _layout(self, features: Mapping[str, Tensor], output: Any) -> tuple[RowLayout, int] | None:
        """The layout that the forward takes in place of the method's own output, and the placeholder token."""
        given = {name: value for name, value in features.items() if name in self.forward_names}
        for token in self._tokens():
            for rows in dict.fromkeys(row_numbers(output, list(_values(output)))):
                if not 0 < rows < 20000:
                    continue
                watched = Watched(output)
                try:
                    expected = self._decoder_inputs(token, rows, given, watched.output)
                except Exception as error:
                    self._fail(f"forward with {rows} rows: {type(error).__name__}: {error}"[:160])
                    continue
                for joined in (True, False):
                    layout = describe(output, watched.fields, rows, joined=joined)
                    if layout is not None and self._takes(layout, output, expected, token, rows, given):
                        return layout, token
        self._fail("the forward puts no rows in the place of placeholders")
        return None

    def _takes(
        self,
        layout: RowLayout,
        output: Any,
        expected: Sequence[Tensor],
        token: int,
        rows: int,
        given: Mapping[str, Tensor],
    ) -> bool:
        """Rows in this layout reach the decoder as the method's own output does, and each row changes its place."""
        try:
            flat = flatten(output, layout)
            if flat.main.size(0) != rows:
                return False
            if not _same(expected, self._decoder_inputs(token, rows, given, flat.as_output())):
                return False
            changed = flat.with_tensors([flat.main + 1, *flat.tensors()[1:]], flat.counts)
            moved = self._decoder_inputs(token, rows, given, changed.as_output())
        except Exception as error:
            self._fail(f"forward with flat rows: {type(error).__name__}: {error}"[:160])
            return False
        return any(_num_moved(a, b) >= rows for a, b in zip(expected, moved, strict=True))

    def _decoder_inputs(self, token: int, rows: int, given: Mapping[str, Tensor], output: Any) -> list[Tensor]:
        """All floating-point tensors that the text decoder is called with when the method returns ``output``."""
        caught: list[Tensor] = []

        def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
            caught.extend(t for t in leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
            raise _Stop

        decoder = self._text_core()
        handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with self._returning(lambda *args, **kwargs: output), ParameterReads(self.model):
                self.model(**self._text(token, rows), **given, use_cache=False)
        except _Stop:
            return caught
        finally:
            handle.remove()
        raise RuntimeError("the forward never called its decoder")

    def _text_core(self) -> nn.Module:
        decoder = _separate_decoder(self.model)
        if decoder is not None and decoder is not self.model:
            return decoder
        towers = {id(m) for name in self._tower_names() for m in self.model.get_submodule(name).modules()}
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) and id(m) not in towers]
        return max(lists, key=len)[0]

    def _tower_names(self) -> list[str]:
        return [
            name
            for name, module in self.model.named_modules()
            if name and isinstance(module, PreTrainedModel) and not _is_text(module) and not _holds_hosts(module)
        ]

    def _text(self, token: int | None, rows: int) -> dict[str, Tensor]:
        """Ids with ``rows`` placeholders between text, and what the forward asks for beside them."""
        plain = plain_ids(self.model, 4)
        ids = torch.tensor([plain[:2] + [plain[0] if token is None else token] * rows + plain[2:4]])
        types = (
            torch.where(ids == token, MODALITY_CODES[self.modality], 0) if token is not None else torch.zeros_like(ids)
        )
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "position_ids" in self.forward_names:
            arguments["position_ids"] = torch.arange(ids.size(1))[None]
        arguments |= dict.fromkeys(extra_arguments(type(self.model)), types)
        return self._placed(arguments)

    # Small things -----------------------------------------------------------------------------------------------------

    def _tokens(self) -> Iterator[int]:
        size = self.model.get_input_embeddings().weight.size(0)
        return (token for token in token_ids(self.model.config, self.modality) if token < size)

    def _typed(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        dtype = self.model.dtype
        return self._placed({k: v.to(dtype) if v.is_floating_point() else v for k, v in features.items()})

    def _placed(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        device = input_device(self.model)
        return {name: value.to(device) for name, value in arguments.items()}

    @contextmanager
    def _returning(self, function: Callable[..., Any]) -> Iterator[None]:
        modules = [self.model.get_submodule(name) for name in self.hosts]
        for module in modules:
            object.__setattr__(module, self.method, function)
        try:
            yield
        finally:
            for module in modules:
                object.__delattr__(module, self.method)

    def _fail(self, reason: str) -> None:
        self.failures.append(reason)


def plain_ids(model: PreTrainedModel, number: int) -> list[int]:
    """Ids of ordinary text: those that the config gives no meaning to."""
    used = special_ids(model.config)
    size = model.get_input_embeddings().weight.size(0)
    return [token for token in range(size) if token not in used][:number]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a tiny run happens: on the model's device; on the CPU for a model without weights."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def _is_text(module: PreTrainedModel) -> bool:
    return module.config is module.config.get_text_config()


def _holds_hosts(module: nn.Module) -> bool:
    return any(_hosts_in(module, modality) for modality in MODALITIES)


def _values(output: Any) -> dict[str, Any]:
    return dict(output) if isinstance(output, dict) else {"": output}


def _source(value: Tensor, features: Mapping[str, Tensor]) -> tuple[str, bool] | None:
    """Which argument a tensor is: by identity, by value, or inverted."""
    for name, given in features.items():
        if value is given:
            return name, False
    for name, given in features.items():
        if value.shape == given.shape and value.dtype == given.dtype and torch.equal(value, given):
            return name, False
        if value.dtype == given.dtype == torch.bool and value.shape == given.shape and torch.equal(value, ~given):
            return name, True
    return None


def _same(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    return len(expected) == len(got) and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def _num_moved(a: Tensor, b: Tensor) -> int:
    return int((a != b).reshape(-1, a.size(-1)).any(-1).sum()) if a.shape == b.shape and a.ndim else 0


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients; afterwards the mode is as before, and what a forward remembered is forgotten."""
    training = {module: module.training for module in model.modules()}
    plain = {module: dict(vars(module)) for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, before in plain.items():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and name in before:
                    vars(module)[name] = before[name]
        for module, mode in training.items():
            module.training = mode
