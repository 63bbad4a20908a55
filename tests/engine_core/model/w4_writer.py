"""Writes tiny 4-bit checkpoints as GPTQModel, AutoAWQ and compressed-tensors lay them out, in plain integers.

Layouts: GPTQModel's qlinear pack (checkpoint_format gptq and gptq_v2), AutoAWQ's WQLinear_GEMM.from_linear,
compressed-tensors' pack_quantized compressor.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    method: str
    group_size: int = 32
    symmetric: bool = False
    version: int = 1  # of gptq
    desc_act: bool = False
    head: bool = False  # the head too
    shards: int = 1

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in vars(self).values())


def quantization_config(form: Format) -> dict[str, Any]:
    """As the libraries write it."""
    if form.method == "gptq":
        return {
            "bits": 4,
            "checkpoint_format": "gptq" if form.version == 1 else "gptq_v2",
            "damp_percent": 0.01,
            "desc_act": form.desc_act,
            "group_size": form.group_size,
            "lm_head": form.head,
            "meta": {"quantizer": ["gptqmodel:1.2.0"]},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "static_groups": False,
            "sym": form.symmetric,
            "true_sequential": True,
        }
    if form.method == "awq":
        return {
            "backend": "autoawq",
            "bits": 4,
            "do_fuse": False,
            "group_size": form.group_size,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
    weights = {
        "actorder": "group" if form.desc_act else None,
        "block_structure": None,
        "dynamic": False,
        "group_size": form.group_size if form.group_size > 0 else None,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group" if form.group_size > 0 else "channel",
        "symmetric": form.symmetric,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "global_compression_ratio": 1.5,
        "ignore": [] if form.head else ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def write_w4(model: Any, folder: Path, form: Format) -> dict[str, torch.Tensor]:
    """Write a float32 transformers model; returns the state dict as it then reads."""
    state, stored = dict(model.state_dict()), dict[str, torch.Tensor]()
    for number, (name, tensor) in enumerate(list(state.items())):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if "proj.weight" in name or (name == "lm_head.weight" and form.head):
            parts, state[name] = pack_weight(tensor.numpy(), form, number)
            stored |= {name.removesuffix("weight") + part: data for part, data in parts.items()}
        else:
            stored[name] = tensor.clone()
    config = model.config.to_dict() | {"quantization_config": quantization_config(form)}
    config["architectures"] = [type(model).__name__]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(stored)
    files = {f"model-{n:05}-of-{form.shards:05}.safetensors": names[n :: form.shards] for n in range(form.shards)}
    if form.shards == 1:
        files = {"model.safetensors": names}
    else:
        places = {name: file for file, those in files.items() for name in those}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file, those in files.items():
        save_file({name: stored[name].contiguous() for name in those}, folder / file, {"format": "pt"})
    return state


def pack_weight(weight: NDArray[Any], form: Format, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a quantised weight `[out, in]` by name, and its values."""
    rows, columns = weight.shape
    size = columns if form.group_size == -1 else form.group_size
    groups = np.arange(columns) // size
    if form.desc_act:
        groups = np.random.default_rng(seed).permutation(groups)
    low, high = (
        np.stack([pick(weight[:, groups == g], axis=1) for g in range(columns // size)], 1) for pick in (np.min, np.max)
    )
    if form.symmetric:
        scales, zeros = np.maximum(-low, high) / 7, np.full(low.shape, 8)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = (high - low) / 15
        zeros = np.clip(np.rint(-low / scales), 0, 15).astype(int)
        zeros[::3], zeros[1::3] = 0, 15  # the extremes, at the cost of what is clipped
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float32)[:, groups]
    codes = np.clip(np.rint(weight / wide) + zeros[:, groups], 0, 15).astype(int)
    values = torch.from_numpy(((codes - zeros[:, groups]) * wide).astype(np.float32))
    g_idx = torch.from_numpy(groups.astype(np.int32))
    if form.method == "gptq":
        stored = zeros if form.version == 2 else (zeros - 1) % 16
        parts = {"qweight": words(codes.T, 0), "qzeros": words(stored.T, 1), "scales": torch.from_numpy(scales.T)}
        return parts | {"g_idx": g_idx}, values
    if form.method == "awq":
        mixed = [8 * c + n for c in range(rows // 8) for n in AWQ_ORDER]
        parts = {"qweight": words(codes.T[:, mixed], 1), "qzeros": words(zeros.T[:, mixed], 1)}
        return parts | {"scales": torch.from_numpy(scales.T)}, values
    parts = {"weight_packed": words(codes, 1), "weight_scale": torch.from_numpy(scales)}
    parts["weight_shape"] = torch.tensor([rows, columns])
    if not form.symmetric:
        parts["weight_zero_point"] = words(zeros, 0)
    return parts | ({"weight_g_idx": g_idx} if form.desc_act else {}), values


def words(codes: NDArray[Any], axis: int) -> torch.Tensor:
    """Eight numbers along `axis` to an int32, the first in the lowest bits."""
    moved = np.moveaxis(codes, axis, -1)
    moved = np.pad(moved, ((0, 0), (0, -moved.shape[-1] % 8)))
    whole = (moved.reshape(moved.shape[0], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(-1)
    return torch.from_numpy(np.moveaxis(whole.astype(np.uint32), -1, axis).copy().view(np.int32))
