"""Someone who waits for the Hub is told so."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from huggingface_hub.utils import logging as hub_logging

from omnitrain.train.metrics.display import tell_of_hub_retries

URL = "https://huggingface.co/org/name/resolve/main/config.json"


@pytest.fixture
def _logger_as_before() -> Iterator[None]:
    logger = hub_logging.get_logger()
    before = logger.level, list(logger.handlers), [handler.level for handler in logger.handlers]
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
    for handler, level in zip(before[1], before[2], strict=True):
        handler.setLevel(level)


@pytest.mark.usefixtures("_logger_as_before")
def test_a_look_up_without_a_network_says_once_that_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    """The client logs two lines for each of its retries."""
    said: list[str] = []
    for _ in range(2):  # a second verb in one process
        tell_of_hub_retries(said.append)
    client = logging.getLogger("huggingface_hub.utils._http")
    for retry in range(5):
        client.warning(f"'[Errno -2] Name or service not known' thrown while requesting HEAD {URL}")
        client.warning(f"Retrying in {2**retry}s [Retry {retry + 1}/5].")
    assert said == [
        f"the Hub does not answer ([Errno -2] Name or service not known, {URL}); trying again for about half a minute. "
        "HF_HUB_OFFLINE=1 uses only files that are on this machine"
    ]
    assert capfd.readouterr() == ("", "")
