"""Find the files of a data set, and open them as a table by their suffix."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.csv

from omnitrain.data.sources.arrow_table import ArrowTable
from omnitrain.data.sources.documents import TextFiles
from omnitrain.data.sources.files import FileReader, ReadError, find_files, is_url
from omnitrain.data.sources.json_lines import JsonLines
from omnitrain.data.sources.parquet_rows import ParquetRows
from omnitrain.data.sources.schema import schema_of
from omnitrain.data.sources.stream import Stream
from omnitrain.data.sources.table import Table
from omnitrain.data.sources.tar_shards import TarShards
from omnitrain.errors import DataError
from omnitrain.recipe import DataSource
from omnitrain.recipe.suggest import nearest

# Suffix -> the format in words.
FORMATS = {
    ".parquet": "parquet",
    ".arrow": "Arrow",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON",
    ".csv": "csv",
    ".tar": "tar shards",
    ".txt": "text",
    ".md": "text",
}
_MANIFESTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # of a folder of media, as HF `datasets` has them
# Of HF `datasets` and its Hub: they describe the rows that other files of the folder have.
_DESCRIPTIONS = ("README.md", "dataset_info.json", "dataset_dict.json", "state.json")
_NO_FINGERPRINT = "none"


def suffix_of(file: str) -> str:
    """Return the suffix that decides how a file is read. A file with another suffix is read as parquet."""
    suffix = Path(file.partition("?")[0] if is_url(file) else file).suffix.lower()
    return suffix if suffix in FORMATS else ".parquet"


def files_of(source: DataSource) -> tuple[list[str], str | None]:
    """Return files (none: a data set of the Hub) and media folder; DataError: several formats, or no file."""
    folder = Path(source.path)
    if not is_url(source.path) and folder.is_dir():
        for name in _MANIFESTS:
            if (folder / name).is_file():
                return [str(folder / name)], source.media_folder or source.path
    found = find_files(source.path, tuple(FORMATS))
    if len({FORMATS[suffix_of(file)] for file in found}) > 1:
        found = [file for file in found if Path(file).name not in _DESCRIPTIONS]
    _require_one_format(source.path, found)
    if not found and (is_url(source.path) or folder.suffix or folder.exists() or source.path.count("/") != 1):
        where = "" if is_url(source.path) else f" (looked in {folder.absolute()})"
        raise DataError(f"data: no file of data at {source.path!r}{where}{_nearest_file(source.path)}")
    return found, source.media_folder


def _require_one_format(path: str, files: Sequence[str]) -> None:
    by_format: dict[str, list[str]] = {}
    for file in files:
        by_format.setdefault(FORMATS[suffix_of(file)], []).append(file)
    if len(by_format) > 1:
        folder = Path(path)
        inside = folder / "**" if folder.is_dir() else folder.parent
        firsts = {kind: Path(of_kind[0]) for kind, of_kind in by_format.items()}
        counts = [f"{len(by_format[kind])} file(s) of {kind} ({one.name!r}, ...)" for kind, one in firsts.items()]
        paths = [repr(str(inside / f"*{one.suffix}")) for one in firsts.values()]
        raise DataError(
            f"data: {path!r} has {' and '.join(counts)}; set `path` to {' or '.join(paths)}; to use several, "
            "list several data sets"
        )


def open_table(source: DataSource, files: Sequence[str], reader: FileReader) -> Table:
    """Open files of one format, or the Hub's data set if there are none; DataError: they cannot be read."""
    kind = FORMATS[suffix_of(files[0])] if files else "Hub"
    try:
        return _open(source, files, kind, reader)
    except FileNotFoundError as error:
        raise DataError(f"data: {source.path!r}: no such file: {error}") from error
    except ImportError as error:
        raise DataError(f"data: {source.path!r}: a package is missing: {error}") from error
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        hint = " (JSON Lines end in .jsonl)" if kind == "parquet" else ""
        folder = f"from the Hub, and no such folder exists ({Path(source.path).absolute()})"
        where = f"as {kind}{hint}" if files else folder
        reason = error if isinstance(error, ReadError) else error.__cause__ or error
        raise DataError(f"data: {source.path!r} cannot be read {where}: {reason}") from error


def _open(source: DataSource, files: Sequence[str], kind: str, reader: FileReader) -> Table:
    choose = partial(schema_of, source)
    match kind:
        case "Hub":
            options = {"name": source.subset, "revision": source.revision, "split": source.split}
            if source.streaming:
                return Stream(datasets.load_dataset(source.path, streaming=True, **options), choose)
            return ArrowTable(datasets.load_dataset(source.path, **options), choose)
        case "parquet" if source.copy_parquet and not is_url(files[0]):
            names = [glob.escape(str(Path(file).absolute())) for file in files]  # load_dataset treats names as globs
            copied = datasets.load_dataset("parquet", data_files=names, split="train")
            return ArrowTable(copied, choose)
        case "parquet":
            return ParquetRows(files, choose, reader=reader)
        case "JSON Lines" | "JSON":
            return JsonLines(files, choose, reader=reader)
        case "tar shards":
            return TarShards(files, choose, reader=reader)
        case "text":
            return TextFiles(files, choose, reader=reader)
    read = _mapped_arrow if kind == "Arrow" else _csv_texts
    table = pa.concat_tables([read(file, reader) for file in files])
    # datasets would read all rows for a fingerprint, which is of use to its cache alone.
    data = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=_NO_FINGERPRINT)
    return ArrowTable(data, choose)


def _mapped_arrow(file: str, reader: FileReader) -> pa.Table:
    """Return a file of Arrow's file or stream format; on this machine, its bytes stay where they are."""
    source = pa.BufferReader(reader.read(file)) if is_url(file) else pa.memory_map(file)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _csv_texts(file: str, reader: FileReader) -> pa.Table:
    """Return a csv file in memory, with all values as texts: digits stay as they are written."""
    content = pa.BufferReader(reader.read(file))
    lines = pyarrow.csv.ParseOptions(newlines_in_values=True)
    names = pyarrow.csv.open_csv(content, parse_options=lines).schema.names
    content.seek(0)
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    return pyarrow.csv.read_csv(content, parse_options=lines, convert_options=texts)


def _nearest_file(given: str) -> str:
    path = Path(given)
    if is_url(given) or path.is_dir():
        return ""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    close = nearest(path.name, (file.name for file in path.parent.iterdir()))
    return f"; did you mean {str(path.parent / close)!r}?" if close else ""
