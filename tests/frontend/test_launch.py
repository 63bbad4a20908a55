import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from frontend import launch
from frontend.supervisor import API, CORE
from protocol.config import EngineConfig, load_config
from protocol.errors import StartupError


def test_a_held_port_lets_sharers_in_and_nobody_else() -> None:
    with launch.hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(StartupError, match=f"can't listen on 127.0.0.1:{port}: Address already in use"):
            launch.hold_port("127.0.0.1", port)
        with socket.socket() as server:  # with the options of an API server's socket
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            for _ in range(8):  # the held socket must not swallow connections
                with socket.create_connection(("127.0.0.1", port), 5), server.accept()[0]:
                    pass
    launch.hold_port("127.0.0.1", port).close()  # what lingers of those connections is no obstacle


def test_a_port_that_somebody_listens_on_is_taken() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(StartupError, match="Address already in use; choose another with --port"):
            launch.hold_port("127.0.0.1", server.getsockname()[1])


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(StartupError, match=r"can't listen on 192.0.2.1:0: Cannot assign"):
        launch.hold_port("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_urls(host: str, url: str) -> None:
    assert launch.url_of(host, 80) == url


def test_health_is_200_and_nothing_else() -> None:
    codes = [200, 503]

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.pop(0) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [launch.answers_health(url), launch.answers_health(url)] == [True, False]
        server.shutdown()
        thread.join()
    assert not launch.answers_health(url)


def test_the_processes_of_an_engine(tmp_path: Path) -> None:
    options = launch.ServeOptions(
        api_servers=2, tokenizers=3, api_key="secret", cors_origins=("https://a", "https://b")
    )
    config = EngineConfig(model="/m.gguf", block_size=32, model_aliases=["other"])
    specs = launch.specs(tmp_path, config, options, 1234)
    assert [spec.role for spec in specs] == [CORE] + ["tokenizer"] * 3 + ["detokenizer"] + [API] * 2
    assert load_config(specs[0].command[-1]) == config
    api = specs[-1]
    assert " ".join(api.command).endswith(
        "--port 1234 --share-port --cors-origin=https://a --cors-origin=https://b --alias=other"
    )
    assert "secret" not in " ".join(api.command)
    assert api.environment == {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"), "PAGETIDE_API_KEY": "secret"}
    assert (tmp_path / "metrics").is_dir()


def test_folders_named_like_ours_are_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "__main__.py").write_text("raise SystemExit('theirs')")
    environment = os.environ | {"PYTHONPATH": str(Path(launch.__file__).parents[1])}
    command = [*launch.PYTHON, "frontend", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "pagetide" in done.stdout


def test_a_bar_shows_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.Bar("loading") as bar:
        bar.update(1, 2)
        bar.write("a line")
    assert capsys.readouterr().err == "a line\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with launch.Bar("loading") as bar:
        bar.update(1 << 20, 2 << 20)
        bar.write("[a] line")
        bar.update(2 << 20, 2 << 20)
    err = capsys.readouterr().err
    assert "1.0/2.0 MiB" in err
    assert "[a] line" in err
