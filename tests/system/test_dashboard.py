"""The dashboard and the operator's page name the metrics that a real engine has, all of them and no others."""

import configparser
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..engine_core.model.test_dummy import TINY
from .serving import ROOT, Serve, environment_in

DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
PAGE = (ROOT / "docs/OPERATING.md").read_text()
CPU = ["--dtype", "fp32", "--load-format", "dummy", "--max-cache", "256", "--threads", "1", "--swap-every", "3"]
SUFFIXES = ("_bucket", "_sum", "_count")
KINDS = {"timeseries", "stat", "row"}


@pytest.fixture(scope="module")
def scrape() -> str:
    """What /metrics says after a request."""
    path = Path(tempfile.mkdtemp(prefix="pt-"))
    model = path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 2}))
    serve = Serve(environment_in(path), model, device=CPU)
    try:
        body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}
        assert httpx.post(f"{serve.url}/v1/completions", json=body, timeout=30).status_code == 200
        return httpx.get(f"{serve.url}/metrics").text
    finally:
        serve.stop()
        shutil.rmtree(path, ignore_errors=True)


def kinds(scrape: str) -> dict[str, str]:
    """The kind of each metric, by name."""
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", scrape, re.MULTILINE))


def expressions(text: str) -> list[str]:
    """Names of metrics in PromQL."""
    return re.findall(r"\bpagetide_\w+", text)


def panels() -> Iterator[dict[str, Any]]:
    yield from DASHBOARD["panels"]


def test_every_metric_of_the_dashboard_is_in_a_scrape(scrape: str) -> None:
    known = kinds(scrape)
    samples = set(re.findall(r"^(\w+)[ {]", scrape, re.MULTILINE))
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    assert len(queries) > 30
    for query in [*queries, *expressions(PAGE)]:
        for name in expressions(query):
            assert name in samples, name
            is_histogram = known.get(name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count"))
            assert not name.endswith(SUFFIXES) or is_histogram == "histogram"
    for query in queries:
        labels = re.search(r'use=~?"([a-z_|]+)"', query)
        for use in labels[1].split("|") if labels else ():
            assert f'pagetide_memory_bytes{{use="{use}"}}' in scrape
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        counters = [name for name in expressions(query) if known.get(name) == "counter"]
        assert query.count("rate(") >= len(counters), "a counter is shown as it is"


def test_the_page_lists_every_metric_with_its_kind(scrape: str) -> None:
    listed = {f"pagetide_{name}": kind for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)}
    assert listed == kinds(scrape)


def test_it_is_a_dashboard() -> None:
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job"}
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells and max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells
        assert panel["type"] in KINDS and panel["title"]
        if panel["type"] == "row":
            continue
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()


def test_the_unit_is_one() -> None:
    found = re.search(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(found[1])
    assert unit.sections() == ["Unit", "Service", "Install"]
    command = unit["Service"]["ExecStart"].split()
    assert command[0].endswith("/pagetide") and command[1] == "serve"
