"""Weights from a folder of safetensors files, sharded or not."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine_core.model.config import ModelConfig
from engine_core.model.reading import Stored
from engine_core.model.safetensors_file import Unknown, read_safetensors
from engine_core.model.weights import Weight4, expected_shapes
from kernels.w4_format import W4FormatError, from_awq, from_compressed_tensors, from_gptq
from protocol.errors import StartupError

_GLOBAL = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "mlp_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PARTS = {  # of a 4-bit weight: by method, those that have to be there, and those that may be
    "gptq": ("qweight qzeros scales", "g_idx"),
    "awq": ("qweight qzeros scales", ""),
    "compressed-tensors": ("weight_packed weight_scale weight_shape", "weight_zero_point weight_g_idx"),
}


class SafetensorsWeights:
    """A `Weights` over `model.safetensors`, or over the shards that `model.safetensors.index.json` lists.

    With a `quantization` in the config, weights may be in its 4-bit form; which ones are is seen from the tensors.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises StartupError if a file is missing or damaged, or a tensor is not of a type or form that is known."""
        self._layer = _LAYER | ({"post_attention_layernorm": "attn_out_norm"} if config.output_norms else {})
        self._quantization = config.quantization
        self._where: dict[str, Stored] = {}
        self._packed: dict[str, dict[str, Stored]] = {}  # parts of 4-bit weights
        self._group_sizes: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, listed in _files(folder).items():
            tensors = read_safetensors(path)
            if missing := listed - set(tensors):
                raise StartupError(f"{path} lacks {sorted(missing)[0]}, which the index promises")
            self._add(tensors, path)
        for name, parts in self._packed.items():
            try:
                self._check_packed(name, parts)
            except (ValueError, IndexError, TypeError) as error:
                raise StartupError(f"the 4-bit weight {name} has parts of the wrong shape: {error}") from error
        self._drop_empty_biases(expected_shapes(config))
        self.total_bytes = sum(map(self.bytes_of, self.shapes))

    def dense(self, name: str) -> Tensor:  # noqa: D102
        if name in self._packed:
            self.read_to(name, out := torch.empty(self.shapes[name]))
            return out
        return self._where[name].read()

    def read_to(self, name: str, out: Tensor) -> None:  # noqa: D102
        if name in self._packed:
            self.four_bit(name, out.device).dequantize(out)
        else:
            self._where[name].read_to(out)

    def will_need(self, name: str) -> None:  # noqa: D102
        for part in self._parts(name):
            part.will_need()

    def group_size(self, name: str) -> int:  # noqa: D102
        return self._group_sizes.get(name, 0)

    def four_bit(self, name: str, device: torch.device) -> Weight4:  # noqa: D102
        assert self._quantization is not None, "there are no packed weights without it"
        part = {key: stored.read(device) for key, stored in self._packed[name].items()}
        size, (rows, columns) = self._group_sizes[name], self.shapes[name]
        try:
            if self._quantization.method == "awq":
                packed = from_awq(part["qweight"], part["qzeros"], part["scales"], size)
            elif self._quantization.method == "gptq":
                tensors = part["qweight"], part["qzeros"], part["scales"], part.get("g_idx")
                packed = from_gptq(*tensors, size, self._quantization.gptq_version)
            else:
                scale, zeros = part["weight_scale"], part.get("weight_zero_point")
                packed = from_compressed_tensors(
                    part["weight_packed"], scale, zeros, (rows, columns), part.get("weight_g_idx"), size
                )
        except W4FormatError as error:
            raise StartupError(f"{name}: {error}") from error
        return Weight4(packed)

    def bytes_of(self, name: str) -> int:  # noqa: D102
        return sum(part.nbytes for part in self._parts(name))

    def _parts(self, name: str) -> Iterable[Stored]:
        return self._packed[name].values() if name in self._packed else (self._where[name],)

    def _add(self, tensors: Mapping[str, Stored | Unknown], path: Path) -> None:
        needed, more = _PARTS[self._quantization.method] if self._quantization else ("", "")
        for theirs, stored in tensors.items():
            module, _, part = theirs.rpartition(".")
            is_packed = part in (*needed.split(), *more.split())
            ours = _our_name(f"{module}.weight" if is_packed else theirs, self._layer)
            if ours is None:
                continue
            if isinstance(stored, Unknown) or not (is_packed or stored.dtype in _DTYPES):
                kind = str(stored.dtype).removeprefix("torch.")
                raise StartupError(f"{path}: {theirs} has type {kind}, which is not supported")
            if is_packed:
                self._packed.setdefault(ours, {})[part] = stored
            else:
                self._where[ours] = stored
                self.shapes[ours] = stored.shape

    def _check_packed(self, name: str, parts: dict[str, Stored]) -> None:
        """Find shape and group size of a 4-bit weight. Its data is checked when it is read."""
        assert self._quantization is not None
        method = self._quantization.method
        wanted = (*_PARTS[method][0].split(), *parts)
        if missing := [part for part in wanted if part not in parts or not parts[part].nbytes]:
            raise StartupError(f"the 4-bit weight {name} lacks {missing[0]}")
        scales = parts["weight_scale" if method == "compressed-tensors" else "scales"].shape
        if method == "compressed-tensors":
            rows, columns = map(int, parts["weight_shape"].read().tolist())
            groups = scales[-1]
        else:
            wide, high = parts["qweight"].shape
            rows, columns = (high, 8 * wide) if method == "gptq" else (8 * high, wide)
            groups = scales[0]
        size = columns // max(groups, 1)
        if size * groups != columns or not self._quantization.allows(size, columns):
            sizes = ", ".join(map(str, sorted(self._quantization.group_sizes)))
            raise StartupError(
                f"{name} has {groups} groups in {columns} input features; its config says {sizes} a group"
            )
        self._group_sizes[name], self.shapes[name] = size, (rows, columns)

    def _drop_empty_biases(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """GPTQ checkpoints bring biases of zeros for layers that have none."""
        for name in self._packed:
            bias = f"{name}.bias"
            if bias in self._where and bias not in expected and not self._where[bias].read().any():
                del self._where[bias], self.shapes[bias]


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files to open, with the tensors that the index promises in each."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        path, others = folder / "model.safetensors", list(folder.glob("*.safetensors"))
        if not path.exists() and len(others) == 1:  # gptq_model-4bit-128g.safetensors and the like
            path = others[0]
        if not path.exists():
            raise StartupError(f"{folder} has neither model.safetensors nor {index.name}")
        return {path: set()}
    try:
        places = json.loads(index.read_text("utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in places.items():
            files.setdefault(folder / Path(file).name, set()).add(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StartupError(f"can't read {index}: {type(error).__name__}: {error}") from error
    return files


def _our_name(name: str, layer: Mapping[str, str]) -> str | None:
    """Our name; their own for an unknown tensor, so that `check_shapes` names it; None for what may be ignored."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias|inv_freq)", name)
    if match and match[2] == "self_attn.rotary_emb":  # old checkpoints carry the computed frequencies
        return None
    if not match or match[2] not in layer:
        return name
    return f"layers.{match[1]}.{layer[match[2]]}" + (".bias" if match[3] == "bias" else "")
