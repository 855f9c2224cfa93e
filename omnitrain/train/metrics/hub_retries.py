"""Say that a look-up on the Hugging Face Hub waits: its client tries again for half a minute, and logs that."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from huggingface_hub.utils import logging as hub_logging

_FAILED_REQUEST = re.compile(r"'(?P<why>.*)' thrown while requesting \w+ (?P<url>\S+)", re.DOTALL)


def tell_of_hub_retries(say: Callable[[str], None]) -> None:
    """Replace the client's log of every retry by one sentence for each file, which ``say`` prints."""
    logger = hub_logging.get_logger()
    for handler in list(logger.handlers):
        if isinstance(handler, _Retries):
            logger.removeHandler(handler)
        else:
            handler.setLevel(logging.ERROR)
    logger.setLevel(logging.WARNING)
    logger.addHandler(_Retries(say))


class _Retries(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._told = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        failed = _FAILED_REQUEST.search(record.getMessage())
        if failed is not None and failed["url"] not in self._told:
            self._told.add(failed["url"])
            self._say(
                f"the Hub does not answer ({failed['why']}, {failed['url']}); trying again for about half a minute. "
                "HF_HUB_OFFLINE=1 uses only files that are on this machine"
            )
