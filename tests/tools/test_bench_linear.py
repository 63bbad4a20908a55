"""Every form is timed at every number of rows, and the one that keeps Q8_0's bits computes the product."""

import torch

from tools.bench_linear import FORMS, ROWS, Q8Linear, measure


def test_every_form_has_its_times() -> None:
    best = measure(128, 1, 1)
    assert list(best) == list(FORMS)
    assert all(tuple(found) == ROWS and min(found.values()) > 0 for found in best.values())


def test_q8_0_is_a_product() -> None:
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    torch.testing.assert_close(Q8Linear(weight)(x.bfloat16()).float(), x @ weight.T, rtol=0.02, atol=0.3)
