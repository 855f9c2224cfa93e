"""Imported last by the process that forks ranks: no rank looks for garbage in what it has imported."""

import gc

gc.collect()
gc.freeze()
