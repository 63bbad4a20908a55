"""docs/PROTOCOL.md says what the structs say, and its frontend works."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import messages, status
from protocol.codec import encode
from protocol.messages import Finish, Hello, Message, Part, Pause, Role

from ..engine_core.model.test_dummy import TINY
from .serving import ROOT, Serve, environment_in

TEXT = (ROOT / "docs/PROTOCOL.md").read_text()
CODE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
NULL = ["--device", "null", "--load-format", "dummy", "--max-cache", "256"]


def rows() -> Iterator[tuple[str, list[str]]]:
    """The first cell of each row of a table that names a struct, and what is in backquotes in the second."""
    for name, fields in re.findall(r"^\| `(\w+)` \|([^|]*)\|", TEXT, re.MULTILINE):
        yield name, re.findall(r"`([^`]+)`", fields)


def shown(struct: type[msgspec.Struct]) -> list[str]:
    """A struct's fields as the page writes them."""

    def default(field: msgspec.structs.FieldInfo) -> str:
        if field.default_factory is not msgspec.NODEFAULT:
            value: Any = field.default_factory()
        elif field.default is msgspec.NODEFAULT:
            return ""
        else:
            value = field.default
        shown = f"{type(value).__name__}()" if isinstance(value, msgspec.Struct) else json.dumps(value, default=repr)
        return " = " + {"null": "None", "true": "True", "false": "False", "\"b''\"": 'b""'}.get(shown, shown)

    return [field.encode_name + default(field) for field in msgspec.structs.fields(struct)]


def test_the_tables_hold_every_struct_with_its_fields() -> None:
    defined = {
        name: value
        for module in (messages, status)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Message | Part) and value not in (Message, Part)
    }
    documented = {name: fields for name, fields in rows() if name not in ("Role", "Finish", "Pause")}
    assert documented.keys() == defined.keys()
    for name, struct in defined.items():
        assert documented[name] == shown(struct), name


@pytest.mark.parametrize("kind", [Role, Finish, Pause])
def test_enumerations(kind: type[Role] | type[Finish] | type[Pause]) -> None:
    values = ", ".join(f"{member.value} {member.name.lower()}" for member in kind)
    assert f"| `{kind.__name__}` | {values} |" in TEXT


def test_the_hello_of_the_page() -> None:
    hello = Hello(messages.PROTOCOL_VERSION, Role.FRONTEND, "frontend-123-1f2e3d4c", 123)
    assert f"   {json.dumps(msgspec.msgpack.decode(encode(hello)))}\n" in TEXT


def test_its_frontend_has_about_thirty_lines_and_works(short_path: Path) -> None:
    assert CODE is not None
    assert len(CODE[1].splitlines()) <= 38
    model = short_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY | {"vocab_size": 400}))
    serve = Serve(environment_in(short_path), model, device=NULL)
    try:
        command = [sys.executable, "-W", "ignore", "-c", CODE[1]]
        options = {"cwd": ROOT, "env": serve.environment, "text": True, "capture_output": True, "timeout": 30}
        answer = subprocess.run(command, check=False, **options)  # type: ignore[call-overload]
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.split(), "no text came"
        refused = subprocess.run([*command, "text"], check=False, **options)  # type: ignore[call-overload]
        assert refused.returncode == 1
        assert "token ids only" in refused.stderr
    finally:
        serve.stop()
