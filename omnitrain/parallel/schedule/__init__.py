"""Run the schedule of a step: gradient accumulation, and pipelines."""
