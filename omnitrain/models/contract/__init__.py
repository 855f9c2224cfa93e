"""The contract check: measure on a tiny model which optimizations keep the training of a foundation exact."""
