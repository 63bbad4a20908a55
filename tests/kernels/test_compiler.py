"""NVRTC without a GPU: every kernel compiles, nothing spills, the cache survives what users do to it."""

import stat
import warnings
from pathlib import Path

import pytest

from kernels import compiler
from kernels.compiler import Binary, Cache, KernelError, Variant, build, compile_variant, read_source, target_of
from kernels.cuda_layout import all_variants

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
PROBE = Variant("probe.cu")


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        compiler.load_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))


class FakeNvrtc:
    """Counts what it is asked to compile."""

    version = (13, 0)
    architectures: tuple[int, ...] = (75, 80, 86, 89, 90, 100, 120)

    def __init__(self) -> None:
        self.sources: list[str] = []

    def compile(self, source: str, name: str, options: tuple[str, ...], ptx: bool) -> tuple[bool, bytes, str]:
        self.sources.append(source)
        return True, b"ptx" if ptx else b"cubin", "Used 40 registers"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    found = FakeNvrtc()
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_variant_compiles_without_a_spill() -> None:
    # Each for one architecture, in turn; `tools/validate_kernels.py --compile` does all of them for all.
    jobs = [(unit, ARCHITECTURES[(i + i // 4) % 4]) for i, unit in enumerate(all_variants())]
    binaries = build(jobs)
    spilled = [(job, binary.spill_bytes) for job, binary in zip(jobs, binaries, strict=True) if binary.spill_bytes]
    assert not spilled
    for (unit, _), binary in zip(jobs, binaries, strict=True):
        assert binary.image.startswith(b"\x7fELF"), unit
        assert 0 < binary.registers <= 255, (unit, binary.log)


def test_ptx_for_a_gpu_that_nvrtc_does_not_know() -> None:
    newest = max(compiler.load_nvrtc().architectures)
    target = target_of(newest + 10)
    assert target == f"compute_{newest}"
    image = compile_variant(PROBE, target, Cache(None)).image
    assert b".visible .entry probe" in image


def test_a_minor_version_that_is_not_listed_uses_the_one_below(fake: FakeNvrtc) -> None:
    assert target_of(88) == "sm_86"
    assert target_of(90) == "sm_90"


def test_too_old_a_gpu_is_named(fake: FakeNvrtc) -> None:
    with pytest.raises(KernelError, match=r"Quadro P4000 has compute capability 6\.1.*NVRTC 13\.0.*CUDA 12\.4"):
        target_of(61, "Quadro P4000", "12.4")
    fake.architectures = (90, 100)  # a later NVRTC drops what ours still runs on
    with pytest.raises(KernelError, match=r"compute capability 8\.6.*9\.0 or newer"):
        target_of(86)


def test_missing_nvrtc_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(compiler, "_BindingsNvrtc", missing)
    monkeypatch.setattr(compiler, "_CupyNvrtc", missing)
    with pytest.raises(KernelError, match="cuda-bindings and nvidia-cuda-nvrtc, or CuPy"):
        compiler.load_nvrtc.__wrapped__()


def test_a_compile_error_shows_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "read_source", lambda file: "this is no kernel;")
    with pytest.raises(KernelError, match=r"(?s)probe\.cu.*sm_90.*error"):
        compile_variant(PROBE, "sm_90", Cache(None))


def test_no_kernel_includes_a_toolkit_header() -> None:
    for file in {unit.file for unit in all_variants()}:
        source = read_source(file)
        assert "#include" not in source
        assert source.count("typedef unsigned char u8;") <= 1


def test_spills_are_read_from_the_log() -> None:
    log = "    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nptxas info    : Used 255 registers"
    assert Binary(b"", log).spill_bytes == 28
    assert Binary(b"", log).registers == 255


def test_cache_key_covers_includes(tmp_path: Path, fake: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    (tmp_path / "probe.cu").write_text('#include "common.cuh"\nbody\n')
    for header in ("#pragma once\none\n", "#pragma once\none\n", "#pragma once\ntwo\n"):
        (tmp_path / "common.cuh").write_text(header)
        read_source.cache_clear()
        compile_variant(PROBE, "sm_90", Cache(tmp_path / "cache"))
    read_source.cache_clear()
    assert fake.sources == ["one\nbody\n", "two\nbody\n"]


def test_cache_is_private_and_checks_itself(tmp_path: Path, fake: FakeNvrtc) -> None:
    directory = tmp_path / "pagetide" / "kernels"
    first = compile_variant(PROBE, "sm_90", Cache(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert compile_variant(PROBE, "sm_90", Cache(directory)) == first
    assert len(fake.sources) == 1
    (file,) = directory.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert compile_variant(PROBE, "sm_90", Cache(directory)) == first
    assert len(fake.sources) == 2


def test_unwritable_cache_warns_once_and_works(tmp_path: Path, fake: FakeNvrtc) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(RuntimeWarning, match="memory only") as caught:
        cache = Cache(blocked / "kernels")
    for target in ("sm_90", "sm_80", "sm_80"):  # a second warning would be an error
        compile_variant(PROBE, target, cache)
    assert len(caught) == 1
    assert len(fake.sources) == 2


def test_disk_that_fills_up_warns_once_and_works(
    tmp_path: Path, fake: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "kernels")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        compile_variant(PROBE, "sm_90", cache)
    compile_variant(PROBE, "sm_80", cache)  # a second warning would be an error
    assert len(caught) == 1
    assert list((tmp_path / "kernels").iterdir()) == []


def test_no_home_directory_is_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiler.Path, "home", homeless)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.user_cache.__wrapped__()._directory is None
