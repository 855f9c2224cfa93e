"""Rows as eight formats publish them, and what the formats' own packages train of them."""
