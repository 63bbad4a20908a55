import os
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file that `pagetide pull` fetched. Tests that use it carry the marker `model`."""
    from frontend.models import DEFAULT_MODEL, local_path

    path = local_path(DEFAULT_MODEL)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("the default model is missing: run `pagetide pull` first")
        pytest.skip("needs the default model: run `pagetide pull`")
    return path
