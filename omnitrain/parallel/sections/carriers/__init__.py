"""Ways to bring messages from one rank to another."""
