"""What a notebook needs besides: ranks that call a function of a cell, and looks at the data of a recipe."""

from omnitrain.parallel.spawn.errors import RankError as RankError
from omnitrain.parallel.spawn.launch import RankResults as RankResults
from omnitrain.parallel.spawn.launch import launch as launch
from omnitrain.train.verbs.data_stats import data_stats as data_stats
from omnitrain.train.verbs.preview import preview as preview
