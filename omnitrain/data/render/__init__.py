"""A row becomes a sample: text and media through a HF processor or the recipe's chat format."""
