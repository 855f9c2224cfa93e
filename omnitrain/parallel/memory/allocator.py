"""The available memory of this machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that new processes can use, by /proc/meminfo and the container's limit; None without them."""
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_read_int(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(limit - used, 0))
    return min(free, default=None)


def _read_int(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
