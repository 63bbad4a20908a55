"""The pictures of docs/results."""

import shutil
from pathlib import Path

import pytest

from tools.local_engine import ROOT
from tools.plot_results import PLOTS, main


def test_each_picture_is_drawn_from_the_committed_figures(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.png")
    shutil.copytree(ROOT / "docs/results", tmp_path / "results", ignore=ignored)
    main(["--folder", str(tmp_path / "results")])
    drawn = sorted(path.name for path in (tmp_path / "results").glob("*.png"))
    assert drawn == sorted(file for file, _ in PLOTS.values())
    for name in drawn:
        assert (ROOT / "docs/results" / name).exists(), "the docs show it"


def test_an_unknown_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "kernels, w4" in capsys.readouterr().err
