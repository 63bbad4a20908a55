"""The command `pagetide`. Commands import what they need when they run, so that `--help` and completion are quick."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from frontend.models import DEFAULT_MODEL, LISTED
from frontend.options import engine_config, sampling_params, takes
from protocol.config import EngineConfig, dump_config
from protocol.errors import PagetideError, StartupError
from protocol.messages import ChatPrompt, Prompt, SamplingParams, TextParams, TextPrompt
from protocol.runtime_dir import running_engines

EXIT_CODES = (
    "Exit codes: 0 done or stopped by a signal, 1 failed (the last line says why), 2 wrong usage, 130 interrupted."
)


class Commands(TyperGroup):
    """Turns the errors that users may see into one line and an exit code, in one place."""

    def invoke(self, context: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(context)
        except (StartupError, PagetideError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of our output has left, as `head` does
            sys.stdout = None
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, epilog=EXIT_CODES, rich_markup_mode="rich",
    help="An LLM engine for one GPU, or none, whose KV cache may be larger than the GPU's memory.",
)  # fmt: skip

Engine = Annotated[
    Path | None,
    typer.Option("--engine", metavar="DIR", help="Runtime directory of the engine. Default: the newest that runs."),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")]
ApiKey = Annotated[
    str, typer.Option(envvar="PAGETIDE_API_KEY", show_envvar=True, help="Key that clients must send as a bearer token.")
]
CorsOrigin = Annotated[
    list[str] | None, typer.Option(help="Web origin that may call the API from a browser; repeat for more. *: any.")
]


def find_engine(directory: Path | None) -> Path:
    """The runtime directory to use. Raises StartupError if no engine runs."""
    if directory is not None:
        if not directory.is_dir():
            raise StartupError(f"no engine runs in {directory}: there is no such directory")
        return directory
    engines = running_engines()
    if not engines:
        raise StartupError("no engine is running; start one with `pagetide serve`")
    return engines[0]


@app.command(rich_help_panel="Serve")
@takes(engine_config)
def serve(
    config: EngineConfig,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_servers: Annotated[int, typer.Option(min=1, max=64, help="API servers that share the port.")] = 1,
    tokenizers: Annotated[int, typer.Option(min=1, max=64, help="Tokenizer processes.")] = 1,
    detokenizers: Annotated[int, typer.Option(min=1, max=64, help="Detokenizer processes.")] = 1,
    api_key: ApiKey = "",
    cors_origin: CorsOrigin = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API: all processes, watched and restarted.

    Ctrl-C stops everything; a second one kills it.
    """
    from frontend import launch

    options = launch.ServeOptions(host, port, api_servers, tokenizers, detokenizers, api_key, tuple(cors_origin or ()))
    raise typer.Exit(launch.serve(config, options))


@app.command(rich_help_panel="Serve")
@takes(engine_config)
def core(config: EngineConfig) -> None:
    """Run the engine core alone. Attach a tokenizer, a detokenizer and an API server to it with the commands below."""
    from frontend import launch

    launch.exec_core(config)


@app.command(rich_help_panel="Serve")
def tokenizer(engine: Engine = None) -> None:
    """Run one more tokenizer for a running engine."""
    from frontend.services import run_tokenizer

    raise typer.Exit(run_tokenizer(find_engine(engine)))


@app.command(rich_help_panel="Serve")
def detokenizer(engine: Engine = None) -> None:
    """Run one more detokenizer for a running engine."""
    from frontend.services import run_detokenizer

    raise typer.Exit(run_detokenizer(find_engine(engine)))


@app.command(rich_help_panel="Serve")
def api(
    engine: Engine = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = "",
    cors_origin: CorsOrigin = None,
    alias: Annotated[list[str] | None, typer.Option(help="Further name of the model; repeat for more.")] = None,
    share_port: Annotated[
        bool, typer.Option("--share-port", help="Take turns with other API servers on this port.")
    ] = False,
) -> None:
    """Run one more API server for a running engine."""
    from frontend import launch

    options = launch.ServeOptions(host, port, api_key=api_key, cors_origins=tuple(cors_origin or ()))
    raise typer.Exit(launch.serve_api(find_engine(engine), options, tuple(alias or ()), share_port))


@app.command(rich_help_panel="Talk")
@takes(sampling_params)
def chat(
    sampling: SamplingParams,
    engine: Engine = None,
    system: Annotated[str, typer.Option(help="System message that opens the conversation.")] = "",
) -> None:
    """Talk with a running engine's model. /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."""
    import asyncio

    from frontend import talk

    asyncio.run(talk.chat(find_engine(engine), sampling, system))


@app.command(rich_help_panel="Talk")
@takes(sampling_params)
def generate(
    sampling: SamplingParams,
    prompt: Annotated[str, typer.Argument(help="What to ask, or with --raw to continue; - reads standard input.")],
    engine: Engine = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for more.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Tell on standard error, or in the JSON, where the time went.")
    ] = False,
) -> None:
    """Ask a running engine's model one thing and print the answer as it comes."""
    import asyncio

    from frontend import talk

    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system else []
    request: Prompt = TextPrompt(text) if raw else ChatPrompt([*messages, {"role": "user", "content": text}])
    params = TextParams(stop=stop or [], timing=timing)
    asyncio.run(talk.generate(find_engine(engine), request, sampling, params, as_json))


@app.command(rich_help_panel="Look")
def status(
    engine: Engine = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table and end; the default without a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
) -> None:
    """Show what a running engine does: requests, KV blocks, memory, connected processes. Ctrl-C leaves."""
    from rich.console import Console

    from frontend import status_view

    directory = find_engine(engine)
    if as_json:
        with status_view.StatusReader(directory) as reader:
            typer.echo(status_view.as_json(reader.read()))
    else:
        status_view.show_status(directory, Console(), once or not sys.stdout.isatty())


@app.command(rich_help_panel="Look")
@takes(engine_config)
def plan(
    config: EngineConfig,
    request_tokens: Annotated[int, typer.Option(min=0, help="Count requests of this length; 0: of the context.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would fit: weights, workspace, KV pool, blocks, tokens, requests. Loads no weights."""
    import subprocess

    from frontend.launch import PYTHON, resolve_config

    command = [*PYTHON, "engine_core", "plan", "--config", dump_config(resolve_config(config))]
    process = subprocess.run(
        [*command, "--request-tokens", str(request_tokens)], stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode != 0:
        raise typer.Exit(1)  # its own last line has said why
    if as_json:
        typer.echo(process.stdout.strip())
        return
    import json

    from rich.console import Console

    from frontend.status_view import plan_view

    Console().print(plan_view(json.loads(process.stdout)))


@app.command(rich_help_panel="Look")
def pull(
    name: Annotated[
        str, typer.Argument(help="A listed name, or a Hugging Face owner/repo or owner/repo/FILE.gguf.")
    ] = DEFAULT_MODEL,
    list_models: Annotated[bool, typer.Option("--list", help="Print the listed names and end.")] = False,
) -> None:
    """Fetch a model into the user's cache, or what is new of a Hugging Face repository. Prints its path."""
    from frontend import models
    from frontend.launch import Bar

    if list_models:
        for listed, model in LISTED.items():
            typer.echo(f"{listed}\t{model.about}\t{models.local_path(listed) or 'not pulled'}")
        return
    with Bar(f"downloading {name}") as bar:
        path = models.pull(name, bar.update)
    typer.echo(path)


if __name__ == "__main__":
    app()
