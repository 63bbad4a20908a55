"""How other threads wake the step loop: a file descriptor that it polls beside its sockets."""

import contextlib
import os


class Waker:
    """An event that any thread may set. The descriptor lives as long as this object, so a late `set` is harmless."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll: readable while set."""
        return self._fd

    def set(self) -> None:
        """Wake whoever polls, now or at the next poll."""
        with contextlib.suppress(BlockingIOError):  # set 2**64 - 1 times, so it is set
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take note: not set any more."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)
