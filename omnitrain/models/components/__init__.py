"""What components give each other: protocols, outputs, media calls, and the contract."""
