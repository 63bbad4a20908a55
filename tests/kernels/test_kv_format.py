"""KV formats: names, sizes, what every code means, what is written for hard values."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cuda_layout import plain_layout
from kernels.kv_format import KVCodec, KVShape, block_layout, kv_codecs, resolve_kv_dtype

QWEN25_3B = KVShape(num_layers=36, num_kv_heads=2, head_dim=128, block_size=16)
NAMES = {
    "int8": ("int8", "i8", "int8_per_token_head"),
    "fp8_e4m3": ("fp8", "e4m3", "fp8_e4m3"),
    "fp8_e5m2": ("e5m2", "fp8_e5m2"),
    "fp8_per_token_head": ("fp8_per_token_head",),
}
SCALED = ["int8", "fp8_per_token_head"]


def codec(name: str) -> KVCodec:
    return resolve_kv_dtype(name, torch.bfloat16)


def through(name: str, values: torch.Tensor) -> torch.Tensor:
    """Rows, stored and read in float32."""
    return codec(name).decode(*codec(name).encode(values), torch.float32)


@pytest.mark.parametrize("name", ["auto", "fp16", "bf16"])
def test_float_names_mean_the_compute_dtype(name: str) -> None:
    assert resolve_kv_dtype(name, torch.float16).dtype == torch.float16
    assert resolve_kv_dtype(name, torch.float32).name == "fp32"


@pytest.mark.parametrize(("name", "spelling"), [(name, spelling) for name in NAMES for spelling in NAMES[name]])
def test_spellings(name: str, spelling: str) -> None:
    assert codec(spelling).name == name


def test_unknown_name_lists_the_valid_ones() -> None:
    for wrong in ("fp7", "FP8", ""):
        with pytest.raises(ValueError, match=f"'{wrong}'; valid names: auto, fp16, bf16, ") as caught:
            codec(wrong)
        for spellings in NAMES.values():
            for spelling in spellings:
                assert spelling in str(caught.value)


@pytest.mark.parametrize(
    ("name", "size"),
    [("auto", 589_824), ("int8", 299_520), ("e4m3", 294_912), ("e5m2", 294_912), ("fp8_per_token_head", 299_520)],
)
def test_image_bytes_of_qwen(name: str, size: int) -> None:
    layout = block_layout(QWEN25_3B, resolve_kv_dtype(name, torch.float16), torch.float16)
    assert layout.image_bytes == size


def test_image_bytes_with_wide_layers() -> None:
    """A wide layer adds a byte per element of K and saves K's scales; the image stays a multiple of its rows."""
    for name, saved in (("e4m3", 0), ("int8", 2 * 2 * 16 * 2 - 128)):
        wide = block_layout(QWEN25_3B, codec(name), torch.float16, (0, 35)).image_bytes
        plain = block_layout(QWEN25_3B, codec(name), torch.float16).image_bytes
        assert wide == plain + 2 * 2 * 16 * 128 - saved
    half = resolve_kv_dtype("auto", torch.float16)
    assert block_layout(QWEN25_3B, half, torch.float16, (0, 35)).image_bytes == 589_824


@pytest.mark.parametrize("name", ["auto", *NAMES])
def test_layout_is_that_of_the_cuda_kernels(name: str) -> None:
    """Uniform, and with K of every layer in 16 bits."""
    for wide in ((), range(36)):
        layout = block_layout(QWEN25_3B, codec(name), torch.bfloat16, wide)
        for number, found in enumerate(layout.layers):
            theirs = plain_layout(found.k.kernel, found.v.kernel, 36, 2, 128, 16, number)
            assert theirs.offsets == (
                layout.image_bytes,
                found.k_offset,
                found.v_offset,
                found.k_scale_offset,
                found.v_scale_offset,
            )


@given(
    name=st.sampled_from(["auto", *NAMES]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    sizes=st.tuples(*(st.integers(1, most) for most in (4, 3, 40, 33))),
    wide=st.sets(st.integers(0, 3)),
)
def test_layout_places_everything_once(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], wide: set[int]
) -> None:
    """Aligned, in order, without overlap, inside the image."""
    shape = KVShape(sizes[0], sizes[1], 2 * sizes[2], sizes[3])
    layout = block_layout(shape, resolve_kv_dtype(name, dtype), dtype, wide)
    rows = shape.num_kv_heads * shape.block_size
    spans, scales = [], []
    for layer in layout.layers:
        for part, offset, scale in (
            (layer.k, layer.k_offset, layer.k_scale_offset),
            (layer.v, layer.v_offset, layer.v_scale_offset),
        ):
            size = shape.head_dim * part.dtype.itemsize
            assert offset % 16 == offset % size == layout.image_bytes % size == scale % 2 == 0
            spans.append((offset, offset + rows * size))
            scales.append((scale, scale + 2 * rows * part.has_scale))
    spans += scales
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.image_bytes
    assert layout.image_bytes % 16 == 0


