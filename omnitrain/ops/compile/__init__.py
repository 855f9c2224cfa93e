"""``torch.compile`` for the blocks of a model."""
