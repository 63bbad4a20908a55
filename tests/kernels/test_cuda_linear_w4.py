"""4-bit linear layers on CUDA against float64 on the dequantised weight; without a GPU, that every kernel compiles."""

import itertools
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import cuda_linear_w4
from kernels.compiler import KernelError, Variant, build, load_nvrtc
from kernels.cuda_linear_w4 import (
    FEW_TOKENS,
    HOPPER,
    HOPPER_SMALL,
    Gpu,
    W4Linear,
    all_variants,
    dequantize,
    few_grid,
    few_shared,
    few_warps,
    hopper_shared,
)
from kernels.w4_format import W4Weight, from_awq, from_compressed_tensors, from_gptq
from kernels.w4_packed import PackedW4, pack, pack_awq, pack_gptq

LIMITS = {torch.float16: 6e-4, torch.bfloat16: 4e-3}  # relative error
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kernel_compiles_without_a_spill() -> None:
    try:
        load_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))
    targets = ("sm_80", "sm_86", "sm_89", "sm_90")  # each unit for one; validate_kernels --compile takes all
    jobs = [(unit, targets[(i + i // 4) % 4]) for i, unit in enumerate(all_variants())]
    for job, binary in zip(jobs, build(jobs), strict=True):
        assert binary.spill_bytes == 0, (job, binary.log)
        assert 0 < binary.registers <= 255, (job, binary.log)
        assert "wgmma.mma_async instructions are serialized" not in binary.log, job


GPUS = (Gpu(132, 227 << 10, True), Gpu(108, 163 << 10, False), Gpu(20, 99 << 10, False))  # H200, A100, RTX 3050


@pytest.mark.parametrize("gpu", GPUS)
def test_plans_fit_in_shared_memory(gpu: Gpu) -> None:
    for group, record in ((128, 4), (128, 8), (64, 8), (32, 16)):
        for tokens, units in itertools.product((1, 8, 9, 16, 17, 32, 50), (2, 56, 296)):
            most = next((most for most in FEW_TOKENS if tokens <= most), 32)
            blocks, slices, chunks = few_grid(gpu, most, group, record, tokens, units, 4608)
            assert 1 <= slices <= units and 1 <= blocks <= 144 and chunks * most >= tokens
            x = min(tokens, most) * (-(-units // slices) * 128 + 16)
            rings = few_warps(gpu, most, group) * (4 * (1024 + 16 * record) + FEW_TOKENS[most] * 1024)
            assert few_shared(gpu, most, group, record, tokens, units, slices) == x + rings <= gpu.shared_bytes - 1024
        for table in (HOPPER, HOPPER_SMALL):
            for most, groups in table.items():
                assert hopper_shared(most, groups, record * 32) < (227 << 10) - 512


def test_tokens_choose_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a played GPU: which kernel is launched, and that its argument struct can be packed."""
    launched: list[str] = []

    def played(variant: Variant, layout: str, threads: int, device: int, shared: int = 0) -> object:
        def launch(grid: tuple[int, int, int], *arguments: int | float | bytes, shared_bytes: int = 0) -> None:
            struct.pack("@" + layout, *arguments)
            assert min(grid) >= 1 and threads <= 1024 and shared_bytes <= shared
            assert (shared_bytes > 0) == (variant.file == "w4_matmul.cu"), "the others take all"
            launched.append(variant.entry)

        return launch

    monkeypatch.setattr(cuda_linear_w4, "kernel", played)
    monkeypatch.setattr(cuda_linear_w4, "build_for", lambda variants, device: None)
    monkeypatch.setattr(cuda_linear_w4, "tensor_map", lambda x, rows, columns: bytes(128))
    for gpu, wanted in (
        (GPUS[0], {1: "", 8: "", 9: "_sm90", 128: "_sm90", 129: "dense"}),
        (GPUS[2], {1: "", 64: "", 65: "dense"}),
    ):
        monkeypatch.setattr(cuda_linear_w4, "gpu", lambda device, gpu=gpu: gpu)
        codes, records = torch.zeros(4, 4, 2, 32, 4, dtype=torch.int32), torch.zeros(4, 2, 2, 8, 4, dtype=torch.uint8)
        linear = W4Linear(PackedW4(codes, records, 1.0, None, 100, 200, 128, False, torch.half))
        for tokens, kind in wanted.items():
            launched.clear()
            assert linear(torch.zeros(tokens, 200, dtype=torch.half)).shape == (tokens, 100)
            assert launched == ["w4_dequantize" if kind == "dense" else f"w4_matmul{kind}"]
        cuda_linear_w4._dequantize_kernel.cache_clear()


def make_weight(
    rows: int, columns: int, group: int, zeros: bool, order: bool = False, scales: torch.dtype = torch.float16
) -> W4Weight:
    """Random, on the GPU."""
    shape = rows, columns // group
    return W4Weight(
        torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda"),
        (torch.rand(shape, device="cuda") * 0.01 + 0.002).to(scales),
        torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda") if zeros else None,
        torch.randperm(columns, device="cuda").int() if order else None,
        group,
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def poison(tokens: int, rows: int) -> None:
    """What torch's allocator hands out next is full of NaN."""
    for _ in range(3):
        torch.empty(tokens * rows * 8, device="cuda").fill_(float("nan"))


def test_what_is_not_on_a_gpu_is_refused() -> None:
    codes, scales = torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1)
    with pytest.raises(KernelError, match="wanted a CUDA device"):
        pack(W4Weight(codes, scales, None, None, 128), torch.float16)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "order"),
    [
        (512, 512, 128, False, False),
        (200, 704, 64, True, False),  # neither rows nor columns fill their tiles
        (337, 1184, 32, True, True),
        (96, 256, 32, False, False),
        (3584, 18944, 128, True, False),  # features do not fit in shared memory at once
        (20001, 640, 64, False, False),  # more row tiles than multiprocessors
        (8192, 4352, 128, False, False),  # not small
        (4608, 3584, 3584, True, False),  # one group a row
    ],
)
def test_products(dtype: torch.dtype, rows: int, columns: int, group: int, zeros: bool, order: bool) -> None:
    torch.manual_seed(rows)
    weight = make_weight(rows, columns, group, zeros, order)
    packed, exact = pack(weight, dtype), weight.dequantize(torch.float64)
    natural = weight.dequantize(dtype)
    assert torch.equal(dequantize(packed), natural if weight.order is None else natural[:, weight.order.long()])
    bias = torch.randn(rows, device="cuda").to(dtype)
    linear = W4Linear(packed, bias)
    paths: list[Callable[[torch.Tensor], torch.Tensor]] = [linear, linear.few, linear.dense]
    if cuda_linear_w4.gpu(0).has_wgmma:
        paths.append(linear.hopper)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 256, 300):
        wide = torch.full((tokens, columns + 8), float("nan"), dtype=dtype, device="cuda")
        wide[:, :columns] = torch.randn(tokens, columns, device="cuda")
        x = wide[:, :columns]  # rows lie apart, with NaN between them
        wanted = x.double() @ exact.T + bias.double()
        for path in paths:
            if path == linear.few and tokens > 64:
                continue
            poison(tokens, rows)
            given = x if path is linear or weight.order is None else x[:, weight.order.long()]
            found = path(given)
            assert relative_error(found, wanted) < LIMITS[dtype], (path, tokens)
            assert torch.equal(found, path(given)), (path, tokens)  # bit by bit


@pytest.mark.gpu
@NEEDS_GPU
def test_every_published_layout_packs_to_the_same_bits() -> None:
    rng = np.random.default_rng(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-(2**31), 2**31, shape).astype(np.int32)).cuda()

    rows, columns = 136, 256
    for group in (32, 64, 128, -1):
        groups = 1 if group == -1 else columns // group
        scales = torch.rand(groups, rows, device="cuda").half()
        g_idx = (torch.arange(columns, device="cuda") // (columns // groups))[torch.randperm(columns, device="cuda")]
        qweight, qzeros = words(columns // 8, rows), words(groups, rows // 8)
        for version in (1, 2):
            for index in (None, g_idx):
                straight = pack_gptq(qweight, qzeros, scales, index, group, version, torch.bfloat16)
                same(straight, pack(from_gptq(qweight, qzeros, scales, index, group, version), torch.bfloat16))
        qweight, qzeros = words(columns, rows // 8), words(groups, rows // 8)
        straight = pack_awq(qweight, qzeros, scales, torch.float16)
        same(straight, pack(from_awq(qweight, qzeros, scales, group), torch.float16))
        packed = words(rows, columns // 8)
        weight = from_compressed_tensors(packed, scales.T, None, (rows, columns), None, group)
        assert torch.equal(dequantize(pack(weight, torch.float16)), weight.dequantize(torch.float16))


def same(a: PackedW4, b: PackedW4) -> None:
    assert torch.equal(a.codes, b.codes) and torch.equal(a.records, b.records) and a.factor == b.factor
    assert a.order is b.order is None or (a.order is not None and b.order is not None and torch.equal(a.order, b.order))


@pytest.mark.gpu
@NEEDS_GPU
def test_scales_beyond_the_range_of_float16_stay_exact() -> None:
    for exponent in (-40, 20):
        weight = make_weight(64, 256, 64, True, scales=torch.bfloat16)
        weight = W4Weight(weight.codes, weight.scales * 2.0**exponent, weight.zeros, None, 64)
        assert torch.equal(dequantize(pack(weight, torch.bfloat16)), weight.dequantize(torch.bfloat16))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (48, 16384), (1376, 512), (22016, 2048)])
def test_a_gate_and_what_it_lets_through(rows: int, columns: int) -> None:
    for dtype, group, zeros in ((torch.half, 32, True), (torch.bfloat16, 128, False)):
        weight = make_weight(rows, columns, group, zeros)
        linear = W4Linear(pack(weight, dtype), gated=True)
        exact = weight.dequantize(torch.float64)
        for tokens in (1, 8, 9, 33, 65, 200, 1100):
            x = torch.randn(tokens, columns, device="cuda").to(dtype)
            y = x.double() @ exact.T
            gate, up = y[:, ::2], y[:, 1::2]
            wanted = gate * gate.sigmoid() * up
            for path in (linear, *([linear.few] if tokens <= 64 else [])):
                found = path(x)
                assert found.shape == wanted.shape
                assert relative_error(found, wanted) < 3 * LIMITS[dtype], (path, tokens)
                assert torch.equal(found, path(x)), (path, tokens)


@pytest.mark.gpu
@NEEDS_GPU
def test_large_activations_are_summed_in_float32() -> None:
    """Products and partial sums beyond 65504, in float16; the sum itself is in range."""
    weight = make_weight(64, 256, 128, False)
    x = torch.zeros(24, 256, dtype=torch.half, device="cuda")
    x[:, 0], x[:, 1] = 60000, -60000
    weight.codes[:, 0] = 0xFF  # two equal weights
    scales = torch.ones_like(weight.scales) * 3
    linear = W4Linear(pack(W4Weight(weight.codes, scales, None, None, 128), torch.half))
    for tokens in (1, 16, 24):
        assert torch.equal(linear(x[:tokens]), torch.zeros(tokens, 64, dtype=torch.half, device="cuda"))


@pytest.mark.gpu
@NEEDS_GPU
def test_replay_of_a_graph_gives_the_same_bits() -> None:
    linear = W4Linear(pack(make_weight(512, 1024, 128, True, True), torch.bfloat16))
    for tokens in (3, 40):
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        eager = linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = linear(x)
        for _ in range(2):
            replayed.zero_()
            graph.replay()
            assert torch.equal(eager, replayed)


@pytest.mark.gpu
@NEEDS_GPU
def test_bad_input_is_refused_before_a_launch() -> None:
    packed = pack(make_weight(64, 256, 128, False), torch.half)
    linear = W4Linear(packed)
    for x in (
        torch.zeros(2, 256, device="cuda"),
        torch.zeros(2, 264, dtype=torch.half, device="cuda"),
        torch.zeros(2, 264, dtype=torch.half, device="cuda")[:, 1:257],
        torch.zeros(2, 256, dtype=torch.half),
    ):
        with pytest.raises(KernelError, match=r"wanted torch\.float16"):
            linear(x)
    with pytest.raises(KernelError, match="bias"):
        W4Linear(packed, torch.zeros(63, dtype=torch.half, device="cuda"))
    assert linear(torch.zeros(0, 256, dtype=torch.half, device="cuda")).shape == (0, 64)
