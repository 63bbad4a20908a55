"""Fixtures that tests of several folders share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory whose path leaves room for the names of unix sockets; pytest's own is often too long."""
    path = Path(tempfile.mkdtemp(prefix="pt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
