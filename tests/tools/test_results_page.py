"""docs/RESULTS.md says what docs/results holds, no more and no less."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tools import results_page
from tools.results_page import bandwidth, filled, main, weight_bytes

LEVELS = [
    {"concurrency": n, "tokens_per_second": 100.0 * n, "ttft_p50_s": 0.03, "tpot_p50_s": 0.001,
     "tpot_p95_minus_p50_s": 0.0005}
    for n in (1, 2, 4)
]  # fmt: skip
SWAP = {
    "completed": 4, "requests": 4, "swaps": 2, "resumes": 2, "rounds": [{}, {}], "copy_out_ms": 0.5, "copy_in_ms": 0.25,
    "swapped_tpot_p50_s": 0.02, "other_tpot_p50_s": 0.01, "swapped_max_gap_s": [0.1, 0.2], "identical": True,
    "bytes_out": 4_000_000,
}  # fmt: skip


def test_the_page_is_what_the_figures_say() -> None:
    assert main(["--check"]) == 0, "run `python -m tools.results_page`"
    assert re.findall(r"^<!-- (\w+) -->\n\|", results_page.PAGE.read_text(), flags=re.MULTILINE) == [
        "sweep", "engine", "swaps", "jitter", "validation"
    ]  # fmt: skip


def test_the_floor_of_the_article() -> None:
    """Its 11.1 tokens/s are 12 % of what 192 GB/s allow; 16-bit weights are what loading counts."""
    assert 11.089 * weight_bytes(True) / 192e9 == pytest.approx(0.12, abs=0.001)
    assert weight_bytes(False) == 6_171_877_376


def test_figures_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(results_page.RESULTS / "kernels-h200.json", tmp_path)
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    empty = filled("a\n<!-- sweep -->\nold\n<!-- end -->\n<!-- swaps -->\n<!-- end -->\nb")
    assert empty.startswith("a\n<!-- sweep -->\n| KV") and empty.endswith("\n<!-- end -->\nb") and "old" not in empty
    assert empty.count("not measured yet") == 6 * 2 + 2 * 2
    assert filled(empty) == empty
    (tmp_path / "article-h200").mkdir()
    floor_bytes = int(bandwidth(tmp_path) * 0.0005)
    sweep = {"weights_bytes": floor_bytes, "levels": LEVELS}
    (tmp_path / "article-h200" / "concurrency-fp8.json").write_text(json.dumps(sweep))
    (tmp_path / "article-h200" / "swap-fp8.json").write_text(json.dumps(SWAP))
    page = filled(empty)
    assert "| fp8, c2 | H200 | 200.0 | 30.0 ms | 1.0 ms | 0.5 ms | 50.0% | 5.0% |" in page
    assert "| fp8 | H200 | 4/4 | 1/1 | 0.50 | 0.25 | 20.0 | 10.0 | 150.0 | equal | 4.0 / 8.0 |" in page
    assert page.count("not measured yet") == 6 * 2 + 2 * 2 - 4
    with pytest.raises(KeyError):
        filled("<!-- speed -->\n<!-- end -->")
