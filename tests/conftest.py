"""Settings of all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.forkserver import FOLDER
from tests.s3 import serving, set_environment
from tests.tiers import set_tiers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tests.s3 import Bucket

#: `make test` tries the same examples every time, `make test-all` others every time. No test fails
#: for being slow: the cores are shared. A fixture that all examples of a test share is meant to be.
_CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile(
    "ucformat", deadline=None, suppress_health_check=_CHECKS, derandomize=True, database=None
)
settings.register_profile("explore", deadline=None, suppress_health_check=_CHECKS)
settings.load_profile("ucformat")

#: Tests sync thousands of small files; in memory that costs nothing. TMPDIR, where it is set, is
#: another choice.
_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes folders of its own there
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 8 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

_SERVERS = tempfile.TemporaryDirectory(prefix="ucf-")
os.environ.setdefault(
    FOLDER, _SERVERS.name
)  # test processes that xdist starts have it from the first

os.environ["UCP_CATALOG"] = (
    "none"  # the user's own catalog is none of our business; tests of the catalog name theirs
)
_DATA = tempfile.TemporaryDirectory(prefix="ucformat-")  # nor are the user's other data
os.environ["XDG_DATA_HOME"] = _DATA.name
os.environ["XDG_CONFIG_HOME"] = f"{_DATA.name}/config"  # nor the user's settings

# A shell that starts something in the background has it ignore Ctrl-C, and so would all that the
# tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Mark what `make test` leaves to `make test-all`; see `tests.tiers`."""
    made = yield
    if isinstance(made, list):  # the cases of one function
        set_tiers(made)
    return made


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """A bucket of a real HTTP endpoint, which this process's object stores then use."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch)
        with serving() as found:
            patch.setenv("UCP_ENDPOINT", found.endpoint)
            yield found


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder that all test processes of this session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base
