"""LoRA adapters and their files."""
