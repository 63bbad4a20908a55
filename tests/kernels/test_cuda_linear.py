"""The dense kernels for few rows: they compile without spills; on a GPU they agree with float64."""

import re

import pytest
import torch

from kernels import cuda_linear_sm90
from kernels.compiler import KernelError, compile_variant, read_source
from kernels.cuda_dense_linear import CudaDenseLinear, CudaGatedLinear
from kernels.cuda_linear import FewRowsLinear, OneRowLinear, all_variants
from kernels.cuda_linear_sm90 import HopperLinear, plan

gpu = pytest.mark.gpu
hopper = pytest.mark.skipif("torch.cuda.get_device_capability() != (9, 0)", reason="for Hopper only")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_it_compiles_without_spills(target: str) -> None:
    for unit in [*all_variants(), *cuda_linear_sm90.all_variants()]:
        if unit.only not in (None, target + "a"):
            continue
        assert compile_variant(unit, target).spill_bytes == 0, unit


def test_the_source_has_the_sizes_that_the_launch_has() -> None:
    source = read_source("dense_sm90.cu")
    for name, size in (("ROW_GROUPS", cuda_linear_sm90._ROW_GROUPS), ("MOST_STAGES", cuda_linear_sm90._MOST_STAGES)):
        assert re.findall(rf"{name} = (\d+)", source) == [str(size)], name


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2560, 2048), (7, 8), (130, 264), (2048, 11008)])
def test_it_agrees_with_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bias = torch.randn(shape[:1], generator=generator, device="cuda").to(dtype)
    x = torch.full((1, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
    x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
    for own_bias in (None, bias):
        out = OneRowLinear(weight, own_bias)(x)
        expected = x.double() @ weight.double().T + (0 if own_bias is None else own_bias.double())
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (2e-3 if dtype == torch.float16 else 1e-2)


@gpu
def test_what_does_not_fit_is_refused_before_the_launch() -> None:
    weight = torch.zeros(8, 16, device="cuda", dtype=torch.float16)
    layer = OneRowLinear(weight)
    for x in (weight.float()[:1], weight[:2], weight[:1, :8], weight[:0]):
        with pytest.raises(KernelError, match="x: "):
            layer(x)
    for bad in (weight.float(), weight[:, :12], weight.T, weight.cpu()):
        with pytest.raises(KernelError, match="weight: "):
            OneRowLinear(bad)


@gpu
@pytest.mark.parametrize("slices", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(2560, 2048), (7, 256), (130, 320), (2048, 11008), (22016, 2048), (40000, 288)])
def test_a_few_rows_agree_with_float64(shape: tuple[int, int], slices: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        bias = torch.randn(shape[:1], generator=generator, device="cuda").to(dtype)
        for own_bias in (None, bias):
            layer = FewRowsLinear(weight, own_bias, slices)
            for rows in (1, 2, 5, 7, 8):
                x = torch.full((rows, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
                x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
                out = layer(x)
                expected = x.double() @ weight.double().T + (0 if own_bias is None else own_bias.double())
                error = (out.double() - expected).norm() / expected.norm()
                assert error < (2e-3 if dtype == torch.float16 else 1e-2), (rows, error)
                assert torch.equal(layer(x), out), "sums are always added in the same order"


@gpu
def test_what_a_few_rows_can_not_have_is_refused() -> None:
    narrow = torch.zeros(64, 32, device="cuda", dtype=torch.float16)
    assert (FewRowsLinear(narrow)(narrow[:8]) == 0).all()
    with pytest.raises(KernelError, match="x: "):
        FewRowsLinear(narrow)(narrow[:9])
    for weight, slices in ((narrow, 2), (torch.zeros(64, 1 << 17, device="cuda", dtype=torch.float16), 0)):
        with pytest.raises(KernelError, match="too wide"):
            FewRowsLinear(weight, None, slices)


@pytest.mark.parametrize("outs", [8, 16, 264, 2048, 2560, 22016, 37888, 151936, 320008])
@pytest.mark.parametrize("steps", [1, 3, 32, 296])
def test_a_plan_covers_the_weight_and_leaves_few_blocks_idle(outs: int, steps: int) -> None:
    for most in (1, 4, 8):
        slices, rows, tiles = plan(outs, steps, 132, most)
        assert 1 <= slices <= min(most, steps) and rows % 8 == 0 and 8 <= rows <= 192
        assert (tiles - 1) * rows < outs <= tiles * rows
        groups = 132 // slices
        rounds = -(-tiles // groups)
        assert rounds * groups * rows < outs + 8 * groups * rounds


def test_a_tile_leaves_few_rows_of_the_products_idle() -> None:
    assert plan(10_240, 32, 132, 4) == (2, 160, 64)  # one slice would have tiles of 80 rows, in products of 128
    assert plan(4608, 56, 132, 4) == (3, 112, 42)


@gpu
@hopper
@pytest.mark.parametrize("slices", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", [(2560, 2048), (8, 256), (136, 1000), (2048, 11008), (22016, 2048), (40000, 288)])
def test_rows_on_hopper_agree_with_float64(shape: tuple[int, int], slices: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        bias = torch.randn(shape[:1], generator=generator, device="cuda").to(dtype)
        for own_bias in (None, bias):
            layer = HopperLinear(weight, own_bias, slices)
            for rows in (1, 7, 8, 9, 16, 31, 64, 65, 128):
                x = torch.full((rows, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
                x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
                expected = x.double() @ weight.double().T + (0 if own_bias is None else own_bias.double())
                out, parts = layer(x), layer.parts(x)
                assert torch.equal(layer(x), out) and torch.equal(layer.parts(x), parts), "always in the same order"
                assert 1 <= len(parts) <= slices
                for found, most in ((out, 2e-3 if dtype == torch.float16 else 1e-2), (parts.sum(0), 1e-4)):
                    assert (found.double() - expected).norm() / expected.norm() < most, rows


@gpu
@pytest.mark.parametrize("shape", [(8, 256), (88, 96), (1376, 2048), (11008, 2048), (2000, 328), (20000, 288)])
def test_a_gate_and_what_it_lets_through_agree_with_float64(shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        weight = (torch.randn(2 * shape[0], shape[1], generator=generator, device="cuda") * shape[1] ** -0.5).to(dtype)
        layer = CudaGatedLinear(weight)
        for rows in (1, 2, 5, 8, 9, 31, 64, 65, 100, 128, 129):
            x = torch.full((rows, shape[1] + 8), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
            gate, up = (x.double() @ weight.double().T).chunk(2, -1)
            out, expected = layer(x), gate * gate.sigmoid() * up
            assert out.shape == expected.shape
            assert (out.double() - expected).norm() / expected.norm() < (3e-3 if dtype == torch.float16 else 2e-2), rows
            assert torch.equal(layer(x), out), "always in the same order"


@gpu
def test_every_number_of_rows_finds_a_way() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for shape in ((64, 256), (4096, 512), (24000, 256)):
        weight = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        layer = CudaDenseLinear(weight, weight[:, 0].contiguous())
        for rows in (1, 2, 8, 9, 64, 65, 128, 129):
            x = torch.randn(rows, shape[1], generator=generator, device="cuda").bfloat16()
            expected = x.double() @ weight.double().T + weight[:, 0].double()
            parts = layer.parts(x)
            if torch.cuda.get_device_capability() == (9, 0):
                assert (parts.dim() == 3) == (8 < rows <= 128)
            for found in (layer(x), parts if parts.dim() == 2 else parts.sum(0)):
                assert (found.double() - expected).norm() / expected.norm() < 1e-2, rows


@gpu
@hopper
def test_what_the_hopper_kernel_can_not_have_is_refused() -> None:
    weight = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(KernelError, match="x: "):
        HopperLinear(weight)(torch.zeros(129, 64, device="cuda", dtype=torch.float16))
    for bad in (weight[:60], weight[:, :60], weight.float()):
        with pytest.raises(KernelError, match="weight: "):
            HopperLinear(bad)
