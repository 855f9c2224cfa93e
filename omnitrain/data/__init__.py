"""Rows -> samples -> packs."""
