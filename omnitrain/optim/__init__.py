"""Optimizers, schedules and the one gradient norm."""
