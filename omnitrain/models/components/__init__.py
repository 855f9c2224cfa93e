"""Interfaces between components: protocols, outputs, media calls, and the contract."""
