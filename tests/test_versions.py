"""``make test-versions`` installs into an environment only what it lacks."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.versions import HAS_ALL


@pytest.mark.parametrize("asked", ["torch==1.0.*", "omnitrain-of-tomorrow"])
def test_an_environment_that_lacks_a_package_is_completed(asked: str) -> None:
    minor = version("torch").rpartition(".")[0]
    for wanted, found in (((f"torch=={minor}.*",), 0), ((f"torch=={minor}.*", asked), 1)):
        assert subprocess.run([sys.executable, "-c", HAS_ALL, *wanted], capture_output=True).returncode == found
