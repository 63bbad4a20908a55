"""What each KV format costs in accuracy: perplexity, greedy tokens, error of attention.

    python -m tools.eval_kv MODEL [--text FILE] [--formats auto,int8,...] [--tokens 4096] [--output J] [--plot PNG]

A format is a `--kv-cache-dtype`, optionally with the layers whose K stays in 16 bits (`int8:0+27` or `int8:all`), or
`fp32`: the whole model in float32, for comparison. All else runs in `--dtype`, with dense weights. `auto` always runs,
first: it is what the others are compared with.

- Perplexity: every token of the text but the first, given the tokens before it in a window that moves by `--stride`.
  Windows are prefilled in chunks, and attention reads K and V as stored. Differences are paired by token; their
  standard error is over runs of 128 tokens.
- Greedy tokens: after each prompt, the 16-bit run's own tokens are fed to all formats (agreement by position, and
  KL divergence of the next token's distribution), then each format goes on freely (first token that differs).
- Attention: see tools/kv_attention_error.py.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine_core.model_runner import ModelRunner, load_runner
from engine_core.plan import Row, StepPlan
from frontend.text_model import TextModel
from frontend.vocab import load_text_model
from protocol.config import EngineConfig
from protocol.messages import SamplingParams
from tools.environment import describe
from tools.kv_attention_error import model_errors, synthetic_errors

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
FORMATS = "auto,int8,fp8_e4m3,fp8_e5m2,fp8_per_token_head,fp32"
CHUNK, BLOCK, RUN = 256, 16, 128  # tokens
PREFIXES, PREFIX, CAPTURED = 4, 128, 512  # prompts from the text, their tokens; tokens of the attention error
COLOURS = {
    "fp16": "black",
    "bf16": "tab:gray",
    "int8": "tab:blue",
    "fp8_e4m3": "tab:orange",
    "fp8_e5m2": "tab:red",
    "fp8_per_token_head": "tab:green",
}
_CHARACTERS = 1 << 20  # what `encode` takes
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Material:
    """What all formats are run on."""

    text: list[int]
    prompts: list[list[int]]
    window: int
    stride: int
    steps: int  # greedy tokens per prompt


@dataclass(frozen=True)
class Outcome:
    """What one format gave."""

    bytes_per_token: int
    losses: Tensor  # -log p of each token of the text but the first, in nats, float32
    choices: Tensor  # the most likely token at each of these positions
    forced: Tensor  # float32 [prompts, steps, vocab]: log-probabilities after the 16-bit run's tokens
    free: Tensor  # [prompts, steps]: the format's own greedy tokens


def load_material(model: TextModel, text: str, options: argparse.Namespace) -> Material:
    """Tokens of the text, and prompts: those of the greedy reference and some from the text."""
    ids = model.encode(text[:_CHARACTERS], add_special_tokens=False)[: options.tokens]
    cases = json.loads((DATA / "smollm2-greedy.json").read_text())["cases"][: options.prompts]
    prompts = [model.encode(case["prompt_text"]) for case in cases]
    room = max(len(ids) - PREFIX, 1)
    prompts += [ids[at : at + PREFIX] for at in range(0, room, -(-room // PREFIXES))]
    return Material(ids, prompts, options.window, options.stride, options.steps)


def load_format(
    model: str, spec: str, material: Material, dtype: str, threads: int, num_layers: int = 0
) -> ModelRunner:
    """A runner with its pool in the format `spec`; `num_layers` is what `:all` means."""
    name, _, layers = spec.partition(":")
    layers = ",".join(map(str, range(num_layers))) if layers == "all" else layers.replace("+", ",")
    longest = max(map(len, material.prompts)) + material.steps
    context = max(material.window, longest)
    return load_runner(
        EngineConfig(
            model=model,
            dtype="fp32" if name == "fp32" else dtype,
            weights="dense",
            kv_cache_dtype="auto" if name == "fp32" else name,
            max_cache=context,
            num_blocks=max(-(-context // BLOCK), len(material.prompts) * -(-longest // BLOCK)),
            block_size=BLOCK,
            threads=threads,
            kv_16bit_layers=layers or "auto",
        )
    )


def run_format(runner: ModelRunner, material: Material, reference: Tensor | None) -> Outcome:
    """Run everything. `reference` has the 16-bit run's greedy tokens; None if this is that run."""
    losses, choices = score(runner, material)
    free, logprobs = decode(runner, material, None)
    return Outcome(
        bytes_per_token=runner.store.layout.image_bytes // BLOCK,
        losses=losses,
        choices=choices,
        forced=logprobs if reference is None else decode(runner, material, reference)[1],
        free=free,
    )


