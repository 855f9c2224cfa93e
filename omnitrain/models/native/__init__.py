"""Whole HuggingFace multimodal models as foundation: components, rows, positions; found from signatures and configs."""
