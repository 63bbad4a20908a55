"""The engine's one configuration object: made by the CLI, checked here, passed to the core as JSON, never changed."""

import msgspec

from protocol.errors import StartupError

DEVICES = ("cpu", "cuda", "null")
DTYPES = ("auto", "fp32", "bf16", "fp16")
PREEMPTIONS = ("auto", "swap", "recompute")
WEIGHTS = ("auto", "dense", "int8", "int4")
LOAD_FORMATS = ("auto", "dummy")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the engine core is told at start. Sizes are in the unit that the comment says; 0 means "choose"."""

    model: str  # path of a GGUF file or of a folder with config.json
    served_model_name: str = ""
    model_aliases: list[str] = []
    device: str = "cpu"  # "null" runs no model: benchmarks of everything else
    dtype: str = "auto"  # compute dtype
    weights: str = "auto"  # how linear weights are kept: dense (compute dtype), int8, int4 where the file has 4 bits
    load_format: str = "auto"  # "dummy": random weights of the shapes in config.json, to measure speed
    kv_cache_dtype: str = "auto"
    kv_16bit_layers: str = "auto"  # where 8-bit formats keep K in 16 bits: auto (by outliers), none, or as in "0,27"
    block_size: int = 16  # tokens per KV block
    max_cache: int = 0  # tokens, the longest context of one request; 0: the model's own limit
    num_blocks: int = 0  # KV blocks in the device pool; 0: from memory
    gpu_memory: int = 0  # bytes the engine may use on the device; 0: from what is free
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that the engine may use, if gpu_memory is 0
    overlap: bool = True  # on a GPU, plan each step while the one before it runs
    max_running: int = 64  # requests in one step at most
    prefill_chunk_tokens: int = 512  # prompt tokens in one step at most, beside one token per decoding request
    prefix_cache: bool = True
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    threads: int = 0  # CPU threads of the model; 0: by measurement
    cpu_offload: bool = True
    max_cpu_offload_mb: int = 2048  # MiB of host memory for the KV of swapped requests at most; 0: recompute only
    preemption: str = "auto"  # how a request makes room: swap, recompute, or what costs less
    max_pause: float = 0.25  # seconds that one request stays swapped out while others run, as a target
    copy_bandwidth_limit: int = 0  # bytes/s of swap copies per direction, to imitate a slower link; 0: no limit
    record: str = ""  # file to write the scheduler's inputs to, for tools/replay.py
    swap_every: int = 0  # swap a request out at every n-th step though there is room: for tests and measurements

    def __post_init__(self) -> None:
        for name, choice, allowed in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
            ("--weights", self.weights, WEIGHTS),
            ("--load-format", self.load_format, LOAD_FORMATS),
            ("--preemption", self.preemption, PREEMPTIONS),
        ):
            if choice not in allowed:
                raise StartupError(f"{name} {choice!r} is not one of {', '.join(allowed)}")
        for name, value, low, high in (
            ("--block-size", self.block_size, 1, 256),
            ("--max-cache", self.max_cache, 0, 1 << 24),
            ("--num-blocks", self.num_blocks, 0, 1 << 31),
            ("--gpu-memory", self.gpu_memory, 0, 1 << 50),
            ("--max-running", self.max_running, 1, 4096),
            ("--prefill-chunk-tokens", self.prefill_chunk_tokens, 1, 1 << 20),
            ("--max-waiting-requests", self.max_waiting_requests, 1, 1 << 20),
            ("--max-waiting-tokens", self.max_waiting_tokens, 1, 1 << 31),
            ("--threads", self.threads, 0, 1024),
            ("--max-cpu-offload-mb", self.max_cpu_offload_mb, 0, 1 << 24),
            ("--copy-bandwidth-limit", self.copy_bandwidth_limit, 0, 1 << 50),
            ("--swap-every", self.swap_every, 0, 1 << 31),
        ):
            if not low <= value <= high:
                raise StartupError(f"{name} {value} is out of range: {low} to {high}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} is out of range: more than 0, at most 1"
            )
        if not 0 < self.max_pause <= 3600:
            raise StartupError(f"--max-pause {self.max_pause} is out of range: more than 0, at most 3600 seconds")

    def name_for_clients(self, default: str) -> str:
        """The served model name, or else `default`; dummy weights always show in it."""
        name = self.served_model_name or default
        return f"{name.removesuffix('-dummy')}-dummy" if self.load_format == "dummy" else name

    @property
    def offload_budget(self) -> int:
        """Bytes of host memory for the KV of swapped requests; 0 if none is ever swapped."""
        return (self.max_cpu_offload_mb << 20) * (self.cpu_offload and self.preemption != "recompute")


def dump_config(config: EngineConfig) -> str:
    """Encode as one line of JSON, for the core's command line."""
    return msgspec.json.encode(config).decode()


def load_config(text: str) -> EngineConfig:
    """Decode what `dump_config` wrote. Raises StartupError naming the field that is wrong."""
    try:
        return msgspec.json.decode(text, type=EngineConfig)
    except msgspec.DecodeError as error:
        raise StartupError(f"bad engine configuration: {error}") from error
