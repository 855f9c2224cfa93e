"""Components on ranks of their own."""
