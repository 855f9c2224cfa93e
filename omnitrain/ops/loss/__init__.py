"""Cross entropy in chunks, and over a vocabulary that is sharded."""
