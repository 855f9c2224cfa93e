"""Cross entropy in chunks, and over a sharded vocabulary."""
