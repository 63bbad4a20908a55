"""What the launcher does without a GPU."""

import ctypes
from collections.abc import Iterable
from typing import Any

import pytest

from kernels import launcher
from kernels.compiler import Variant


def test_what_is_loaded_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Variant("one_row.cu"), Variant("few_rows.cu")
    built: list[tuple[Variant, str]] = []

    def build(jobs: Iterable[tuple[Variant, str]]) -> None:
        built.extend(jobs)

    monkeypatch.setattr(launcher, "build", build)
    monkeypatch.setattr(launcher, "device_target", lambda device: f"sm_{device}")
    monkeypatch.setattr(launcher, "_loaded", {(one, 90): None})
    launcher.build_for([one, other], 90)
    assert built == [(other, "sm_90")]
    launcher.build_for([one, one], 90)
    launcher.build_for([one], 80)
    assert built == [(other, "sm_90"), (one, "sm_80")]


@pytest.mark.parametrize(
    ("blocks", "static", "dynamic", "percent"), [(1, 33280, 0, 15), (2, 33280, 0, 30), (1, 0, 232448, 100)]
)
def test_what_the_resident_blocks_do_not_use_is_left_to_l1(
    monkeypatch: pytest.MonkeyPatch, blocks: int, static: int, dynamic: int, percent: int
) -> None:
    """On a played H200, whose multiprocessors have 228 KiB of shared memory, of which each block costs 1."""
    told: list[tuple[int, int]] = []

    class Driver:
        def cuFuncGetAttribute(self, found: Any, which: int, function: object) -> int:
            found._obj.value = {1: static}[which]
            return 0

        def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, found: Any, *_: object) -> int:
            found._obj.value = blocks
            return 0

        def cuDeviceGetAttribute(self, found: Any, which: int, device: int) -> int:
            found._obj.value = {81: 228 << 10}[which]
            return 0

        def cuFuncSetAttribute(self, function: object, which: int, value: int) -> int:
            told.append((which, value))
            return 0

    monkeypatch.setattr(launcher, "driver", Driver)
    monkeypatch.setattr(launcher, "_attribute", launcher._attribute.__wrapped__)
    kernel = object.__new__(launcher.Kernel)
    kernel._function, kernel._entry, kernel._threads, kernel._shared = ctypes.c_void_p(), "played", 256, dynamic
    kernel._device = 0
    kernel.leave_the_rest_to_l1()
    assert told == [(9, percent)]
