"""Figures and pages about a machine or a run."""
