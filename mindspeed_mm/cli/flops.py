"""The command `mm flops`: counts the FLOPs of a training step by module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.counts import short_count
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.measure import FlopsRequest

if TYPE_CHECKING:
    from mindspeed_mm.tasks.flops import FlopsReport

EXAMPLES = """
\b
Examples:
  mm flops Qwen3-VL-8B-Instruct --seq 4096 --images 2 --image-size 768x1024
  mm flops Llama-3.1-8B --seq 8192 --tokens-per-s 6667 --device H100
  mm flops Wan2.1-T2V-14B --frames 81 --image-size 480x832 --recompute full
  mm flops run.yaml training.lora.enable=true --seq 2048 --json

\b
Conventions: a multiplication and an addition count as two FLOPs; norms, activations
and the optimizer are not counted. causal: attention over the pairs that its mask
allows; full: over all pairs. MFU does not count recomputation, HFU does.
"""


@click.command(epilog=EXAMPLES)
@takes(FlopsRequest)
def command(request: FlopsRequest) -> None:
    """Count the FLOPs of a training step of MODEL_FOLDER, or of the model of CONFIG, by module.

    Needs the folder's config.json, no weights. OVERRIDES are section.key=value, for CONFIG.
    """
    from mindspeed_mm.tasks import flops as task  # torch: the help does without

    found = task.run(request)
    if request.as_json:
        say_json(found.to_dict(), indent=2)
    else:
        say(as_text(found))


def as_text(found: FlopsReport) -> str:
    """A table and what it adds up to."""
    what = ", ".join(f"{rows:,.0f} {name}" for name, rows in found.lengths.items())
    lines = [
        f"{found.model}: {short_count(found.parameters)} parameters, {short_count(found.trained)} trained",
        f"a step of {found.samples:,} sample{'s' if found.samples > 1 else ''}: {what}",
        "",
        *_table(found),
        "",
        f"a step, causal attention: {_flops_words(_model(found.causal))}; full: {_flops_words(_model(found.full))}",
        f"a token: {_flops_words(_model(found.causal) / found.tokens)}; a sample: "
        f"{_flops_words(_model(found.causal) / found.samples)}",
    ]
    if found.uncounted:
        lines.append(f"not counted, because its FLOPs are not known: {', '.join(found.uncounted)}")
    if (speed := found.speed) is not None:
        lines.append(
            f"{speed.tokens_per_s:,.0f} tokens/s of {speed.device} ({speed.peak_tflops:g} TFLOP/s dense): "
            f"MFU {speed.mfu:.1%} causal, {speed.mfu_full:.1%} full; HFU {speed.hfu:.1%} causal"
        )
    return "\n".join(lines)


def _table(found: FlopsReport) -> list[str]:
    total = {"module": "total", "kind": "", **found.causal, "share": 1.0}
    table = [("module", "kind", "forward", "backward", "again", "share")]
    for row in [*found.rows, total]:
        forward, backward, again = map(_flops_words, (row["forward"], row["backward"], row["recompute"]))
        table.append((str(row["module"]), str(row["kind"]), forward, backward, again, f"{row['share']:.1%}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for module, kind, *numbers in table:
        cells = [module.ljust(widths[0]), kind.ljust(widths[1])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(cells))
    return lines


def _model(flops: dict[str, float]) -> float:
    return flops["forward"] + flops["backward"]


def _flops_words(flops: float) -> str:
    """1.2e12 → `1.20 TFLOP`; `-` where there are none."""
    if not flops:
        return "-"
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= scale:
            return f"{flops / scale:.2f} {unit}FLOP"
    return f"{flops:.0f} FLOP"