@torch.inference_mode()
def score(runner: ModelRunner, material: Material) -> tuple[Tensor, Tensor]:
    """Losses and most likely tokens of the text."""
    losses, choices, table = [], [], list(range(-(-material.window // BLOCK)))
    scored = 1  # tokens of the text; the first has nothing before it
    for origin in range(0, len(material.text), material.stride):
        window = material.text[origin : origin + material.window]
        for start in range(0, len(window), CHUNK):
            ids = window[start : start + CHUNK]
            hidden = runner.forward(StepPlan(0, [], [Row(0, ids, start, table, False, _GREEDY, 0)]))[1]
            skip = max(0, scored - 1 - origin - start)  # positions whose next token another window has scored
            targets = torch.tensor(material.text[origin + start + skip + 1 : origin + start + len(ids) + 1])
            if len(targets):
                logits = runner.decoder.logits(hidden[skip : skip + len(targets)])
                losses.append(logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0])
                choices.append(logits.argmax(-1))
                scored += len(targets)
        if scored == len(material.text):
            break
    return torch.cat(losses), torch.cat(choices)


@torch.inference_mode()
def decode(runner: ModelRunner, material: Material, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Greedy tokens `[prompts, steps]` and log-probabilities `[prompts, steps, vocab]`, all prompts in one batch.

    The tokens fed are `forced`, or else the greedy ones.
    """
    prompts, runs = material.prompts, []
    per_prompt = -(-(max(map(len, prompts)) + material.steps) // BLOCK)
    tables = [list(range(n * per_prompt, (n + 1) * per_prompt)) for n in range(len(prompts))]
    rows = [Row(n, ids, 0, tables[n], True, _GREEDY, 0) for n, ids in enumerate(prompts)]
    last = torch.cat([runner.forward(StepPlan(0, [], [row]))[1][-1:] for row in rows])
    for step in range(material.steps):
        runs.append(runner.decoder.logits(last).log_softmax(-1))
        fed = (runs[-1].argmax(-1) if forced is None else forced[:, step]).tolist()
        rows = [Row(n, [fed[n]], len(ids) + step, tables[n], True, _GREEDY, 0) for n, ids in enumerate(prompts)]
        last = runner.forward(StepPlan(0, rows, []))[1]
    logprobs = torch.stack(runs, 1)
    return logprobs.argmax(-1), logprobs


def runs_of(values: Tensor) -> Tensor:
    """Means over runs of RUN tokens."""
    return values[: len(values) // RUN * RUN].view(-1, RUN).mean(1)


def compare(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    """The figures of one format beside the 16-bit run."""
    difference = (outcome.losses - base.losses).double()
    runs = runs_of(difference)
    equal = outcome.free == base.free
    kl = (base.forced.exp() * (base.forced - outcome.forced)).sum(-1)
    return {
        "bytes_per_token": outcome.bytes_per_token,
        "perplexity": outcome.losses.double().mean().exp().item(),
        "perplexity_change": difference.mean().expm1().item(),
        "perplexity_change_standard_error": (runs.std() / len(runs) ** 0.5).item() if len(runs) > 1 else 0.0,
        "text_top1_agreement": (outcome.choices == base.choices).float().mean().item(),
        "greedy_agreement": (outcome.forced.argmax(-1) == base.free).float().mean().item(),
        "greedy_kl": kl.mean().item(),
        "first_divergences": equal.long().cumprod(1).sum(1).tolist(),  # the number of steps if there was none
        "steps": equal.shape[1],
        "loss_of_runs": [round(loss, 5) for loss in runs_of(outcome.losses).tolist()],
    }


def evaluate(model: str, text: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures by format, `auto` first."""
    material = load_material(load_text_model(model), text, options)
    specs = ["auto", *(spec for spec in options.formats if spec != "auto")]
    found: dict[str, dict[str, Any]] = {}
    base: Outcome | None = None
    layers = 0
    for spec in specs:
        runner = load_format(model, spec, material, options.dtype, options.threads, layers)
        layers = runner.model_config.num_layers
        outcome = run_format(runner, material, base.free if base else None)
        base = base or outcome
        found[spec] = {"scored_tokens": len(outcome.losses), **compare(outcome, base)}
        print(f"{spec}: perplexity {found[spec]['perplexity']:.3f}", file=sys.stderr, flush=True)
    return found


def attention_errors(model: str, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Errors on the model's own K and V in float32, and on synthetic ones."""
    material = load_material(load_text_model(model), text, options)
    names = [spec for spec in options.formats if ":" not in spec and spec not in ("auto", "fp32")]
    runner = load_format(model, "fp32", material, "fp32", options.threads)
    real = model_errors(runner, material.text[:CAPTURED], names)
    return {"model": real, "synthetic": synthetic_errors(names)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """For the terminal and the docs."""
    first = next(iter(found.values()))
    lines = [
        f"{first['scored_tokens']} tokens of text; {len(first['first_divergences'])} prompts, "
        f"{first['steps']} greedy tokens each",
        f"{'format':<20}{'B/token':>8}{'perplexity':>11}{'change':>18}{'top-1':>8}{'greedy':>8}{'KL':>9}{'diverges':>18}",
    ]
    for name, row in found.items():
        change = f"{row['perplexity_change']:+.2%} ± {row['perplexity_change_standard_error']:.2%}"
        indices = row["first_divergences"]
        diverges = f"{sum(indices) / len(indices):.1f} ({indices.count(row['steps'])} never)"
        lines.append(
            f"{name:<20}{row['bytes_per_token']:>8}{row['perplexity']:>11.3f}{change:>18}"
            f"{row['text_top1_agreement']:>8.1%}{row['greedy_agreement']:>8.1%}{row['greedy_kl']:>9.5f}{diverges:>18}"
        )
    return "\n".join(lines)


def attention_table(errors: dict[str, Any]) -> str:
    """Median (worst) error: over the model's layers, then by bias norm over placements and seeds."""
    norms = sorted({row["bias_norm"] for row in errors["synthetic"]})

    def cell(values: list[float]) -> str:
        return f"{median(values):.2%} ({max(values):.1%})"

    lines = [f"{'error of attention':<30}{'model':>17}" + "".join(f"{f'bias norm {norm}':>17}" for norm in norms)]
    for name, own in errors["model"].items():
        cells = [cell(own), *(cell(synthetic(errors, name, norm)) for norm in norms)]
        lines.append(f"{name:<30}" + "".join(f"{text:>17}" for text in cells))
    return "\n".join(lines)


def synthetic(errors: dict[str, Any], storage: str, norm: float) -> list[float]:
    """All errors of a storage at a bias norm."""
    rows = (row for row in errors["synthetic"] if (row["storage"], row["bias_norm"]) == (storage, norm))
    return [error for row in rows for error in row["errors"]]


def plot(report: dict[str, Any], path: Path) -> None:
    """Perplexity by format, and the error of attention by bias norm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(2, 3))
    rows = {name: row for name, row in report["formats"].items() if name != "auto"}
    names = list(rows)[::-1]
    changes = [rows[name]["perplexity_change"] for name in names]
    spread = [2 * rows[name]["perplexity_change_standard_error"] for name in names]
    left.barh(names, changes, xerr=spread, color=[COLOURS.get(name, "tab:gray") for name in names], capsize=3)
    left.axvline(0, color="black", linewidth=0.8)
    left.set_title(f"Perplexity against 16-bit KV, {report['text']}", fontsize=9)
    left.set_xlabel("change, with 2 standard errors")
    errors = report["attention"]
    norms = sorted({row["bias_norm"] for row in errors["synthetic"]})
    for name in errors["model"]:
        base, _, key = name.partition(", ")
        if key in ("", "K bf16"):
            middle = [median(synthetic(errors, name, norm)) for norm in norms]
            label = None if key else name
            right.plot(norms, middle, "--" if key else "-", marker=".", color=COLOURS.get(base), label=label)
    right.plot([], [], "--", color="gray", label="dashed: K in bf16")
    right.set_yscale("log")
    right.set_title("Error of attention, synthetic keys with outlier channels", fontsize=9)
    right.set_xlabel("norm of the key bias in a head")
    right.legend(fontsize=8, loc="lower right", ncols=2)
    percent = FuncFormatter(lambda value, _: f"{100 * value:g}%")
    left.xaxis.set_major_formatter(percent)
    right.yaxis.set_major_formatter(percent)
    left.grid(alpha=0.3, axis="x")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=DATA / "public-domain.txt")
    parser.add_argument("--formats", type=lambda value: value.split(","), default=FORMATS.split(","))
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument("--prompts", type=int, default=10, help="of the greedy reference, at most")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args(arguments)


def machine() -> str:
    """Kind of CPU and cores that we may use; no host name."""
    lines = Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def command() -> str:
    """The command line without folders."""
    return " ".join(["python -m tools.eval_kv", *(Path(a).name if "/" in a else a for a in sys.argv[1:])])


def main() -> None:
    options = parse()
    text = options.text.read_text("utf-8")
    report = describe() | {
        "command": command(),
        "machine": machine(),
        "threads": options.threads or len(os.sched_getaffinity(0)),
        "model": Path(options.model).name,
        "text": options.text.name,
        "dtype": options.dtype,
        "window": options.window,
        "stride": options.stride,
        "formats": evaluate(options.model, text, options),
        "attention": attention_errors(options.model, text, options),
    }
    print(table(report["formats"]), attention_table(report["attention"]), sep="\n\n")
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
