"""Private names of torch and transformers stand in one file for each, and the installed versions have them."""

import ast
import functools
import gc
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    WhisperPreTrainedModel,
    core_model_loading,
)
from transformers import modeling_rope_utils as rope
from transformers.integrations import deepgemm
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.models.decoders.latents import PatchCodec
from omnitrain.recipe.component_configs import PatchCodecConfig

PACKAGE = Path(__file__).parents[1] / "omnitrain"
FILES = {library: PACKAGE / f"{library}_private.py" for library in ("torch", "transformers")}
_OF_MODULES = """_parameters _buffers _modules _non_persistent_buffers_set _compiled_call_impl
    _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"""
_OF_CONFIGS = """_attn_implementation _attn_implementation_internal
    _experts_implementation _experts_implementation_internal"""
_OF_MODELS = """_supports_sdpa _keep_in_fp32_modules_strict _can_set_attn_implementation _can_record_outputs
    _tied_weights_keys"""
_OF_GROUPS = """_register_post_backward_hook _post_forward_indices
    fsdp_params pre_forward post_forward post_backward post_forward_mesh_info"""
_OF_PARAMETERS = "_sharded_param_data all_gather_inputs init_all_gather_outputs param_dtype"
_ADD_UP = """accumulate_unsharded_grad_if_needed|_set_unsharded_grad_dtypes
    to_accumulated_grad_if_needed|_set_unsharded_grad_dtypes"""
