"""Check the line budgets, so that a newcomer can read all of Pagetide in an afternoon."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("protocol", "kernels", "engine_core", "frontend")
FILE_LINES = 400
FUNCTION_LINES = 60
TOTAL_LINES = 8_000


def long_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of lines) of each function over the limit; decorators don't count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.name, node.lineno, lines


def check(root: Path) -> tuple[list[str], int]:
    """Return what is over a budget, and how many lines the packages have together."""
    problems = []
    total = 0
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        total += lines
        where = path.relative_to(root)
        if lines > FILE_LINES:
            problems.append(f"{where}: {lines} lines, {FILE_LINES} at most")
        for name, line, length in long_functions(source):
            problems.append(f"{where}:{line}: {name} has {length} lines, {FUNCTION_LINES} at most")
    if total > TOTAL_LINES:
        problems.append(f"{' + '.join(PACKAGES)}: {total} lines, {TOTAL_LINES} at most")
    return problems, total


def main() -> int:
    problems, total = check(Path(__file__).resolve().parent.parent)
    print(*problems, f"{total} of {TOTAL_LINES} lines", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
