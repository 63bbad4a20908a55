import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from frontend import cli, models
from protocol.errors import ErrorCode, PagetideError, StartupError
from protocol.runtime_dir import RuntimeDir

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_runs(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def pagetide(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_every_command_has_a_help_text() -> None:
    commands = [
        "serve",
        "core",
        "tokenizer",
        "detokenizer",
        "api",
        "chat",
        "generate",
        "status",
        "plan",
        "pull",
    ]
    overview = pagetide("--help").output
    for command in commands:
        assert f" {command} " in overview
        text = pagetide(command, "--help")
        assert text.exit_code == 0
        assert "--help" in text.output
    assert "130 interrupted" in overview


def test_help_and_completion_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom frontend.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'httpx', 'huggingface_hub', 'uvicorn', 'starlette', 'tokenizers', 'numpy', 'torch', 'asyncio'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 3  # 0.2 s on an idle machine


@pytest.mark.parametrize("command", ["status", "chat", "tokenizer", "detokenizer", "api", "generate"])
def test_without_an_engine_there_is_one_clear_line(command: str) -> None:
    result = pagetide(command, *(["hello"] if command == "generate" else []))
    assert (result.exit_code, result.stderr) == (1, "error: no engine is running; start one with `pagetide serve`\n")
    result = pagetide(command, *(["hello"] if command == "generate" else []), "--engine", "/nowhere")
    assert result.exit_code == 1
    assert result.stderr == "error: no engine runs in /nowhere: there is no such directory\n"


def test_the_newest_engine_is_the_default(short_path: Path) -> None:
    engine = RuntimeDir()
    try:
        assert cli.find_engine(None) == engine.path
        assert cli.find_engine(short_path) == short_path
    finally:
        engine.remove()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (StartupError("no such file"), 1, "error: no such file\n"),
        (PagetideError(ErrorCode.QUEUE_FULL, "9 are waiting"), 1, "error: 9 are waiting\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(models, "pull", fail)
    result = pagetide("pull", "x")
    assert (result.exit_code, result.stderr) == (code, line)


@pytest.mark.parametrize("arguments", [["serve", "--port", "70000"], ["plan", "--gpu-memory", "much"], ["nonsense"]])
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    assert pagetide(*arguments).exit_code == 2


def test_the_listed_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = pagetide("pull", "--list")
    assert result.output == "smollm2-135m\tSmolLM2 135M Instruct, Q4_1, 98 MB\tnot pulled\n"


def test_completion_for_bash() -> None:
    command = [sys.executable, "-m", "frontend", "--show-completion", "bash"]
    # Otherwise typer looks which shell has started it, and that may be any, or none.
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert "complete" in done.stdout
