"""What a notebook needs besides: functions of cells on ranks, looks at data and layouts, and what cells show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.parallel.spawn.launch import RankResults, launch
    from omnitrain.parallel.spawn.pool import RankError
    from omnitrain.report.notebook import as_html
    from omnitrain.train.verbs.preview import data_stats, preview
    from omnitrain.train.verbs.schedule import show_schedule

__all__ = ["RankError", "RankResults", "as_html", "data_stats", "launch", "preview", "show_schedule"]

__getattr__ = on_first_use(__name__, __file__)
