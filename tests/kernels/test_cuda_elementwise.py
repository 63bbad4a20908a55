"""The small CUDA ops against float64, into poisoned outputs; without a GPU, that they compile and refuse bad input."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels import cuda_elementwise as ops
from kernels import cuda_sampling
from kernels.compiler import KernelError, build, load_nvrtc, read_source

DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place, relative
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_small_kernel_compiles_without_a_spill() -> None:
    try:
        load_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))
    units = ops.all_variants() + cuda_sampling.all_variants()
    jobs = [(unit, target) for unit in units for target in ("sm_80", "sm_86", "sm_89", "sm_90")]
    for job, binary in zip(jobs, build(jobs), strict=True):
        assert binary.spill_bytes == 0, (job, binary.log)
        assert 0 < binary.registers <= 128, (job, binary.log)


def test_the_scratch_of_sampling_is_as_large_as_the_source_says() -> None:
    source = read_source("sampling.cu")
    parts, candidates = (int(re.findall(rf" {name} = (\d+);", source)[0]) for name in ("MOST_PARTS", "CANDIDATES"))
    assert "SLOT = MOST_PARTS + CANDIDATES + 1;" in source and parts + candidates + 1 == cuda_sampling._SLOT


def test_what_is_not_on_a_gpu_or_not_aligned_is_refused() -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    calls: list[Callable[[], object]] = [
        lambda: ops.rms_norm(x, weight, 1e-6),
        lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        lambda: ops.add_rms_norm(x[None].float(), x, weight, 1e-6),
        lambda: ops.silu_mul(x),
        lambda: ops.embedding(torch.zeros(3, dtype=torch.int64), x),
    ]
    for call in calls:
        with pytest.raises(KernelError, match="on a CUDA device"):
            call()
    with pytest.raises(KernelError, match="no CUDA device"):
        cuda_sampling.Sampling(4, 1000, torch.float32, torch.device("cpu"))
    with pytest.raises(KernelError, match="at most"):
        cuda_sampling.Sampling(4, 1 << 20, torch.float32, torch.device("cpu"))
    place = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KernelError, match="on a CUDA device"):
        cuda_sampling.forbid(torch.zeros(2, 8), place, place)


def guarded(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN between two guard rows, and the whole of it."""
    whole = torch.full((rows + 2, width), float("nan"), dtype=dtype, device="cuda")
    whole[0] = whole[-1] = 7
    return whole[1:-1], whole


def close(out: torch.Tensor, wanted: torch.Tensor, rounding: float, least: float = 2.0**-24) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=rounding * 1.1, atol=least)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 576, 2048, 3584, 4096, 8192, 16384])
def test_a_norm_of_what_comes_in_parts(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    for slices, rows in ((1, 3), (2, 1), (5, 130), (8, 32)):
        parts = torch.randn(slices, rows, width, device="cuda")
        old, weight = torch.randn(rows, width, device="cuda").to(dtype), torch.randn(width, device="cuda").to(dtype)
        residual, (out, whole) = old.clone(), guarded(rows, width, dtype)
        ops.add_rms_norm(parts, residual, weight, 1e-6, out)
        close(residual, parts.double().sum(0) + old.double(), ROUNDING[dtype], 2e-6)  # float32 sums that cancel
        kept = residual.double()
        close(out, kept * (kept.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double(), ROUNDING[dtype])
        assert (whole[0] == 7).all() and (whole[-1] == 7).all()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 576, 2048, 3584, 4096, 8192, 16384])
def test_norms(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    for rows in (1, 3, 130):
        # Rows lie apart, with NaN between them.
        both = torch.full((rows, 2, width), float("nan"), dtype=dtype, device="cuda")
        both[:, 0] = torch.randn(rows, width, device="cuda") * 3
        x, weight = both[:, 0], torch.randn(width, device="cuda").to(dtype)
        out, whole = guarded(rows, width, dtype)
        assert ops.rms_norm(x, weight, 1e-6, out) is out
        close(out, F.rms_norm(x.double(), (width,), weight.double(), 1e-6), ROUNDING[dtype])
        residual = torch.randn(rows, width, device="cuda").to(dtype)
        kept = x + residual
        out, other = guarded(rows, width, dtype)
        ops.add_rms_norm(x, residual, weight, 1e-6, out)
        assert torch.equal(residual, kept)
        close(out, F.rms_norm(kept.double(), (width,), weight.double(), 1e-6), ROUNDING[dtype])
        assert (whole[[0, -1]] == 7).all() and (other[[0, -1]] == 7).all()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1536, 11008, 18944])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    for rows in (1, 3, 130):
        gate_up = (torch.randn(rows, 2 * width, device="cuda") * 4).to(dtype)
        gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.0])
        out, whole = guarded(rows, width, dtype)
        gate, up = gate_up.chunk(2, -1)
        for in_pairs, x in ((False, gate_up), (True, torch.stack((gate, up), -1).flatten(1))):
            whole[1:-1] = float("nan")
            ops.silu_mul(x, out, in_pairs)
            wanted = F.silu(gate.double()) * up.double()
            torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING[dtype] * 1.1, atol=1e-7)
            assert (whole[[0, -1]] == 7).all()


@pytest.mark.gpu
@NEEDS_GPU
def test_embedding() -> None:
    table = torch.randn(1000, 896, device="cuda").bfloat16()
    ids = torch.tensor([0, 999, 5, 5, 1000, -1], device="cuda")
    out, whole = guarded(6, 896, torch.bfloat16)
    ops.embedding(ids, table, out)
    assert torch.equal(out[:4], table[ids[:4]])
    assert out[4:].isnan().all()
    assert (whole[[0, -1]] == 7).all()


@pytest.mark.gpu
@NEEDS_GPU
def test_misaligned_or_mistyped_input_is_refused_before_a_launch() -> None:
    x = torch.zeros(4, 72, dtype=torch.half, device="cuda")
    with pytest.raises(KernelError, match="half of 72"):
        ops.silu_mul(x)
    with pytest.raises(KernelError, match="16-byte aligned"):
        ops.rms_norm(x[:, 1:65], x[0, :64], 1e-6)
    with pytest.raises(KernelError, match="weight"):
        ops.rms_norm(x, x[0].float(), 1e-6)
    with pytest.raises(KernelError, match="residual"):
        ops.add_rms_norm(x, x[:3], x[0], 1e-6)
    with pytest.raises(KernelError, match="ids"):
        ops.embedding(torch.zeros(4, dtype=torch.int32, device="cuda"), x)


@pytest.mark.gpu
@NEEDS_GPU
def test_replay_of_a_graph_gives_the_same_bits() -> None:
    x, residual, weight = (torch.randn(n, 2048, device="cuda").half() for n in (5, 5, 1))
    start = residual.clone()
    eager = ops.silu_mul(ops.add_rms_norm(x, residual, weight[0], 1e-5))
    residual.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.silu_mul(ops.add_rms_norm(x, residual, weight[0], 1e-5))
    graph.replay()
    assert torch.equal(eager, replayed)
