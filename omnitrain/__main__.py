"""``python -m omnitrain`` is ``omnitrain``."""

from omnitrain.cli.main import app

app(prog_name="omnitrain")
