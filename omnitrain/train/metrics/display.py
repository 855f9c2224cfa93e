"""The output of a run before and after training: tables at the start, and a table of scores at the end."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import datasets
from huggingface_hub.utils import logging as hub_logging
from rich.markup import escape
from rich.table import Table
from transformers.utils import logging as hf_logging

from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.components.contract import Contract
from omnitrain.models.hf.load import OWN_HEAD, unused_line
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import ComponentRow
from omnitrain.parallel.verify.coverage import Coverage
from omnitrain.recipe.component_configs import OmniConfig
from omnitrain.train.metrics.console import console


def quiet_libraries() -> None:
    """Turn off progress bars and advice of HF libraries; omnitrain prints or raises everything that matters."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # omnitrain raises an error for unreadable files
    tell_of_hub_retries(functools.partial(console.print, markup=False))
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def show_components(rows: list[ComponentRow]) -> None:
    """Print the component table."""
    table = Table(title="Model", title_justify="left")
    table.add_column("component", no_wrap=True)
    for column in ("class", "parameters", "trainable", "dtype", "ops"):
        table.add_column(column, overflow="fold")  # a narrow terminal cuts no name
    for row in rows:
        trainable = f"{row.trainable:,}" if row.trainable else "frozen"
        table.add_row(row.name, row.class_name, f"{row.parameters:,}", trainable, row.dtype, row.ops)
    console.print(table)


def show_contract(contract: Contract, *, in_full: bool) -> None:
    """Print the findings of the contract check; without ``in_full`` only those that did not pass."""
    findings = [finding for finding in contract.findings if in_full or finding.outcome != "passed"]
    if findings:
        table = Table("check", "outcome", "what was measured", title="Contract of the foundation", title_justify="left")
        for finding in findings:
            table.add_row(finding.check, finding.outcome, finding.fact)
        console.print(table)


def show_coverage(coverage: Coverage) -> None:
    """Print how each component reads its media, and a row for each feature: equal, fallback, refused, or wrong."""
    table = Table("feature", "result", "why", title="Coverage", title_justify="left")
    for name, how in coverage.components.items():
        table.add_row(name, how, "")
    table.add_section()
    for name, cell in coverage.cells.items():
        table.add_row(name, cell.result, escape(cell.why))
    console.print(table)


def show_unused(unused: Mapping[str, int] | None) -> None:
    """Print the tensors of the checkpoint that the foundation does not have, if any."""
    if line := unused_line(unused):
        console.print(line, markup=False)


def show_added_tokens(model: OmniModel) -> None:
    """Print the tokens that the foundation's checkpoint does not know, if any, and whether their rows train."""
    if not (tokens := model.added_tokens):
        return
    ids = f"1 token (id {tokens[0]})" if len(tokens) == 1 else f"{len(tokens)} tokens (ids {tokens[0]} to {tokens[-1]})"
    trains = any(p.requires_grad for p in model.foundation.get_input_embeddings().parameters())
    none, rows = "no row trains: they are frozen", "only new rows train" if token_matrices(model) else "all rows train"
    console.print(f"new to the foundation: {ids}; of its embeddings, {rows if trains else none}", soft_wrap=True)


def show_own_head(config: OmniConfig) -> None:
    """Print that the head is not tied, if the config of the foundation's checkpoint says that it is."""
    if config.has_own_head:
        console.print(OWN_HEAD, markup=False)


def show_kept_memory(by_source: Mapping[str, float], pack_tokens: int) -> None:
    """Print the memory that a full pack of each source keeps for its backward, in GiB."""
    shown = ", ".join(f"{source} {size / 2**30:.2f}" for source, size in by_source.items())
    console.print(f"a full pack of {pack_tokens:,} tokens keeps about this much for its backward, in GiB: {shown}")


def show_scores(scores: dict[str, Any], title: str) -> None:
    """Print a table of scores, with shares as percentages."""
    table = Table("held-out", "score", title=title, title_justify="left")
    for name, value in scores.items():
        is_share = isinstance(value, float) and 0 <= value <= 1
        table.add_row(name, f"{100 * value:.1f} %" if is_share else f"{value:.4g}")
    console.print(table)


_FAILED_REQUEST = re.compile(r"'(?P<why>.*)' thrown while requesting \w+ (?P<url>\S+)", re.DOTALL)


def tell_of_hub_retries(say: Callable[[str], None]) -> None:
    """Replace the client's log of every retry by one sentence for each file, which ``say`` prints."""
    logger = hub_logging.get_logger()
    for handler in list(logger.handlers):
        if isinstance(handler, _Retries):
            logger.removeHandler(handler)
        else:
            handler.setLevel(logging.ERROR)
    logger.setLevel(logging.WARNING)
    logger.addHandler(_Retries(say))


class _Retries(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._told = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        failed = _FAILED_REQUEST.search(record.getMessage())
        if failed is not None and failed["url"] not in self._told:
            self._told.add(failed["url"])
            self._say(
                f"the Hub does not answer ({failed['why']}, {failed['url']}); trying again for about half a minute. "
                "HF_HUB_OFFLINE=1 uses only files that are on this machine"
            )
