import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import StartupError
from protocol.runtime_dir import RuntimeDir, _remove_stale, base_dir, running_engines

HOLDER = """
import sys
from pathlib import Path
from protocol.runtime_dir import RuntimeDir
print(RuntimeDir(Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


def test_private_and_removed(short_path: Path) -> None:
    mine = RuntimeDir(short_path / "base")
    assert mine.path.stat().st_mode & 0o777 == 0o700
    assert (short_path / "base").stat().st_mode & 0o777 == 0o700
    assert running_engines(short_path / "base") == [mine.path]
    (mine.path / "core.sock").touch()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
    assert running_engines(short_path / "base") == []


def test_two_engines_at_once_and_the_newest_first(short_path: Path) -> None:
    first, second = RuntimeDir(short_path), RuntimeDir(short_path)
    os.utime(first.path, (1, 1))
    assert running_engines(short_path) == [second.path, first.path]
    first.remove()
    second.remove()


def test_only_directories_of_the_dead_are_cleared_away(short_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(short_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdin
    theirs = Path(holder.stdout.readline().strip())
    mine = RuntimeDir(short_path)
    assert theirs.exists(), "its owner is alive"
    mine.remove()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert running_engines(short_path) == []
    mine = RuntimeDir(short_path)
    assert not theirs.exists()
    mine.remove()


def test_a_path_too_long_for_a_socket_is_a_clear_error(short_path: Path) -> None:
    with pytest.raises(StartupError, match=r"too long.*XDG_RUNTIME_DIR"):
        RuntimeDir(short_path / ("x" * 120))


def test_a_base_that_can_not_be_made_is_a_clear_error(short_path: Path) -> None:
    (short_path / "file").touch()
    with pytest.raises(StartupError, match="can't make the runtime directory"):
        RuntimeDir(short_path / "file" / "x")


def test_the_environment_chooses_the_base(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert base_dir() == short_path / "pagetide"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "missing"))
    assert base_dir().name == f"pagetide-{os.getuid()}"


def test_a_directory_being_made_is_left_alone(short_path: Path) -> None:
    (short_path / "no-lock-yet").mkdir()
    RuntimeDir(short_path).remove()
    assert (short_path / "no-lock-yet").exists()


def test_an_engine_that_looks_around_disturbs_none_that_is_starting(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others do between the making of our lock file and its locking."""
    lock = fcntl.flock

    def look_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        _remove_stale(short_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look_then_lock)
    mine = RuntimeDir(short_path)
    assert running_engines(short_path) == [mine.path]
    mine.remove()
