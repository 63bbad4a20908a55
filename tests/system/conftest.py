"""Fixtures for tests of real processes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.engine_client import EngineClient
from protocol.config import EngineConfig
from protocol.status import CoreStatus
from tools.local_engine import LocalEngine


async def status_where(client: EngineClient, condition: Callable[[CoreStatus], bool]) -> CoreStatus:
    """The first heartbeat from now on that fulfils the condition: an older one may be of before the test's load."""
    asked = time.time()
    while True:
        status = client.status
        if status is not None and status.time >= asked and condition(status):
            return status
        await asyncio.sleep(0.02)


def is_idle(status: CoreStatus) -> bool:
    """Nothing waits or runs, and no block is held."""
    blocks = status.gauges
    held = blocks["kv_blocks_total"] - blocks["kv_blocks_free"] - blocks["kv_blocks_cached"]
    return status.waiting == 0 and status.running == 0 and held == 0


@pytest.fixture
def start(short_path: Path) -> Iterator[Callable[..., LocalEngine]]:
    """Start an engine with a configuration; it is stopped after the test."""
    engines = []

    def start_engine(**options: Any) -> LocalEngine:
        engines.append(LocalEngine(short_path, EngineConfig(**options)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.stop()
