from pathlib import Path

import pytest

from tools import check_lines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for package in check_lines.PACKAGES:
        (tmp_path / package).mkdir()
    return tmp_path


def test_this_repository_keeps_its_budgets() -> None:
    problems, total = check_lines.check(Path(check_lines.__file__).parent.parent)
    assert problems == []
    assert total > 0


def test_a_long_file_and_a_long_function_are_named(root: Path) -> None:
    (root / "kernels" / "long.py").write_text("x = 1\n" * 401)
    (root / "frontend" / "deep.py").write_text("class A:\n    async def f(self):\n" + "        x = 1\n" * 60)
    (root / "protocol" / "fits.py").write_text("def f():\n" + "    x = 1\n" * 59 + "x = 1\n" * 340)
    problems, total = check_lines.check(root)
    assert problems == [
        "frontend/deep.py:2: f has 61 lines, 60 at most",
        "kernels/long.py: 401 lines, 400 at most",
    ]
    assert total == 401 + 62 + 400


def test_the_total_is_bounded(root: Path) -> None:
    for i in range(31):
        (root / "engine_core" / f"part{i}.py").write_text("x = 1\n" * 400)
    problems, _ = check_lines.check(root)
    assert problems == ["protocol + kernels + engine_core + frontend: 12400 lines of code, 12000 at most"]
    for i in range(31):
        (root / "engine_core" / f"part{i}.py").write_text('"""Docs."""\n\n# why\n' + "x = 1\n" * 380)
    assert check_lines.check(root) == ([], 31 * 380)
