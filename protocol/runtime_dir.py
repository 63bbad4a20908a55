"""A private directory per engine start, which holds its sockets: `<base>/<pid>-<random>/` with mode 0700.

Whoever starts the engine owns the directory and holds a lock on its `lock` file as long as it lives, so a directory
whose lock can be taken belongs to nobody and may be removed. Frontends find a running engine by looking for held locks.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from protocol.errors import StartupError

# sun_path holds 108 bytes; ZeroMQ and the socket names below need some of them.
MAX_PATH_BYTES = 100
LONGEST_SOCKET = "detokenizer-4194304-ffffff.sock"


def base_dir() -> Path:
    """The folder that holds one directory per running engine, from the environment's runtime directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "pagetide"
    return Path(tempfile.gettempdir()) / f"pagetide-{os.getuid()}"


def _is_held(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def running_engines(base: Path | None = None) -> list[Path]:
    """Directories of live engines, newest first."""
    base = base or base_dir()
    with contextlib.suppress(FileNotFoundError):
        held = [entry for entry in base.iterdir() if entry.is_dir() and _is_held(entry)]
        return sorted(held, key=lambda entry: entry.stat().st_mtime, reverse=True)
    return []


class RuntimeDir:
    """The directory of one engine, owned by this process until `remove`."""

    def __init__(self, base: Path | None = None) -> None:
        """Create it and take its lock. Raises StartupError if the path is too long for a socket or can't be made."""
        base = base or base_dir()
        self.path = base / f"{os.getpid()}-{secrets.token_hex(3)}"
        longest = len(os.fsencode(self.path / LONGEST_SOCKET))
        if longest > MAX_PATH_BYTES:
            raise StartupError(
                f"the runtime directory {self.path} is too long: its socket paths would have {longest} bytes and a "
                f"unix socket takes {MAX_PATH_BYTES}; set XDG_RUNTIME_DIR to a shorter directory"
            )
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if base.stat().st_uid != os.getuid():
                raise StartupError(f"the runtime directory {base} belongs to another user; set XDG_RUNTIME_DIR")
            _remove_stale(base)
            self.path.mkdir(mode=0o700)
            # The lock is held before it has its name: nobody sees it free, or tries it while we take it.
            self._lock = os.open(self.path / "unlocked", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(self.path / "unlocked", self.path / "lock")
        except OSError as error:
            raise StartupError(f"can't make the runtime directory {self.path}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the directory with all sockets in it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _remove_stale(base: Path) -> None:
    """Remove directories whose owner is dead. One without a lock file yet is being made: leave it alone."""
    for entry in base.iterdir():
        if entry.is_dir() and (entry / "lock").exists() and not _is_held(entry):
            shutil.rmtree(entry, ignore_errors=True)


def core_endpoint(directory: Path | str) -> str:
    """Where the core's intake thread takes tokenizers and frontends (ROUTER)."""
    return f"ipc://{directory}/core.sock"


def output_endpoint(directory: Path | str) -> str:
    """Where the core's step loop takes detokenizers (ROUTER)."""
    return f"ipc://{directory}/output.sock"


def status_endpoint(directory: Path | str) -> str:
    """Where the core publishes CoreStatus (PUB)."""
    return f"ipc://{directory}/status.sock"


def service_endpoint(directory: Path | str, role: str) -> str:
    """A fresh endpoint for a tokenizer or detokenizer to serve frontends on (ROUTER), never used before or again."""
    return f"ipc://{directory}/{role}-{os.getpid()}-{secrets.token_hex(3)}.sock"
