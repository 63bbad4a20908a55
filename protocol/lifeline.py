"""Child processes that end with their parent, whatever ends it.

The parent holds the write end of a pipe and never writes; each child holds the read end and sees EOF when the parent is
gone, even after SIGKILL. The kernel's parent-death signal comes on top where it exists, for a child that sits in a
long device call.
"""

import ctypes
import os
import signal
import sys
import threading

GRACE = 3.0  # seconds between the polite signal to oneself and the end
PR_SET_PDEATHSIG = 1
_ENVIRONMENT = "PAGETIDE_LIFELINE"


class Lifeline:
    """The parent's side: pass `read_end` to children with `pass_fds` and `environment` in their environment."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        self._is_cut = False

    @property
    def environment(self) -> dict[str, str]:
        """What a child's environment needs so that `hold_lifeline` finds the pipe."""
        return {_ENVIRONMENT: f"{self.read_end}:{os.getpid()}"}

    def cut(self) -> None:
        """End all children that hold on to it. It can have no more of them."""
        if not self._is_cut:
            self._is_cut = True
            os.close(self._write_end)
            os.close(self.read_end)


def hold_lifeline() -> None:
    """In a child: send SIGTERM to ourselves when the parent dies, and end hard after a grace time.

    Does nothing in a process that no Lifeline started. Call it after the signal handlers are installed.
    """
    value = os.environ.pop(_ENVIRONMENT, "")
    if not value:
        return
    descriptor, parent = (int(part) for part in value.split(":"))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE)
    os._exit(1)
