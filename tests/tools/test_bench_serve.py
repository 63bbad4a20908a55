"""The HTTP benchmark: what it asks, what it makes of the answers, and a run against a real server without a model."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from tools.bench_serve import Call, ask, main, make_calls, parse, summarize
from tools.traces import TraceRequest, synthetic_trace

from ..engine_core.model.test_dummy import TINY


def test_prompts_begin_alike_where_the_trace_says_so() -> None:
    options = parse(
        ["--checkpoint", "m", "--rate", "2", "--shrink", "8", "--max-cache", "200", "--max-new-tokens", "50"]
    )
    trace = [
        TraceRequest(0, 10.0, 1024, 80, (1, 2)),
        TraceRequest(1, 40.0, 1100, 800, (1, 2, 3)),
        TraceRequest(2, 70.0, 8000, 1, (1, 4)),
    ]
    calls = make_calls(trace, options, 300)
    assert [(len(call.prompt), call.max_tokens) for call in calls] == [(128, 10), (137, 50), (199, 1)]
    assert [call.due for call in calls] == [0.0, 0.5, 1.0]
    first, second, third = (call.prompt for call in calls)
    assert second[:128] == first
    assert third[:64] == first[:64] and third[64:128] != first[64:128]
    assert calls[0].prompt == make_calls(trace, options, 300)[0].prompt
    plain = make_calls([TraceRequest(0, 0.0, 80, 8), TraceRequest(1, 0.0, 80, 8)], options, 300)
    assert plain[0].prompt != plain[1].prompt


def test_goodput_counts_those_that_keep_all_limits() -> None:
    options = parse(["--checkpoint", "m", "--slo-ttft", "1", "--slo-tpot", "0.5", "--slo-gap", "0.8"])
    good = Call([1], 3, sent=0.0, times=[0.5, 0.9, 1.3], tokens=3)
    late = Call([1], 3, sent=0.0, times=[1.5, 1.9], tokens=3)
    jerky = Call([1], 5, sent=0.0, times=[0.5, 1.4], tokens=5)
    failed = Call([1], 3, sent=0.0, times=[0.5], error="HTTP 429")
    found = summarize([good, late, jerky, failed], 2.0, options)
    assert (found["good"], found["goodput_per_second"], found["goodput_share"]) == (1, 0.5, 0.25)
    assert (found["ttft_kept"], found["tpot_kept"], found["longest_gap_kept"]) == (0.5, 0.75, 0.5)
    assert (found["completed"], found["errors"], found["tokens_per_second"]) == (3, {"HTTP 429": 1}, 5.5)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "HTTP 429"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a","finish_reason":null}]}\n\n', "the stream broke off"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"code":"engine_unavailable"}}\n\n', "engine_unavailable"),
        (b"", "HTTP no answer"),
    ],
)
def test_what_goes_wrong_is_told(answer: bytes, error: str) -> None:
    async def play() -> Call:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            call = Call([1], 2)
            await ask(call, f"http://{host}:{port}", "m")
        return call

    assert asyncio.run(play()).error == error


def test_a_load_at_a_rate_and_at_a_concurrency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 400}))
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{n:02}.0000000,{40 + n},{3 + n}" for n in range(12)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    output = tmp_path / "x.json"
    flags = ["--checkpoint", str(tmp_path), "--device", "null", "--load-format", "dummy", "--max-cache", "256"]
    flags += ["--max-new-tokens", "64", "--requests", "6", "--output", str(output), "--trace", str(trace)]
    assert main([*flags, "--rate", "50", "--iterations", "2"]) == 0
    found = json.loads(output.read_text())
    assert (found["requests"], found["completed"], found["answer_tokens"]) == (12, 12, sum(range(3, 15)))
    assert len(found["samples"]["ttft_s"]) == 12
    assert found["engine"]["requests_failed"] == 0
    assert "goodput" in capsys.readouterr().out
    assert main([*flags, "--concurrency", "2"]) == 0
    assert json.loads(output.read_text())["completed"] == 6
    with pytest.raises(SystemExit, match="has 12 requests, not 18"):
        main([*flags, "--iterations", "3"])


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SystemExit, match="names no model"):
        main(["--checkpoint", "m", "--url", f"http://127.0.0.1:{port}/v1"])
    call = Call([1], 2)
    asyncio.run(ask(call, f"http://127.0.0.1:{port}", "m"))
    assert call.error.startswith("connection: ")


def test_options() -> None:
    assert parse(["--checkpoint", "m"]).concurrency == 4
    assert len(synthetic_trace(3)) == 3
    for wrong in (["--rate", "1", "--concurrency", "1"], ["--requests", "0"], ["--shrink", "0"]):
        with pytest.raises(SystemExit):
            parse(["--checkpoint", "m", *wrong])
