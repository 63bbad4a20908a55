"""A small run of the CUDA engine under compute-sanitizer, where the CUDA toolkit is installed."""

import glob
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

RUN = "tests/engine_core/test_cuda_runner.py::test_a_crowd_gets_the_likeliest_tokens"
FOUND = shutil.which("compute-sanitizer") or max(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), default="")


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FOUND, reason="no compute-sanitizer: it comes with the CUDA toolkit")
def test_prefills_decodes_and_swaps_touch_only_their_own_memory() -> None:
    options = ["--tool", "memcheck", "--error-exitcode", "9"]
    command = [FOUND, *options, sys.executable, "-m", "pytest", "-q", RUN]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, told(done.returncode, done.stdout, done.stderr)


def told(code: int, stdout: str, stderr: str) -> str:
    """The sanitizer's summary, and the ends of what it and pytest said."""
    summary = [line for text in (stdout, stderr) for line in text.splitlines() if "ERROR SUMMARY" in line]
    ends = [f"-- {name}\n" + "\n".join(text.splitlines()[-40:]) for name, text in (("out", stdout), ("err", stderr))]
    return "\n".join([f"exit code {code}", *(summary or ["no ERROR SUMMARY"]), *ends])
