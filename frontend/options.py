"""The command line's options that several commands share, declared once: of the engine, of sampling; and sizes."""

import functools
import inspect
import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any

import typer

from frontend.models import DEFAULT_MODEL
from protocol.config import DEVICES, DTYPES, LOAD_FORMATS, PREEMPTIONS, WEIGHTS, EngineConfig
from protocol.messages import SamplingParams

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<suffix>i?b?)", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as 4GiB, 4G (the same), 4GB (decimal), 512MiB or 1073741824. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or (not match["unit"] and match["suffix"].lower() not in ("", "b")):
        raise typer.BadParameter(f"{text!r} is not a size; write 4GiB, 500MB or a number of bytes")
    base = 1000 if match["unit"] and match["suffix"].lower() == "b" else 1024
    return int(float(match["number"]) * base ** _UNITS[match["unit"].lower()])


def format_size(number: float) -> str:
    """A size for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def _of(choices: tuple[str, ...]) -> str:
    return "|".join(choices)


_DEFAULTS = EngineConfig(model="")
MODEL_HELP = (
    "A listed name (see `pagetide pull --list`), a GGUF file, a checkpoint folder, or a Hugging Face owner/repo."
)
_ENGINE: dict[str, Any] = {"rich_help_panel": "Engine"}
_CACHE: dict[str, Any] = {"rich_help_panel": "KV cache"}
_SWAP: dict[str, Any] = {"rich_help_panel": "Swap"}
_LOAD_FORMAT = typer.Option(
    metavar=_of(LOAD_FORMATS), help="dummy: random weights from config.json alone, to measure speed.", **_ENGINE
)
_KV_CACHE_DTYPE = typer.Option(
    help="Format of the KV cache: auto (the compute dtype), int8, fp8_e4m3, fp8_e5m2, fp8_per_token_head.", **_CACHE
)
_KV_16BIT_LAYERS = typer.Option(
    metavar="auto|none|0,27,...",
    help="Layers that keep K in 16 bits in 8-bit formats; auto: those whose key bias makes outliers.",
    **_CACHE,
)
_PREFILL_CHUNK_TOKENS = typer.Option(help="Prompt tokens in one step at most.", **_ENGINE)
_MAX_WAITING_REQUESTS = typer.Option(help="Requests that may wait for a place; more get HTTP 429.", **_ENGINE)
_MAX_WAITING_TOKENS = typer.Option(help="Prompt tokens that may wait; more get HTTP 429.", **_ENGINE)
_CPU_OFFLOAD = typer.Option(
    "--cpu-offload/--no-cpu-offload",
    help="Swap KV out to host memory when the device's blocks run short; otherwise drop it and compute it again.",
    **_SWAP,
)
_PREEMPTION = typer.Option(
    metavar=_of(PREEMPTIONS), help="How a request makes room for others; auto: whichever costs less time.", **_SWAP
)
_MAX_PAUSE = typer.Option(
    help="Seconds that a request may stay paused before it is the next to run again, as a target.", **_SWAP
)
_COPY_BANDWIDTH_LIMIT = typer.Option(
    parser=parse_size,
    metavar="SIZE",
    help="Bytes/s of copies out, and of copies in, at most: to imitate a slower link; 0: no limit.",
    **_SWAP,
)
_RECORD = typer.Option(
    metavar="FILE", help="Write all that the scheduler is told to FILE, for tools/replay.py.", **_SWAP
)


def engine_config(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that clients see; repeat it for aliases. Default: from MODEL.", **_ENGINE),
    ] = None,
    device: Annotated[str, typer.Option(metavar=_of(DEVICES), help="Where the model runs.", **_ENGINE)] = "cpu",
    dtype: Annotated[str, typer.Option(metavar=_of(DTYPES), help="Compute dtype.", **_ENGINE)] = "auto",
    weights: Annotated[
        str, typer.Option(metavar=_of(WEIGHTS), help="How linear weights are kept in memory.", **_ENGINE)
    ] = "auto",
    load_format: Annotated[str, _LOAD_FORMAT] = "auto",
    max_running: Annotated[int, typer.Option(help="Requests in one step at most.", **_ENGINE)] = _DEFAULTS.max_running,
    prefill_chunk_tokens: Annotated[int, _PREFILL_CHUNK_TOKENS] = _DEFAULTS.prefill_chunk_tokens,
    max_waiting_requests: Annotated[int, _MAX_WAITING_REQUESTS] = _DEFAULTS.max_waiting_requests,
    max_waiting_tokens: Annotated[int, _MAX_WAITING_TOKENS] = _DEFAULTS.max_waiting_tokens,
    threads: Annotated[int, typer.Option(help="CPU threads of the model; 0: by measurement.", **_ENGINE)] = 0,
    kv_cache_dtype: Annotated[str, _KV_CACHE_DTYPE] = "auto",
    kv_16bit_layers: Annotated[str, _KV_16BIT_LAYERS] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", **_CACHE)] = _DEFAULTS.block_size,
    max_cache: Annotated[
        int, typer.Option(help="Longest context of one request, in tokens; 0: the model's own limit.", **_CACHE)
    ] = 0,
    num_blocks: Annotated[int, typer.Option(help="KV blocks in the device pool; 0: from memory.", **_CACHE)] = 0,
    gpu_memory: Annotated[
        int,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="What the engine may use, e.g. 4GiB; 0: what is free.", **_CACHE
        ),
    ] = 0,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that the engine may use, without --gpu-memory.", **_CACHE)
    ] = _DEFAULTS.gpu_memory_utilization,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="On a GPU, plan each step while another runs.", **_ENGINE)
    ] = True,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Don't reuse the KV of equal prompt beginnings.", **_CACHE)
    ] = False,
    cpu_offload: Annotated[bool, _CPU_OFFLOAD] = True,
    max_cpu_offload_mb: Annotated[
        int, typer.Option(help="Host memory for swapped KV, in MiB at most; 0: always compute again.", **_SWAP)
    ] = _DEFAULTS.max_cpu_offload_mb,
    preemption: Annotated[str, _PREEMPTION] = "auto",
    max_pause: Annotated[float, _MAX_PAUSE] = _DEFAULTS.max_pause,
    copy_bandwidth_limit: Annotated[int, _COPY_BANDWIDTH_LIMIT] = 0,
    record: Annotated[str, _RECORD] = "",
    swap_every: Annotated[int, typer.Option(hidden=True)] = 0,
) -> EngineConfig:
    """The engine's configuration from its command-line options, with MODEL as the user gave it: not yet a path.

    Raises StartupError naming the option that is out of range.
    """
    options = locals()  # all others have their field's name
    names = options.pop("served_model_name") or [""]
    prefix_cache = not options.pop("no_prefix_cache")
    return EngineConfig(served_model_name=names[0], model_aliases=names[1:], prefix_cache=prefix_cache, **options)


_SAMPLING = {"rich_help_panel": "Sampling"}


def sampling_params(
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most. Default: what the context leaves.", **_SAMPLING)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", **_SAMPLING)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this mass.", **_SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Choose among so many likeliest tokens; 0: all.", **_SAMPLING)] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's probability.", **_SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.", **_SAMPLING)] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="For the same answer again. Default: a random one.", **_SAMPLING)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.", **_SAMPLING)] = False,
) -> SamplingParams:
    """The sampling parameters from command-line options; their ranges are checked with the request."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=secrets.randbits(63) if seed is None else seed,
        ignore_eos=ignore_eos,
    )


def takes(options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the parameters of `options` in place of its own first one, which gets what `options` returns."""
    shared = inspect.signature(options).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            value = options(**{name: arguments.pop(name) for name in shared})
            return command(value, **arguments)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate
