"""Ranks as child processes: a pool, its workers, their errors, and notebooks."""
