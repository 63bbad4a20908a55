"""What the engine says of itself, as tables for people and JSON for scripts: `pagetide status`, `pagetide plan`."""

import json
import time
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from frontend.options import format_size
from protocol.codec import Decoder, as_objects
from protocol.errors import StartupError
from protocol.runtime_dir import status_endpoint
from protocol.status import CoreStatus

TIMEOUT = 3.0  # seconds to wait for a heartbeat, which comes several times a second


class StatusReader:
    """Reads the heartbeats of the engine in `directory`; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(status_endpoint(directory))
        self._decoder = Decoder(CoreStatus, "status")

    def __enter__(self) -> "StatusReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def read(self, timeout: float = TIMEOUT) -> CoreStatus:
        """The next heartbeat. Raises StartupError if none comes within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                status = self._decoder.decode(self._socket.recv())
                if isinstance(status, CoreStatus):
                    return status
        raise StartupError(
            f"no heartbeat from the engine in {self._directory} for {timeout:.0f} s: loading, stopped or dead"
        )


def as_json(status: CoreStatus) -> str:
    """The status with its field names, which the wire leaves out."""
    return json.dumps(as_objects(status), indent=2)


def status_view(status: CoreStatus, tokens_per_second: float | None = None) -> Group:
    """One screen of an engine's state. The rate needs two heartbeats, so the first view goes without."""
    gauges, counters = status.gauges, status.counters
    total, free, cached = (int(gauges.get(f"kv_blocks_{name}", 0)) for name in ("total", "free", "cached"))
    used = total - free - cached
    table = Table(
        title=f"{status.model.name} - up {_duration(status.uptime)}, core pid {status.pid}", title_justify="left"
    )
    table.add_column("")
    table.add_column("now")
    table.add_column("since start")
    rate = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s, "
    table.add_row(
        "requests",
        f"{status.running} running, {status.waiting} waiting",
        ", ".join(
            f"{counters.get(f'requests_{x}_total', 0):,.0f} {x}" for x in ("finished", "aborted", "failed", "rejected")
        ),
    )
    table.add_row(
        "tokens",
        f"{rate}{status.waiting_tokens:,} waiting",
        f"{_generated(status):,.0f} generated, {counters.get('prompt_tokens_total', 0):,.0f} of prompts",
    )
    table.add_row(
        f"KV blocks ({status.model.kv_cache_dtype})" if status.model.kv_cache_dtype else "KV blocks",
        f"{used:,} in use, {cached:,} cached, {free:,} free of {total:,}",
        f"{counters.get('requests_preempted_total', 0):,.0f} preemptions",
    )
    offload = status.cpu_offload
    held = f"{format_size(offload.payload_bytes)} of {format_size(offload.budget_bytes)}"
    swaps = (f"{counters.get(f'requests_{x}_total', 0):,.0f} {x}" for x in ("swapped", "resumed", "recomputed"))
    table.add_row("swap", f"{status.swapped} swapped out, {held}" if offload.enabled else "off", ", ".join(swaps))
    hits, asked = (counters.get(f"prefix_cache_{x}_tokens_total", 0) for x in ("hit", "query"))
    table.add_row(
        "prefix cache", "", f"{hits / asked:.0%} of {asked:,.0f} prompt tokens found" if asked else "not asked yet"
    )
    table.add_row("steps", f"last ended {status.step_age:.1f} s ago" if status.step_age else "idle", f"{status.step:,}")
    for name, size in status.memory.items():
        table.add_row(f"memory: {name.replace('_', ' ')}", format_size(size), "")
    peers = Table(title="connected to the core", title_justify="left")
    for column in ("role", "pid", "identity"):
        peers.add_column(column)
    for peer in sorted(status.peers, key=lambda peer: (peer.role, peer.pid)):
        peers.add_row(peer.role.name.lower(), str(peer.pid), peer.identity)
    return Group(table, peers)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def show_status(directory: Path, console: Console, once: bool) -> None:
    """Print the status of the engine in `directory`, and follow it until the heartbeat ends or Ctrl-C.

    Raises StartupError when there is no heartbeat (any more).
    """
    with StatusReader(directory) as reader:
        status = reader.read()
        if once:
            console.print(status_view(status))
            return
        with Live(status_view(status), console=console, auto_refresh=False) as live:
            while True:
                before, status = status, reader.read()
                produced = _generated(status) - _generated(before)
                rate = produced / (status.time - before.time) if status.time > before.time else 0.0
                live.update(status_view(status, rate), refresh=True)


def _generated(status: CoreStatus) -> float:
    return status.counters.get("generated_tokens_total", 0.0)


def plan_view(plan: dict[str, Any]) -> Group:
    """The memory plan that `python -m engine_core plan` printed as JSON; sizes are bytes under names in `_bytes`.

    What the KV formats would give stands side by side below it.
    """
    found = plan.pop("formats", [])
    table = Table(title=f"{plan.pop('model', 'plan')}", title_justify="left", show_header=False)
    for name, value in plan.items():
        table.add_row(_plan_name(name), _plan_value(name, value))
    formats = Table(title="with --kv-cache-dtype", title_justify="left")
    for name in found[0] if found else ():
        text = isinstance(found[0][name], str)
        heading = name.removeprefix("kv_").replace("_", " ")
        formats.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for values in found:
        formats.add_row(*(_plan_value("", value) for value in values.values()))
    return Group(table, formats) if found else Group(table)


def _plan_name(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _plan_value(name: str, value: Any) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_size(value) if value >= 1 << 20 else f"{value:,} bytes"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
