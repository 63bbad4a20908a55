"""The accuracy figures of KV formats: what they count, and the bounds that the formats have to keep."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from engine_core.model_runner import ModelRunner
from engine_core.plan import StepPlan
from tools import eval_kv
from tools.eval_kv import Material, Outcome, compare, decode, score
from tools.kv_attention_error import Case, Storage, synthetic_errors

VOCAB = 50


class Successor:
    """A model that is sure that the token after t is t + 1, unless it would be `mistake`: then it says 0."""

    def __init__(self, mistake: int = -1) -> None:
        self.decoder, self.mistake = self, mistake
        self.computed: list[int] = []

    def forward(self, plan: StepPlan) -> tuple[None, torch.Tensor]:
        rows = [*plan.decodes, *plan.prefills]
        self.computed += [len(row.tokens) for row in rows]
        return None, torch.tensor([token for row in rows for token in row.tokens])[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        following = (hidden[:, 0] + 1) % VOCAB
        return 100.0 * F.one_hot(following.masked_fill(following == self.mistake, 0), VOCAB).float()


def material(tokens: int, window: int = 64, stride: int = 32) -> Material:
    return Material([n % VOCAB for n in range(tokens)], [[1, 2], [7, 8, 9]], window, stride, steps=4)


def runner(model: Successor) -> ModelRunner:
    return cast(ModelRunner, model)


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 96, 97, 1000])
@pytest.mark.parametrize("stride", [16, 32, 64])
def test_every_token_but_the_first_is_scored_once(tokens: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_kv, "CHUNK", 24)
    losses, choices = score(runner(Successor(mistake=5)), material(tokens, stride=stride))
    text = torch.arange(1, tokens) % VOCAB
    assert torch.equal(choices, text.masked_fill(text == 5, 0))
    assert torch.equal(losses > 50, text == 5)


def test_windows_overlap_by_what_the_stride_leaves() -> None:
    model = Successor()
    score(runner(model), material(66, window=64, stride=16))
    assert model.computed == [64, 50]


def test_free_and_forced_decoding() -> None:
    free, _ = decode(runner(Successor()), material(10), None)
    assert free.tolist() == [[3, 4, 5, 6], [10, 11, 12, 13]]
    own, _ = decode(runner(Successor(mistake=5)), material(10), None)
    assert own.tolist() == [[3, 4, 0, 1], [10, 11, 12, 13]]
    forced, _ = decode(runner(Successor(mistake=5)), material(10), free)
    assert forced.tolist() == [[3, 4, 0, 6], [10, 11, 12, 13]]


def test_comparison_with_the_16_bit_run() -> None:
    def outcome(model: Successor, losses: float, base: torch.Tensor | None) -> Outcome:
        free, logprobs = decode(runner(model), material(10), None)
        if base is not None:
            logprobs = decode(runner(model), material(10), base)[1]
        return Outcome(10, torch.full((300,), losses), torch.zeros(300), logprobs, free)

    base = outcome(Successor(), 1.0, None)
    figures = compare(outcome(Successor(mistake=5), 1.01, base.free), base)
    assert figures["perplexity_change"] == pytest.approx(0.01005, rel=1e-3)
    assert figures["greedy_agreement"] == 7 / 8
    assert figures["first_divergences"] == [2, 4]
    assert compare(base, base)["greedy_kl"] == 0


def test_attention_is_causal_and_grouped() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, heads, 8, generator=random) for heads in (4, 2, 2))
    case = Case(query[2:], key, value)
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(case.exact.flatten(0, 1), theirs[:, 2:])


def test_error_of_attention_grows_with_the_bias_unless_keys_have_more_bits() -> None:
    rows = synthetic_errors(["int8", "fp8_e4m3"], seeds=2)

    def error(storage: Storage, norm: int) -> float:
        found = [row["errors"] for row in rows if (row["storage"], row["bias_norm"]) == (str(storage), norm)]
        return float(max(map(max, found)))

    assert error(Storage("fp16", "fp16"), 0) < error(Storage("bf16", "bf16"), 0) < error(Storage("int8", "int8"), 0)
    assert error(Storage("int8", "int8"), 0) < error(Storage("fp8_e4m3", "fp8_e4m3"), 0)
    assert error(Storage("int8", "int8"), 921) > 0.5
    assert error(Storage("int8", "fp16"), 921) < 0.1


@pytest.mark.model
@pytest.mark.timeout(240)  # 20 s of work, on cores that may be shared
def test_formats_keep_their_bounds_on_the_default_model(default_model: Path) -> None:
    """INT8 within 0.5 % of the 16-bit perplexity, E4M3 within 2 %; E5M2 has no bound, but has to make sense."""
    model, formats = str(default_model), ("--formats", "int8,fp8_e4m3,fp8_e5m2")
    sizes = ("--stride", "1024", "--steps", "8", "--prompts", "2")
    options = eval_kv.parse([model, *formats, *sizes])
    found: dict[str, Any] = eval_kv.evaluate(model, options.text.read_text("utf-8"), options)
    assert found["auto"]["scored_tokens"] > 3500
    assert 20 < found["auto"]["perplexity"] < 35
    assert abs(found["int8"]["perplexity_change"]) < 0.005
    assert abs(found["fp8_e4m3"]["perplexity_change"]) < 0.02
    assert abs(found["fp8_e5m2"]["perplexity_change"]) < 0.2
    assert found["int8"]["greedy_kl"] < found["fp8_e4m3"]["greedy_kl"] < found["fp8_e5m2"]["greedy_kl"]
    assert found["int8"]["bytes_per_token"] * 2 > found["auto"]["bytes_per_token"] > found["int8"]["bytes_per_token"]


def test_report_names_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["eval_kv", "/some/folder/m.gguf", "--text", "/else/t.txt", "--tokens", "9"])
    assert eval_kv.command() == "python -m tools.eval_kv m.gguf --text t.txt --tokens 9"
