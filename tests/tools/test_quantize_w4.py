"""Quantising to W4A16: the rounding, the folder it makes, and that others read it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_core.model_runner import load_runner
from engine_core.open_model import open_model
from engine_core.plan import Row, StepPlan
from frontend.vocab import load_text_model
from protocol.config import EngineConfig
from protocol.messages import SamplingParams
from tools import quantize_w4
from tools.w4_rounding import Options, round_weight

HAS_LIBRARY = importlib.util.find_spec("compressed_tensors") is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="compressed-tensors is not installed")
IDS = torch.randint(0, 160, (1, 40), generator=torch.Generator().manual_seed(0))
TINY = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}
KINDS = {"llama": ("Llama", {}), "qwen2": ("Qwen2", {"tie_word_embeddings": True}), "gemma3": ("Gemma3", {})}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny bfloat16 model, in memory and in a folder, with a tokenizer of letters."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder: Path = tmp_path_factory.mktemp(request.param)
    name, extra = KINDS[request.param]
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**TINY | extra)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:160]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, folder


def our_logits(path: Path) -> Tensor:
    runner = load_runner(EngineConfig(model=str(path), dtype="fp32", num_blocks=8, max_cache=64, threads=1))
    row = Row(0, IDS[0].tolist(), 0, [0, 1, 2], True, SamplingParams(temperature=0.0), 0)
    _, hidden = runner.forward(StepPlan(0, [], [row]))
    with torch.inference_mode():
        return runner.decoder.logits(hidden)


def weights(count: int = 48, columns: int = 128) -> Tensor:
    """Rows of very different sizes, one of them zeros, one with an outlier."""
    weight = (
        torch.randn(count, columns, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 1, count)[:, None]
    )
    weight[0], weight[1, 5] = 0, 50 * weight[1].abs().max()
    return weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_searched_scales_beat_the_range_s(group_size: int, symmetric: bool) -> None:
    weight = weights()
    found = round_weight(weight, Options(group_size, symmetric, torch.float16)).dequantize(torch.float32)
    groups = weight.view(len(weight), -1, 128 if group_size == -1 else group_size)
    if symmetric:
        scale, zero = groups.abs().amax(-1, keepdim=True) / 7, torch.tensor(8.0)
    else:
        low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
        scale = (high - low) / 15
        zero = (-low / scale.clamp_min(1e-30)).round()
    scale = scale.clamp_min(1e-30)
    plain = (((groups / scale + zero).round().clamp(0, 15) - zero) * scale).view_as(weight)
    ours, theirs = (found - weight).square().sum(1), (plain - weight).square().sum(1)
    assert (ours <= theirs * 1.01).all() and ours.sum() < (0.8 if symmetric else 0.96) * theirs.sum()
    assert found[0].count_nonzero() == 0


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_makes_a_smaller_error_on_its_inputs(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(400, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    inputs += 0.1 * torch.randn(400, 128, generator=generator)
    inputs[:, 7] = 0
    weight, options = weights(), Options(32, symmetric, torch.float16)
    hessian = inputs.T @ inputs / len(inputs)
    nearest, gptq = (round_weight(weight, options, h).dequantize(torch.float32) for h in (None, hessian))
    errors = [((found - weight) @ inputs.T).square().sum(1) for found in (nearest, gptq)]
    assert (errors[1] <= errors[0]).all() and (errors[1][2:] < 0.6 * errors[0][2:]).all()


def test_group_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="128 input features can't be in groups of 96"):
        round_weight(weights(), Options(96, True, torch.float16))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("gptq", [False, True])
def test_the_folder_holds_the_model(made: tuple[Any, Path], tmp_path: Path, asymmetric: bool, gptq: bool) -> None:
    """The tensors other than the layers' weights are untouched; logits are those of the rounded weights."""
    model, source = made
    arguments = [str(source), str(tmp_path / "out"), "--group-size", "32", "--no-perplexity", "--window", "64"]
    if gptq:
        (tmp_path / "text").write_text("calibration " * 40)
        arguments += ["--gptq", str(tmp_path / "text")]
    assert quantize_w4.main(arguments + ["--asymmetric"] * asymmetric) == 0
    opened = open_model(EngineConfig(model=str(tmp_path / "out")), torch.device("cpu"))
    assert opened.config.quantization is not None and opened.weights is not None
    rounded = {}
    for name, parameter in model.state_dict().items():
        if "proj.weight" in name:
            ours = f"layers.{name.split('.')[2]}.{name.split('.')[4].removesuffix('_proj')}"
            rounded[name] = opened.weights.dense(ours)
            assert opened.weights.group_size(ours) == 32
            assert (rounded[name] - parameter.float()).norm() / parameter.float().norm() < (0.2 if gptq else 0.13)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], parameter)
    reference = type(model)(model.config).float().eval()
    reference.load_state_dict(model.state_dict() | rounded)
    with torch.inference_mode():
        torch.testing.assert_close(our_logits(tmp_path / "out"), reference(IDS).logits[0], atol=1e-4, rtol=1e-4)
    if HAS_LIBRARY and not asymmetric:
        torch.testing.assert_close(their_logits(tmp_path / "out"), our_logits(tmp_path / "out"), atol=1e-4, rtol=1e-4)


