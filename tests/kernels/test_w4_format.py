"""Published 4-bit layouts against references that read one element at a time, in plain integers."""

import numpy as np
import pytest
import torch

from kernels.w4_format import (
    AWQ_ORDER,
    W4FormatError,
    W4Weight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    pack_nibbles,
    unpack_nibbles,
)

OUT, IN = 24, 128


def nibble(word: torch.Tensor, at: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> 4 * at & 15


def words(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(-(2**31), 2**31, shape).astype(np.int32))


def make_scales(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(1)) + 0.1).half()


def groups_of(group_size: int) -> int:
    return IN // (IN if group_size == -1 else group_size)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(group_size: int, version: int, desc_act: bool) -> None:
    groups = groups_of(group_size)
    qweight, qzeros, scales = words(IN // 8, OUT), words(groups, OUT // 8), make_scales(groups, OUT)
    g_idx = torch.arange(IN, dtype=torch.int32) // (IN // groups)
    if desc_act:
        g_idx = g_idx[torch.randperm(IN, generator=torch.Generator().manual_seed(3))]
    weight = from_gptq(qweight, qzeros, scales, g_idx, group_size, version)
    assert weight.shape == (OUT, IN) and weight.num_groups == groups
    assert (weight.order is None) == (not desc_act or groups == 1)
    found = weight.dequantize(torch.float64)
    for o in range(OUT):
        for i in range(IN):
            group = int(g_idx[i])
            zero = nibble(qzeros[group, o // 8], o % 8)
            zero = (zero + 1) % 16 if version == 1 else zero
            assert found[o, i] == (nibble(qweight[i // 8, o], i % 8) - zero) * float(scales[group, o])


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_awq(group_size: int) -> None:
    groups = groups_of(group_size)
    qweight, qzeros, scales = words(IN, OUT // 8), words(groups, OUT // 8), make_scales(groups, OUT)
    found = from_awq(qweight, qzeros, scales, group_size).dequantize(torch.float64)
    for o in range(OUT):
        at = AWQ_ORDER.index(o % 8)
        for i in range(IN):
            group = i // (IN // groups)
            zero = nibble(qzeros[group, o // 8], at)
            assert found[o, i] == (nibble(qweight[i, o // 8], at) - zero) * float(scales[group, o])


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [OUT, OUT - 3])
def test_compressed_tensors(group_size: int, symmetric: bool, rows: int) -> None:
    groups = groups_of(group_size)
    packed, scales, zeros = words(rows, IN // 8), make_scales(rows, groups), words(-(-rows // 8), groups)
    g_idx = torch.arange(IN).flip(0) // (IN // groups)
    shape = torch.tensor([rows, IN])
    weight = from_compressed_tensors(packed, scales, None if symmetric else zeros, shape, g_idx, group_size)
    found = weight.dequantize(torch.float64)
    for o in range(rows):
        for i in range(IN):
            group = int(g_idx[i])
            zero = 0 if symmetric else nibble(zeros[o // 8, group], o % 8) - 8
            assert found[o, i] == (nibble(packed[o, i // 8], i % 8) - 8 - zero) * float(scales[o, group])
    unordered = torch.full((IN,), -1, dtype=torch.int32)
    assert from_compressed_tensors(packed, scales, None, (rows, IN), unordered, group_size).order is None


def test_both_gptq_versions_of_a_layer_are_one_weight_with_zeros_0_and_15_too() -> None:
    zeros = torch.arange(16, dtype=torch.uint8)[None]  # every zero point, 0 and 15 among them
    stored = [pack_nibbles(z).contiguous().view(torch.int32) for z in ((zeros + 15) & 15, zeros)]
    qweight, scales = words(4, 16), make_scales(1, 16)
    one, two = (from_gptq(qweight, q, scales, None, -1, version) for q, version in zip(stored, (1, 2), strict=True))
    assert one.zeros is not None and torch.equal(one.zeros[:, 0], zeros[0])
    assert torch.equal(one.dequantize(torch.float32), two.dequantize(torch.float32))
    awq = pack_nibbles(zeros[:, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]]).contiguous().view(torch.int32)
    found = from_awq(words(32, 2), awq, scales, 32).zeros
    assert found is not None and torch.equal(found[:, 0], zeros[0])


def test_zeros_that_are_all_8_are_left_out() -> None:
    qzeros = torch.full((1, OUT // 8), 0x77777777, dtype=torch.int32)
    assert from_gptq(words(IN // 8, OUT), qzeros, make_scales(1, OUT), None, -1).zeros is None


def test_nibbles_survive_a_round_trip() -> None:
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_large_products_are_rounded_once() -> None:
    """One product beyond float16's range is infinite in float16 only, not before."""
    codes = torch.full((1, 16), 0xFF, dtype=torch.uint8)
    weight = W4Weight(codes, torch.full((1, 1), 6e4, dtype=torch.half), torch.zeros(1, 1, dtype=torch.uint8), None, 32)
    assert weight.dequantize(torch.half).isinf().all()
    assert torch.equal(weight.dequantize(torch.float32), torch.full((1, 32), 15 * float(torch.tensor(6e4).half())))


def test_what_does_not_fit_is_refused_by_name() -> None:
    qweight, qzeros, scales = words(IN // 8, OUT), words(4, OUT // 8), make_scales(4, OUT)
    g_idx = torch.zeros(IN, dtype=torch.int32)
    with pytest.raises(W4FormatError, match="does not put 32 input features into each group"):
        from_gptq(qweight, qzeros, scales, g_idx, 32)
    with pytest.raises(W4FormatError, match="128 input features in groups of 48"):
        from_gptq(qweight, qzeros, scales, None, 48)
    with pytest.raises(W4FormatError, match="scales are float16"):
        from_gptq(qweight, qzeros, scales, None, 64)
    with pytest.raises(W4FormatError, match="version 3"):
        from_gptq(qweight, qzeros, scales, None, 32, 3)
    with pytest.raises(W4FormatError, match="qweight is int64"):
        from_awq(qweight.long(), qzeros, scales, 32)
    with pytest.raises(W4FormatError, match="weight_packed is int32"):
        from_compressed_tensors(words(8, 4), make_scales(8, 1), None, (8, 64), None, -1)
