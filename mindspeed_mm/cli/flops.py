"""The command `mm flops`: counts the FLOPs of a training step by module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from mindspeed_mm.core.counts import short_count
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.fsdp.tools.flops_tool.peaks import PRECISIONS

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


class Size(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on alone
    """Type of an option whose value is a size in pixels, `HEIGHTxWIDTH`, converted to (height, width)."""

    name = "HxW"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)[x×](\d+)", value)
        if found is None:
            self.fail(f"'{value}' is not a size; write HEIGHTxWIDTH, such as 480x832.", param, ctx)
        return int(found[1]), int(found[2])


_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command(epilog=EXAMPLES)
@click.argument("target", metavar="MODEL_FOLDER|CONFIG", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--seq", type=_COUNT, help="Tokens in a sample, media included; for a generator, in its caption.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Number of samples in a step.")
@click.option(
    "--labels", type=click.IntRange(min=0), help="Number of tokens with a label; default: all that are not media."
)
@click.option("--images", type=click.IntRange(min=0), default=0, help="Number of images or videos in a sample.")
@click.option(
    "--image-size",
    type=Size(),
    default=None,
    help="Size of each image or video in pixels; for a generator, the size it denoises.",
)
@click.option(
    "--frames",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Number of frames of each image or video; with more than one it is a video.",
)
@click.option("--audio", "sound_s", type=_POSITIVE, default=None, help="Seconds of audio in a sample.")
@click.option("--lora", is_flag=True, help="Train adapters on the default layers and nothing else.")
@click.option("--recompute", type=click.Choice(["full", "selective"]), help="Recompute blocks in the backward pass.")
@click.option(
    "--tokens-per-s", type=_POSITIVE, help="Compare this throughput of one device with its peak, in tokens per second."
)
@click.option("--device", help="Device whose peak the throughput is compared with: H100, H200, A100, 910B …")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True, help="Precision of the peak."
)
@click.option("--peak-tflops", type=_POSITIVE, help="Peak TFLOP/s of a device that is not in the table.")
@click.option("--json", "as_json", is_flag=True, help="Print the count as JSON.")
def command(
    target: Path, overrides: tuple[str, ...], seq: int | None, batch: int, labels: int | None, images: int,
    image_size: tuple[int, int] | None, frames: int, sound_s: float | None, lora: bool, recompute: str | None,
    tokens_per_s: float | None, device: str | None, precision: str, peak_tflops: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Count the FLOPs of a training step of MODEL_FOLDER, or of the model of CONFIG, by module.

    Needs the folder's config.json, no weights. OVERRIDES are section.key=value, for CONFIG.
    """
    from mindspeed_mm.fsdp.tools.flops_tool.imagined import SampleShape  # torch: the help does without
    from mindspeed_mm.tasks import flops as task

    height, width = image_size or (0, 0)
    sample = SampleShape(seq or 0, labels, images, height, width, frames, sound_s or 0.0)
    found = task.run(
        target, overrides, sample, samples=batch, lora=lora, recompute=recompute, tokens_per_s=tokens_per_s,
        device=device, precision=precision, peak_tflops=peak_tflops,
    )  # fmt: skip
    if as_json:
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
        f"a step, causal attention: {_short(_model(found.causal))}; full: {_short(_model(found.full))}",
        f"a token: {_short(_model(found.causal) / found.tokens)}; a sample: "
        f"{_short(_model(found.causal) / found.samples)}",
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
        forward, backward, again = map(_short, (row["forward"], row["backward"], row["recompute"]))
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


def _short(flops: float) -> str:
    """1.2e12 → `1.20 TFLOP`; `-` where there are none."""
    if not flops:
        return "-"
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= scale:
            return f"{flops / scale:.2f} {unit}FLOP"
    return f"{flops:.0f} FLOP"
