"""Metrics of one API server, and of two that share a port."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics import Metrics
from frontend.timing import Times
from protocol.messages import Limits, ModelInfo
from protocol.status import CoreStatus

STATUS = CoreStatus(
    identity="core-1",
    pid=1,
    time=2.0,
    uptime=3.0,
    step=4,
    step_age=0.0,
    model=ModelInfo("m", "p", 10, 100, 0, []),
    limits=Limits(4, 100),
    waiting=0,
    waiting_tokens=0,
    running=1,
    peers=[],
    gauges={"kv_blocks_total": 12.0, "pagetide_own": 1.0},
    counters={"requests_swapped_total": 3.0, "cpu_offload_seconds": 0.25, "cpu_reload_seconds": 0.0},
    memory={"weights": 7},
)


def values(text: str) -> dict[str, float]:
    """Samples by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name + "".join(map(str, sample.labels.values())): sample.value for sample in samples}


def test_the_core_s_values_have_our_prefix() -> None:
    found = values(Metrics(lambda: STATUS, lambda: None).render().decode())
    assert found["pagetide_kv_blocks_total"] == 12
    assert found["pagetide_own"] == 1
    assert found["pagetide_requests_swapped_total"] == 3
    assert found["pagetide_memory_bytesweights"] == 7
    assert found["pagetide_healthy"] == 1
    assert values(Metrics(lambda: None, lambda: "dead").render().decode())["pagetide_healthy"] == 0


def test_counters_without_total_keep_their_names() -> None:
    text = Metrics(lambda: STATUS, lambda: None).render().decode()
    assert "# TYPE pagetide_cpu_offload_seconds counter\npagetide_cpu_offload_seconds 0.25\n" in text
    assert "# TYPE pagetide_cpu_reload_seconds counter\npagetide_cpu_reload_seconds 0.0\n" in text
    assert "# TYPE pagetide_requests_swapped_total counter\n" in text
    assert "# TYPE pagetide_kv_blocks_total gauge\n" in text
    assert "seconds_total" not in text


def test_phases_and_gaps_of_choices() -> None:
    metrics = Metrics(lambda: None, lambda: None)
    metrics.count_times([Times(0.1, 0, 0.2, 0.3, 0, 4, 0, 0.1, 0, 4.7, 4.1, 1, 0)], [4.1, 0.2])
    found = values(metrics.render().decode())
    assert found["pagetide_request_phase_seconds_sumswapped"] == 4
    assert found["pagetide_request_phase_seconds_countqueued"] == 1
    assert found["pagetide_request_phase_seconds_bucket0.25decode"] == 0
    assert found["pagetide_request_phase_seconds_bucket0.5decode"] == 1
    assert found["pagetide_longest_gap_seconds_count"] == 2
    assert sum("_countqueued" in name or "_sumresidual" in name for name in found) == 2


def test_answers_are_counted_and_timed() -> None:
    metrics = Metrics(lambda: None, lambda: None)
    metrics.count_answer(arrival=10.0, first=10.2, last=11.2, prompt_tokens=7, tokens=[1, 11])
    metrics.count_answer(arrival=10.0, first=10.4, last=10.4, prompt_tokens=1, tokens=[1])
    found = values(metrics.render().decode())
    assert found["pagetide_api_prompt_tokens_total"] == 8
    assert found["pagetide_api_answer_tokens_total"] == 13
    assert round(found["pagetide_time_to_first_token_seconds_sum"], 6) == 0.6
    assert round(found["pagetide_request_seconds_sum"], 6) == 1.6
    assert round(found["pagetide_time_per_output_token_seconds_sum"], 6) == 0.1
    assert found["pagetide_time_per_output_token_seconds_count"] == 1


SERVER = """
import sys
from frontend.metrics import Metrics
metrics = Metrics(lambda: None, lambda: None)
metrics.requests.labels("/v1/completions", 200).inc()
with metrics.open_requests.track_inprogress():
    if sys.argv[1] == "wait":
        print("ready", flush=True)
        sys.stdin.read()
    else:
        print(metrics.render().decode())
"""


def test_servers_that_share_a_folder_answer_for_each_other(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen([*command, "wait"], env=environment, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        one = subprocess.run([*command, "render"], env=environment, stdout=pipe, text=True, check=True, timeout=20)
        other.communicate()
    found = values(one.stdout)
    assert found["pagetide_api_requests_total/v1/completions200"] == 2
    assert found["pagetide_api_open_requests"] == 2
    assert found["pagetide_healthy"] == 1
