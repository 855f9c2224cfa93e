"""``OmniModel``: built, run, generated from and saved as one HF-style model."""
