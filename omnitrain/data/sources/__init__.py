"""Data sets as rows: parquet, the Hub and JSON Lines, and the media in them."""
