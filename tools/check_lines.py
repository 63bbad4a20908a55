"""Check the line budgets, so that a newcomer can read all of Pagetide in an afternoon.

A file's and a function's lines are all of theirs. The total counts lines of code: neither blank lines nor comments nor
docstrings, so that nobody saves on explanations.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("protocol", "kernels", "engine_core", "frontend")
FILE_LINES = 400
FUNCTION_LINES = 60
TOTAL_CODE_LINES = 12_000
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def long_functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of lines) of each function over the limit; decorators don't count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.name, node.lineno, lines


def code_lines(source: str, tree: ast.AST) -> int:
    """Lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def check(root: Path) -> tuple[list[str], int]:
    """Return what is over a budget, and how many lines of code the packages have together."""
    problems = []
    total = 0
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        total += code_lines(source, tree)
        where = path.relative_to(root)
        if (lines := len(source.splitlines())) > FILE_LINES:
            problems.append(f"{where}: {lines} lines, {FILE_LINES} at most")
        for name, line, length in long_functions(tree):
            problems.append(f"{where}:{line}: {name} has {length} lines, {FUNCTION_LINES} at most")
    if total > TOTAL_CODE_LINES:
        problems.append(f"{' + '.join(PACKAGES)}: {total} lines of code, {TOTAL_CODE_LINES} at most")
    return problems, total


def main() -> int:
    problems, total = check(Path(__file__).resolve().parent.parent)
    print(*problems, f"{total} of {TOTAL_CODE_LINES} lines of code", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
