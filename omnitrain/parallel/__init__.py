"""Layouts applied to a model from outside."""
