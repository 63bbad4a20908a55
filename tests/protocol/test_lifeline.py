"""A grandchild must end when its parent is killed, even if it is deaf to signals or busy."""

import os
import signal
import subprocess
import sys

import pytest

from protocol.lifeline import Lifeline

PARENT = """
import subprocess, sys, os
from protocol.lifeline import Lifeline
line = Lifeline()
environment = os.environ | line.environment
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], pass_fds=[line.read_end], env=environment)
child.wait()
"""

POLITE = """
import signal, sys
from protocol.lifeline import hold_lifeline
def leave(*_):
    print("left politely", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
hold_lifeline()
print("ready", flush=True)
signal.pause()
"""

DEAF = """
import signal
from protocol import lifeline
lifeline.GRACE = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lifeline.hold_lifeline()
print("ready", flush=True)
while True:
    sum(range(10000))
"""


@pytest.mark.parametrize(("child", "last_words"), [(POLITE, "left politely\n"), (DEAF, "")])
def test_sigkill_of_the_parent_ends_the_child(child: str, last_words: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdout.readline() == "ready\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert parent.stdout.read() == last_words, "EOF comes only when the child is gone too"
    parent.stdout.close()


def test_without_a_lifeline_nothing_happens() -> None:
    code = "import threading, protocol.lifeline as p; p.hold_lifeline(); print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_cut_twice_closes_nothing_of_others() -> None:
    line = Lifeline()
    line.cut()
    others = os.pipe()  # they get the numbers that have just become free
    line.cut()
    for descriptor in others:
        os.close(descriptor)
