"""The summary of `make bench` from figures as the benchmarks write them."""

from tools.bench import RUNS, summarize
from tools.bench_cpu_peers import summarize as summarize_speeds


def test_every_benchmark_has_its_rows() -> None:
    cpu = summarize_speeds({"pagetide": {"decode 1": [50.0, 60.0, 70.0]}, "it 5": {"decode 1": [20.0, 30.0, 40.0]}})
    figures = {
        "bench_step": {"requests": 256, "unit": "us", "total": 812.3},
        "bench_start": {"rounds": [{"ready": 2.0, "first token": 2.5}, {"ready": 2.0, "first token": 3.5}]},
        "bench_api": {"pagetide": {"tokens_per_second": 12345}, "ratio": 0.5, "goal": 8000},
        "bench_cpu_peers": {"rows": cpu},
    }
    assert figures.keys() == RUNS.keys()
    rows = summarize(figures)
    assert [row[1] for row in rows] == ["812 us", "3.00 s", "12,345 tok/s", "60.0 tok/s"]
    assert rows[-1][2] == "2.00 x it 5"
