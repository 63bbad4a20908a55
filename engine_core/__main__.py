"""`python -m engine_core serve|plan --config JSON`: how the command line starts the process that owns the GPU.

`plan` prints JSON. Standard output of `serve` carries lines for the parent: `progress DONE TOTAL` (bytes loaded), then
`ready`. Everything for people goes to standard error, and the last line there says why the process ended.
"""

import argparse
import json
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from protocol.config import EngineConfig, load_config
from protocol.errors import StartupError
from protocol.lifeline import hold_lifeline
from protocol.runtime_dir import RuntimeDir


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine_core", description=__doc__)
    parser.add_argument("command", choices=["serve", "plan"])
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON")
    parser.add_argument("--directory", type=Path, help="runtime directory; the default is a new one of our own")
    parser.add_argument("--request-tokens", type=int, default=0, help="plan: the length of a request to count")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        config = load_config(options.config)
        if options.command == "plan":
            from engine_core.memory import describe_plan

            print(json.dumps(describe_plan(config, options.request_tokens), indent=2))
            return 0
        return serve(config, options.directory)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def serve(config: EngineConfig, directory: Path | None) -> int:
    """Load the model and run the step loop until a signal. Handlers first, sockets second, the device last."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    hold_lifeline()
    own_directory = RuntimeDir() if directory is None else None
    try:
        return _serve(config, own_directory.path if own_directory else directory)  # type: ignore[arg-type]
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # it ends already
            signal.signal(number, signal.SIG_IGN)
        if own_directory:
            own_directory.remove()


def _serve(config: EngineConfig, directory: Path) -> int:
    from engine_core.core import open_core

    with open_core(config, directory, _print_progress) as core:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: core.stop())
        print("ready", flush=True)
        core.run()
    return 0


def _print_progress(done: int, total: int) -> None:
    print(f"progress {done} {total}", flush=True)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
