"""Kernels that start while the one before them ends: what they do before they wait for its end."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kernels import (
    compiler,
    cuda_elementwise,
    cuda_layout,
    cuda_linear,
    cuda_linear_sm90,
    cuda_linear_w4,
    cuda_sampling,
)
from kernels.compiler import KernelError, Variant, compile_variant, load_nvrtc, read_source

WEIGHTS = "ld.global.nc.L1::no_allocate", "cp.async.bulk.tensor"
UPLOADS = ("ld.global.cg",)  # not through L1, which may have what was there before
# How each may reach global memory ahead of its wait: weights, inputs that were uploaded before the step, and the plan
# of decode attention, which is no longer being made when this starts early.
ALLOWED: dict[str, Sequence[str]] = {
    "decode_attention.cu": ("ld.global",),
    "dense_sm90.cu": WEIGHTS,
    "elementwise.cu": (),
    "few_rows.cu": WEIGHTS,
    "one_row.cu": WEIGHTS,
    "sampling.cu": UPLOADS,
    "scan_logits.cu": (),
    "top_logprobs.cu": (),
    "w4_matmul.cu": ("cp.async.ca", "cp.async.cg", "cp.async.commit_group"),
    "w4_matmul_sm90.cu": (),
    "write_kv.cu": UPLOADS,
}


def units_of(file: str) -> list[Variant]:
    """Some variants of each kind."""
    every = cuda_layout.all_variants() + cuda_sampling.all_variants() + cuda_elementwise.all_variants()
    every += cuda_linear.all_variants() + cuda_linear_sm90.all_variants() + cuda_linear_w4.all_variants()
    found = [unit for unit in every if unit.file == file]
    return found[:: max(1, len(found) // 8)]


@pytest.mark.parametrize("file", ALLOWED)
def test_before_the_wait_nothing_is_written_and_nothing_read_that_may_change(file: str) -> None:
    """Whatever the compiler makes of it: the kernel ahead may still be writing its output, and reading its input."""
    try:
        load_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))
    units = units_of(file)
    assert units
    for unit in units:
        code = compile_variant(replace(unit, only="compute_90a"), "compute_90a").image.decode()
        ahead, wait, _ = code.partition("griddepcontrol.wait;")
        found = re.findall(r"(?:ld|st|atom|red|cp)\.(?:async|global)[.:\w]*", ahead)
        assert wait and all(access.startswith(tuple(ALLOWED[file])) for access in found), (unit, found)


def test_4_bit_weights_alone_are_copied_before_the_wait_on_hopper() -> None:
    """There the copies are in branches, whose order in the code says little."""
    copying = read_source("w4_matmul_sm90.cu").partition("DEVICE void copy_ahead")[2]
    assert 0 < copying.index("if (part == 0) wait_for_previous();") < copying.index("load_box(to, p.x")


def test_sampling_starts_when_the_scan_has_waited() -> None:
    """What it reads of the inputs, and what others still read of its outputs, is settled by then."""
    scan = read_source("scan_logits.cu")
    assert 0 < scan.index("wait_for_previous();") < scan.index("let_next_start();")


def test_who_lets_the_next_kernel_start_waits_for_the_one_before() -> None:
    """Else what an earlier kernel wrote might not be there yet, for this one or for those after it."""
    early = []
    for path in sorted(compiler.SOURCES.glob("*.cu")):
        text = path.read_text("utf-8")
        entries = text.count('extern "C" __global__')
        waits = text.count("wait_for_previous();")
        assert waits == entries or (waits == 0 and "let_next_start();" not in text), path.name
        early += [path.name] * Variant(path.name).is_early
    assert early == list(ALLOWED)