def meaning(code: int, exponent_bits: int) -> float:
    """The value of an FP8 code, from the format's definition (arXiv 2209.05433)."""
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (fraction * 2 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "bits", "float8"), [("e4m3", 4, torch.float8_e4m3fn), ("e5m2", 5, torch.float8_e5m2)])
def test_every_code(name: str, bits: int, float8: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for row in (codes, codes.flip(0)):
        found = codec(name).decode(row.view(4, 64), None, dtype).flatten()
        by_definition = torch.tensor([meaning(code, bits) for code in row.tolist()])
        torch.testing.assert_close(found.float(), by_definition, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(found, row.view(float8).to(dtype), atol=0, rtol=0, equal_nan=True)
    numbers = codes[codec(name).decode(codes.view(1, -1), None, torch.float32)[0].isfinite()]
    again, _ = codec(name).encode(codec(name).decode(numbers.view(1, -1), None, torch.float32))
    assert torch.equal(again[0], numbers)  # and so each is written as itself


@pytest.mark.parametrize(("name", "top"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_fp8_saturates(name: str, top: float) -> None:
    values = [447.0, 448.0, 464.0, 465.0, 1000.0, -1000.0, 60000.0, -1e30, math.inf, -math.inf]
    found = through(name, torch.tensor([[*values, math.nan, 0.0]]))[0].tolist()
    for value, got in zip(values, found, strict=False):
        clamped = max(-top, min(top, value))
        assert abs(got - clamped) <= abs(clamped) * (2**-4 if name == "e4m3" else 2**-3)
        assert math.isfinite(got)
    assert math.isnan(found[-2])
    assert found[-1] == 0
    assert through(name, torch.tensor([[448.0, -448.0]])).tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_error_is_half_a_step_of_each_row(head_dim: int, dtype: torch.dtype) -> None:
    """Rows whose largest magnitude is 0.02, 5 and 300 side by side, and a row of zeros."""
    torch.manual_seed(0)
    tops = torch.tensor([[0.02], [5.0], [300.0], [0.0]])
    rows = torch.rand(4, head_dim).mul_(2).sub_(1)
    rows[:, 3] = 1
    rows = (rows * tops).to(dtype)
    data, scales = codec("int8").encode(rows)
    assert scales is not None
    assert scales.dtype == torch.float16
    found = codec("int8").decode(data, scales, torch.float32)
    steps = rows.float().abs().amax(1, keepdim=True) / 127
    assert bool(((found - rows.float()).abs() <= steps * 0.501).all())
    assert torch.equal(found[3], torch.zeros(head_dim))
    assert scales[3] == 0
    assert data.view(torch.int8)[:3].abs().amax(1).tolist() == [127] * 3


def test_int8_rounds_to_nearest_even_under_the_stored_scale() -> None:
    data, scales = codec("int8").encode(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.4, -127.0]]))
    assert scales is not None
    assert scales.item() == 1
    assert data.view(torch.int8).tolist() == [[127, 0, 2, 2, 0, -2, 126, -127]]


@pytest.mark.parametrize("name", SCALED)
def test_scales_saturate(name: str) -> None:
    """What float16 can't express as a scale is clamped, and small enough rows are zero: neither inf nor NaN."""
    top = 127 if name == "int8" else 448
    for large in (1e9, 3e38, math.inf):
        found = through(name, torch.tensor([[large, -large, 1.0, 0.0]]))[0].tolist()
        assert found == [top * 65504.0, -top * 65504.0, 0.0, 0.0]
    assert through(name, torch.tensor([[65504.0 * top, 0.0]]))[0].tolist() == [65504.0 * top, 0.0]
    for tiny in (1e-8, 1e-42, 0.0):
        assert through(name, torch.tensor([[tiny, -tiny]])).tolist() == [[0.0, 0.0]]
    for small in (1e-5, 1e-4, 1e-3):  # scales that float16 holds as subnormals
        found = through(name, torch.tensor([[small, -small / 2]]))[0].tolist()
        assert abs(found[0] - small) <= 448 * 2**-25
        assert abs(found[1] + small / 2) <= 448 * 2**-25


@pytest.mark.parametrize("name", SCALED)
def test_nan_spoils_its_row_only(name: str) -> None:
    rows = torch.ones(3, 32)
    rows[1, 5] = math.nan
    found = through(name, rows)
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.parametrize(
    ("name", "bound"), [("int8", 0.008), ("e4m3", 0.05), ("e5m2", 0.1), ("fp8_per_token_head", 0.05)]
)
def test_relative_error_of_normal_values(name: str, bound: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(500, 128)
    assert (through(name, rows) - rows).norm() / rows.norm() < bound


def test_scales_save_what_plain_fp8_flushes_or_clamps() -> None:
    torch.manual_seed(0)
    for size in (1e-3, 1e4):
        rows = torch.randn(100, 128) * size
        errors = {n: ((through(n, rows) - rows).norm() / rows.norm()).item() for n in ("e4m3", "fp8_per_token_head")}
        assert errors["fp8_per_token_head"] < 0.05 < 0.2 < errors["e4m3"]


def test_formats_are_listed_once() -> None:
    for dtype, first in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        assert [found.name for found in kv_codecs(dtype)] == [first, *NAMES]
