"""Fixtures and settings that tests of several folders share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# As engine_core/load.py does, before torch is loaded: OpenMP threads that spin long stall when a core is taken.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory whose path leaves room for the names of unix sockets; pytest's own is often too long."""
    path = Path(tempfile.mkdtemp(prefix="pt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file that `pagetide pull` fetched. Tests that use it carry the marker `model`."""
    from frontend.models import DEFAULT_MODEL, local_path

    path = local_path(DEFAULT_MODEL)
    if path is None:
        pytest.skip("needs the default model: run `pagetide pull`")
    return path
