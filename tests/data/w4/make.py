"""Made the folders beside this file, with GPTQModel 7.7.0 and compressed-tensors 0.20.1, which the tests don't need.

    CUDA_VISIBLE_DEVICES= GPTQMODEL_CPU_WORKERS=2 python tests/data/w4/make.py TEXT

A tiny random Llama, quantised by each library; `expected.safetensors` has one layer's weights as the library itself
dequantises them.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SIZES = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}


def write_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.1, tie_word_embeddings=True)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "a", "pad_token": "b", "bos_token": "c", "unk_token": "d"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def linear(model: Any) -> dict[str, Any]:
    layer = model.model.layers[0]
    return {
        "q": layer.self_attn.q_proj,
        "o": layer.self_attn.o_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
    }


def keep(source: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    target = HERE / name
    target.mkdir(exist_ok=True)
    shutil.copy(source / "model.safetensors", target)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"].get("meta", {}).pop("offload_to_disk_path", None)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, target / "expected.safetensors")


def gptqmodel(base: Path, name: str, text: str, **options: Any) -> None:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.config import AWQConfig, QuantizeConfig

    made = base.parent / name
    config = (AWQConfig if name == "awq" else QuantizeConfig)(bits=4, **options)
    model = GPTQModel.load(str(base), config, device="cpu")
    model.quantize([text[at : at + 200] for at in range(0, 6000, 200)], batch_size=1)
    model.save(str(made))
    backend = BACKEND.TORCH_AWQ if name == "awq" else BACKEND.TORCH
    model = GPTQModel.load(str(made), device="cpu", backend=backend, dtype=torch.float16)
    expected = {}
    for part, module in linear(model.model).items():
        eye = torch.eye(module.in_features, dtype=torch.float16)
        expected[part] = module(eye).T if name == "awq" else module.dequantize_weight().T
    keep(made, name, expected)


def compressed_tensors(base: Path, name: str, symmetric: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    model, state, expected = LlamaForCausalLM.from_pretrained(base), {}, {}
    names = {module: part for part, module in linear(model).items()}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or path == "lm_head":
            state |= {f"{path}.{key}": value for key, value in module.named_parameters(recurse=False)}
            continue
        groups = module.weight.detach().view(len(module.weight), -1, 32)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        tensors = {"weight": module.weight.detach(), "weight_scale": scale, "weight_zero_point": zero}
        packed = Packer.compress(tensors, scheme)
        state |= {f"{path}.{key}": value for key, value in packed.items()}
        if module in names:
            expected[names[module]] = Packer.decompress(packed, scheme)["weight"]
    made = base.parent / name
    made.mkdir()
    state.pop("lm_head.weight", None)
    save_file({key: value.detach().clone() for key, value in state.items()}, made / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    entry = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"])
    config["quantization_config"] = json.loads(entry.model_dump_json()) | {"quantization_status": "compressed"}
    (made / "config.json").write_text(json.dumps(config, indent=2))
    keep(made, name, expected)


def main() -> None:
    text = Path(sys.argv[1]).read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        write_base(base)
        compressed_tensors(base, "compressed-tensors", symmetric=True)
        compressed_tensors(base, "compressed-tensors-asymmetric", symmetric=False)
        gptqmodel(base, "gptq", text, group_size=32, sym=False, desc_act=True, format="gptq")
        gptqmodel(base, "gptq_v2", text, group_size=-1, sym=False, act_group_aware=False, format="gptq_v2")
        gptqmodel(base, "awq", text, group_size=32, sym=False, format="gemm")


if __name__ == "__main__":
    main()
