import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from rich.console import Console

from frontend import status_view
from protocol.codec import encode
from protocol.errors import StartupError
from protocol.messages import Limits, ModelInfo, Role
from protocol.runtime_dir import status_endpoint
from protocol.status import CoreStatus, CpuOffload, PeerInfo

STATUS = CoreStatus(
    identity="core-1",
    pid=4242,
    time=100.0,
    uptime=3725.0,
    step=1234,
    step_age=0.0,
    model=ModelInfo("tiny", "/m.gguf", 10, 2048, 0, [2], "int8"),
    limits=Limits(10, 1000),
    waiting=3,
    waiting_tokens=456,
    running=7,
    peers=[PeerInfo(Role.FRONTEND, "frontend-9", 9, ""), PeerInfo(Role.TOKENIZER, "tokenizer-8", 8, "ipc://x")],
    gauges={"kv_blocks_total": 1000, "kv_blocks_free": 600, "kv_blocks_cached": 150},
    counters={
        "generated_tokens_total": 5000,
        "prompt_tokens_total": 900,
        "requests_finished_total": 11,
        "requests_preempted_total": 2,
        "requests_swapped_total": 41,
        "requests_resumed_total": 40,
        "requests_recomputed_total": 3,
        "prefix_cache_hit_tokens_total": 30,
        "prefix_cache_query_tokens_total": 120,
    },
    memory={"weights": 98 << 20, "kv_pool": 2 << 30},
    swapped=1,
    cpu_offload=CpuOffload(True, 3_538_944, 256 << 20, 5, 12, 128 << 20),
)


@pytest.fixture
def core(short_path: Path) -> Iterator[Path]:
    """The runtime directory of something that publishes STATUS every 10 ms."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(status_endpoint(short_path))
    stopping = threading.Event()

    def publish() -> None:
        while not stopping.wait(0.01):
            socket.send(b"not a status")
            socket.send(encode(STATUS))

    thread = threading.Thread(target=publish)
    thread.start()
    yield short_path
    stopping.set()
    thread.join()
    socket.close()
    context.term()


def shown(core: Path, once: bool) -> str:
    console = Console(file=io.StringIO(), width=120)
    status_view.show_status(core, console, once)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_one_table(core: Path) -> None:
    text = shown(core, once=True)
    for part in (
        "tiny - up 1 h 2 min, core pid 4242",
        "7 running, 3 waiting",
        "11 finished, 0 aborted, 0 failed, 0 rejected",
        "456 waiting",
        "5,000 generated, 900 of prompts",
        "KV blocks (int8)",
        "250 in use, 150 cached, 600 free of 1,000",
        "2 preemptions",
        "25% of 120 prompt tokens found",
        "1 swapped out, 3.4 MiB of 256.0 MiB",
        "41 swapped, 40 resumed, 3 recomputed",
        "memory: kv pool",
        "2.00 GiB",
        "98.0 MiB",
    ):
        assert part in text
    assert text.index("tokenizer-8") < text.index("frontend-9")


def test_a_core_that_falls_silent_ends_the_live_table(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [STATUS, STATUS]

    def read(self: status_view.StatusReader, timeout: float = 0) -> CoreStatus:
        if not answers:
            raise StartupError("silent")
        return answers.pop()

    monkeypatch.setattr(status_view.StatusReader, "read", read)
    with pytest.raises(StartupError, match="silent"):
        shown(core, once=False)


def test_no_core_is_an_error_soon(short_path: Path) -> None:
    with status_view.StatusReader(short_path) as reader, pytest.raises(StartupError, match="no heartbeat"):
        reader.read(0.1)


def test_json_has_the_names_of_the_fields(core: Path) -> None:
    with status_view.StatusReader(core) as reader:
        status = json.loads(status_view.as_json(reader.read()))
    assert status["model"]["name"] == "tiny"
    assert status["peers"][0] == {"role": "frontend", "identity": "frontend-9", "pid": 9, "endpoint": ""}
    assert status["memory"] == STATUS.memory
    assert status["swapped"] == 1
    assert status["cpu_offload"] == {
        "enabled": True,
        "payload_bytes": 3_538_944,
        "budget_bytes": 256 << 20,
        "max_swapped_requests": 5,
        "copying_blocks": 12,
        "host_pool_bytes": 128 << 20,
    }


def test_a_plan_as_a_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    plan = {
        "model": "tiny",
        "weights_bytes": 98 << 20,
        "kv_format": "fp16",
        "blocks": 1234567,
        "kv_block_bytes": 589824,
        "formats": [
            {"kv_cache_dtype": "fp16", "kv_bytes_per_token": 36864, "max_tokens": 4096},
            {"kv_cache_dtype": "fp8_per_token_head", "kv_bytes_per_token": 18720.5, "max_tokens": 8192},
        ],
    }
    console.print(status_view.plan_view(plan))
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    for name, value in (
        ("weights", "98.0 MiB"),
        ("kv format", "fp16"),
        ("blocks", "1,234,567"),
        ("kv block", "589,824 bytes"),
        ("cache dtype", "bytes per token"),
        ("fp8_per_token_head", "18,720.5"),
    ):
        assert any(name in line and value in line for line in text.splitlines())
