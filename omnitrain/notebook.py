"""What a notebook needs besides: functions of cells on ranks, looks at data and layouts, and what cells show."""

from omnitrain.parallel.spawn.errors import RankError as RankError
from omnitrain.parallel.spawn.launch import RankResults as RankResults
from omnitrain.parallel.spawn.launch import launch as launch
from omnitrain.report.notebook import as_html as as_html
from omnitrain.train.verbs.data_stats import data_stats as data_stats
from omnitrain.train.verbs.preview import preview as preview
from omnitrain.train.verbs.schedule import show_schedule as show_schedule
