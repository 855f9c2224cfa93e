"""Metrics of a run: meters, trackers, traces, the display."""
