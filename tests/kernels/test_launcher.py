"""What the launcher does without a GPU."""

from collections.abc import Iterable

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