# Attributes of objects: library -> (owner, its attributes). Names between bars are spellings, of which one is enough.
ATTRIBUTES: dict[str, list[tuple[Any, str]]] = {
    "torch": [
        (torch.ops.aten.mm.default, "_schema _overloadpacket"),
        (torch.Tensor, "_version"),
        (DTensor, "_local_tensor"),
        (torch.UntypedStorage, "_cdata"),
        (nn.Module(), _OF_MODULES),
        (torch.optim.AdamW, "_init_group"),
        (dist.ProcessGroup, "_device_types _get_backend"),
        (_distributed_c10d.Backend.Options, "_timeout"),
        (dist.ProcessGroupGloo, "_set_default_timeout _get_sequence_number_for_group"),
        (dist.ProcessGroupGloo._Options, "_timeout"),
        (FSDPModule, "_get_fsdp_state"),
        (_fsdp_state.FSDPState, "_lazy_init _register_pre_backward_hook _root_post_backward_final_callback"),
        (_fsdp_state.FSDPState(), "_fsdp_param_groups|_fsdp_param_group"),
        (_fsdp_param_group.FSDPParamGroup, _OF_GROUPS),
        ((_fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam), _ADD_UP),
        (_fsdp_state, "_state_ctx _comm_ctx _training_state _modules_to_run_forward"),
        (_fsdp_param.FSDPParam, _OF_PARAMETERS),
        (_fsdp_collectives.DefaultReduceScatter, "allocate"),
        (_fsdp_collectives.foreach_reduce, "reduce_scatter_input"),
        (SubprocessHandler, "_stdout _stderr"),
    ],
    "transformers": [
        (PreTrainedConfig(), _OF_CONFIGS),
        (PreTrainedModel, _OF_MODELS),
        (PatchCodec(PatchCodecConfig()), "_is_hf_initialized"),
        (AutoModelForCausalLM, "_model_mapping"),
        (core_model_loading, "_weight_conversions"),
        (deepgemm, "_apply_gate"),
        (GradientCheckpointingLayer, "_gradient_checkpointing_func"),
        (WhisperPreTrainedModel, "_get_feat_extract_output_lengths"),
        (rope, "_rope_type_labels"),
    ],
}
# Private names of others, which are theirs to keep: Python's, datasets', and jinja's.
_OF_OTHERS = {"_replace", "_asdict", "_fields", "_exit", "_getframe", "_current_frames"}
_OF_OTHERS |= {"_indices", "_fingerprint", "_write"}
_OWN = {"self", "cls", "super"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    kinds = (ast.Attribute, ast.ClassDef, ast.Constant, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


@functools.cache
def _imported(path: Path) -> dict[str, str]:
    """Name in a file -> what it stands for in torch or transformers."""
    found = {}
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return {name: full for name, full in found.items() if full.partition(".")[0] in FILES}


def _dotted(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; with an empty first part if it begins with something else than a name."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _owner(node: ast.AST) -> str:
    """A name, ``super`` of ``super()``, or ``.`` for any other expression."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else "."


def _paths(path: Path) -> set[str]:
    """The private names that a file reaches from its imports, and all names of private modules."""
    imported = _imported(path)
    chains = {tuple(_dotted(node)) for node in _nodes(path) if isinstance(node, ast.Attribute)}
    full = [[*imported[first].split("."), *rest] for first, *rest in chains if first in imported]
    full += [name.split(".") for name in imported.values()]
    return {".".join(parts) for parts in full if any(map(_is_private, parts))}


def _attributes(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what has it (empty: an expression) and name of the private attributes of a file that is no import."""
    imported = _imported(path)
    for node in _nodes(path):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and _dotted(node)[0] not in imported:
            yield node.lineno, _owner(node.value), node.attr
        elif isinstance(node, ast.ClassDef) and node.bases:
            yield from ((node.lineno, "", name) for name in _in_body(node) if _is_private(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield node.lineno, "", node.value


@functools.cache
def _defined(path: Path) -> set[str]:
    """Names that the classes of a file define, in their bodies or as ``self.name = ...``."""
    nodes = _nodes(path)
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    names = {node.attr for node in stored if _owner(node.value) in _OWN}
    return names.union(*(_in_body(node) for node in nodes if isinstance(node, ast.ClassDef)))


def _in_body(node: ast.ClassDef) -> set[str]:
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    for inner in node.body:
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _get(path: str) -> Any:
    """The object of a dotted path; AttributeError: it is gone."""
    parts = path.split(".")
    for size in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[size:], module)
    raise AttributeError(path)


def _has(owner: Any, name: str) -> bool:
    """Whether an object (of several: any) has the attribute, or its source sets it later."""
    if isinstance(owner, tuple):
        return any(_has(one, name) for one in owner)
    if hasattr(owner, name):
        return True
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    except (OSError, TypeError):  # it is an instance, or written in C++
        return False


def _gone(library: str) -> list[str]:
    """The names of a library's file that the installed version lacks."""
    gone = []
    for path in sorted(_paths(FILES[library])):
        try:
            _get(path)
        except AttributeError:
            gone.append(path)
    for owner, names in ATTRIBUTES[library]:
        lacks = [one for one in names.split() if not any(_has(owner, spelling) for spelling in one.split("|"))]
        gone += [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for name in lacks]
    return gone


def _known(library: str) -> set[str]:
    """The private attributes of objects that the table has."""
    return {one for _, names in ATTRIBUTES[library] for one in re.findall(r"\w+", names) if _is_private(one)}


@pytest.mark.parametrize("library", FILES)
def test_the_installed_version_has_every_private_name(library: str) -> None:
    assert _gone(library) == [], f"gone in {library} {importlib.metadata.version(library)}"


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils._pytree, "tree_any")
    monkeypatch.setitem(ATTRIBUTES, "torch", [(torch.optim.AdamW, "_init_group _gone")])
    monkeypatch.delattr(PreTrainedModel, "_load_pretrained_model")
    assert _gone("torch") == ["torch.utils._pytree.tree_any", "AdamW._gone"]
    assert _gone("transformers") == ["transformers.PreTrainedModel._load_pretrained_model"]


@pytest.mark.parametrize("library", FILES)
def test_the_table_has_every_attribute_of_the_file(library: str) -> None:
    used = {name for _, _, name in _attributes(FILES[library]) if name != "_ATEN"}
    assert used - {"_c10d_functional"} == _known(library)


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """Parsing makes a million objects, and each collection looks through those of all tests before."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
def test_no_other_file_uses_a_private_name() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in FILES.values()]
    ours = set().union(*(_defined(path) for path in files))
    assert [use for path in files for use in _used_by(path, ours)] == []


def _used_by(path: Path, ours: set[str]) -> Iterator[str]:
    """Private names that a file imports, or uses of an object although omnitrain (``ours``) does not define them."""
    yield from (f"{path.name}: {name}" for name in _paths(path))
    here, theirs = _defined(path), _known("torch") | _known("transformers")
    for line, owner, name in _attributes(path):
        is_own = name in (ours if owner in _OWN else here)
        is_foreign = owner and not is_own and name not in _OF_OTHERS
        if is_foreign or (name in theirs and not (owner and name in here)):
            yield f"{path.name}:{line}: {name}"


def test_a_private_name_is_found_wherever_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        """
import torch
from torch.nn.modules import batchnorm
from torch.utils._pytree import tree_map
class Mine(torch.optim.AdamW):
    _supports_sdpa = True
    def mine(self, module):
        self._mine = module._forward_hooks_with_kwargs
        self._mine, getattr(module, "_buffers"), torch._C.x, batchnorm._NormBase, self._foreign
"""
    )
    assert sorted(name.rpartition(" ")[2] for name in _used_by(file, {"_mine"})) == [
        "_buffers",
        "_foreign",
        "_forward_hooks_with_kwargs",
        "_supports_sdpa",
        "torch._C",
        "torch._C.x",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.utils._pytree.tree_map",
    ]
