"""No file that the step loop runs through waits for the device: a scan for the calls that would."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    "engine_core/core.py",
    "engine_core/scheduler.py",
    "engine_core/residency.py",
    "engine_core/block_pool.py",
    "engine_core/output.py",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("engine_core/cuda_*.py")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/cuda_*.py")),
    "kernels/launcher.py",
]
WAITS = {"synchronize", "item", "cpu", "tolist", "nonzero", "wait"}
"""Names of methods and functions that wait for a device, or may."""

ALLOWED = {
    "engine_core/cuda_runner.py:CudaStep.tokens": "where the loop collects a step: the one wait, without the GIL",
    "engine_core/cuda_runner.py:CudaRunner.capture": "loading",
    "engine_core/cuda_inputs.py:StepInputs.upload": "for the step before the last to have taken its upload",
    "engine_core/cuda_sampler.py:PendingLogprobs.collect": "of host memory, when its step has been collected",
    "engine_core/cuda_transfer.py:CudaTransfer.close": "at the end of the process",
    "kernels/launcher.py:Kernel.__init__": "loading",
    "kernels/launcher.py:probe": "loading",
}


def waits(source: str) -> Iterator[tuple[str, str]]:
    """(function, call) of each call whose name is one of `WAITS`."""

    def walk(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", None) or getattr(function, "id", "")
            if name in WAITS:
                yield where, name
        for child in ast.iter_child_nodes(node):
            yield from walk(child, where)

    yield from walk(ast.parse(source), "")


@pytest.mark.parametrize("name", FILES)
def test_nothing_on_the_step_path_waits_for_the_device(name: str) -> None:
    found = {f"{name}:{where} {call}" for where, call in waits((ROOT / name).read_text())}
    assert not {one for one in found if one.split()[0] not in ALLOWED}


def test_the_scan_finds_what_it_is_for() -> None:
    source = "class A:\n def f(self):\n  x.item()\n  torch.cuda.synchronize()\ndef g():\n  y.cpu().numpy()"
    assert [*waits(source)] == [("A.f", "item"), ("A.f", "synchronize"), ("g", "cpu")]


def test_what_is_allowed_is_still_there() -> None:
    for where in ALLOWED:
        name, function = where.split(":")
        path = ROOT / name
        assert not path.exists() or function in {found for found, _ in waits(path.read_text())}, where
