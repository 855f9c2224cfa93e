"""Runs: training, evaluation, and the verbs that need a model."""