def their_logits(folder: Path) -> Tensor:
    """Of transformers with compressed-tensors (0.20 can't open asymmetric weights, its own ones included)."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(IDS).logits[0]


@needs_library
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, -1])
def test_compressed_tensors_own_packing_reads_as_it_means(symmetric: bool, group_size: int) -> None:
    """And what we pack reads as we mean it there."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from kernels.w4_format import from_compressed_tensors

    entry = quantize_w4.config_entry(Options(group_size, symmetric, torch.float32), False)["config_groups"]["group_0"]
    args = QuantizationArgs(**{key: value for key, value in entry["weights"].items() if key != "observer"})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = weights(50)
    ours = round_weight(weight, Options(group_size, symmetric, torch.float32))
    packed = {"weight_packed": ours.codes.view(torch.int32), "weight_scale": ours.scales}
    packed["weight_shape"] = torch.tensor(weight.shape)
    state = {"weight": weight, "weight_scale": ours.scales}
    if ours.zeros is not None:
        packed["weight_zero_point"] = quantize_w4.packed_zeros(ours.zeros)
        state["weight_zero_point"] = ours.zeros.to(torch.int8) - 8
    expected = ours.dequantize(torch.float32)
    torch.testing.assert_close(Packer.decompress(packed, scheme)["weight"], expected)
    theirs = Packer.compress(state, scheme)
    parts = theirs["weight_packed"], theirs["weight_scale"], theirs.get("weight_zero_point"), theirs["weight_shape"]
    assert torch.equal(from_compressed_tensors(*parts, None, group_size).dequantize(torch.float32), expected)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A Llama of float16 and a byte-level tokenizer."""
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "So", "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(letters)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["S o"])
    writer.add_eos_token_id(257)
    rows = {"attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64)}
    rows |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    generator = torch.Generator().manual_seed(4)
    for name, shape in rows.items():
        writer.add_tensor(f"blk.0.{name}.weight", (0.1 * torch.randn(shape, generator=generator)).half().numpy())
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(64).numpy())
    writer.add_tensor("token_embd.weight", torch.randn(258, 64, generator=generator).half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_gguf(gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights in transformers' order, the tokenizer, and perplexities that are near each other."""
    (tmp_path / "text").write_text("Some text to be measured. " * 8)
    target = tmp_path / "out"
    arguments = [str(gguf_file), str(target), "--group-size", "32", "--text", str(tmp_path / "text"), "--window", "48"]
    assert quantize_w4.main(arguments) == 0
    assert "before" in capsys.readouterr().out
    before, after = our_logits(gguf_file), our_logits(target)
    assert (before - after).norm() / before.norm() < 0.3
    assert load_text_model(target).encode("Hi <end>") == load_text_model(gguf_file).encode("Hi <end>")
    config = json.loads((target / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("llama", [257])


def test_what_is_refused(made: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(made[1]), tmp_path / "out"
    for arguments, message in (
        ([source, source], "is there already"),
        ([source, str(target), "--group-size", "48"], "neither a multiple of 32 nor -1"),
        ([source, str(target), "--group-size", "64", "--no-perplexity"], "96 input features can't be in groups of 64"),
        ([str(tmp_path / "none"), str(target), "--no-perplexity"], "no such model"),
    ):
        assert quantize_w4.main(arguments) == 1
        assert message in capsys.readouterr().err
        assert not target.exists() and not list(tmp_path.glob(".out*"))
