"""The core's process: what is set before the model loads, and what a signal does at its end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core import __main__ as main
from engine_core import load, model_runner
from protocol.config import EngineConfig
from protocol.errors import StartupError

SIGNALS = signal.SIGTERM, signal.SIGINT


@pytest.fixture
def own_handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_a_signal_does_not_disturb_a_process_that_ends_already(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def refuse(*_: object) -> int:
        seen.extend(signal.getsignal(number) for number in SIGNALS)
        raise StartupError("no model")

    monkeypatch.setattr(main, "_serve", refuse)
    with pytest.raises(StartupError):
        main.serve(EngineConfig(model="m"), tmp_path)
    assert seen == [main._exit, main._exit]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN, signal.SIG_IGN]


def test_one_dnn_keeps_few_products_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, for as many numbers of rows, took more memory than the model."""
    names = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    monkeypatch.setenv(names[0], "77")
    monkeypatch.setenv(names[1], "")
    monkeypatch.delenv(names[1])
    seen = []
    monkeypatch.setattr(model_runner, "load_runner", lambda *_: seen.extend(os.environ[name] for name in names))
    load._load_runner(EngineConfig(model="m", device="cpu"), lambda done, total: None)
    assert seen == ["77", "256"]
