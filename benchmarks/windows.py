"""Attention with a sliding window, with and without sinks, padded and packed, against a full layer: time and memory of
one call, forward and backward, by the number of tokens.

8 heads of 64, a window of 1,024, fp32, as a CPU computes it: what is compared are ways to the same kernel.
`python -m benchmarks.windows KIND TOKENS` is one call in a process of its own; it prints one JSON line. Memory is what
the call adds at its highest over queries, keys and values in place; their gradients are part of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.chunk_loss import held_mb
from benchmarks.figures import Figure

HEADS, WIDTH, WINDOW = 8, 64, 1024
TOKENS, LONG_TOKENS = 16_384, 131_072
"""A full layer's time at the longer one is an hour; its memory there is that of the shorter, times their ratio."""
DOCUMENTS = 4
"""Of equal length in a packed row."""
KINDS = ("window", "window, sinks", "window, packed", "window, sinks, packed")
FULL = {kind: kind.replace("window", "full") for kind in KINDS}
"""What each is measured against: a layer that sees all of the same row, in a packed one its own document."""
MOST_MEMORY, MOST_TIME = 2.0, 1.0
SPARE = 1.25
"""How much steeper than the number of tokens time may grow."""
DIFFERENCE = 1e-4
CHECKED_TOKENS = 6144
"""Documents of a packed row are longer than the window then."""
TIMEOUT_S = 1800.0


def run(_work: Path) -> dict[str, Any]:
    """Measure."""
    cases = {f"{kind}, {tokens}": one(kind, tokens) for kind in KINDS for tokens in (TOKENS, LONG_TOKENS)}
    cases |= {f"{kind}, {TOKENS}": one(kind, TOKENS) for kind in FULL.values()}
    parity = one("parity", CHECKED_TOKENS)
    return {
        "heads": HEADS,
        "width": WIDTH,
        "window": WINDOW,
        "documents": DOCUMENTS,
        "unit": "s of processor time and MB added, forward and backward",
        "cases": cases,
        "parity": parity,
        "figures": [figure.to_dict() for figure in figures(cases, parity)],
    }


def one(kind: str, tokens: int) -> dict[str, Any]:
    """In a process of its own."""
    print(f"  {kind}, {tokens} tokens", flush=True)
    return processes.run(
        [sys.executable, "-m", "benchmarks.windows", kind, str(tokens)], timeout_s=TIMEOUT_S
    ).last_json()


def figures(cases: dict[str, Any], parity: dict[str, float]) -> list[Figure]:
    """Of each kind, over a full layer of the same kind and over itself at fewer tokens."""
    found = []
    for kind in KINDS:
        full, short, long = (
            cases[name] for name in (f"{FULL[kind]}, {TOKENS}", f"{kind}, {TOKENS}", f"{kind}, {LONG_TOKENS}")
        )
        times = LONG_TOKENS / TOKENS
        found += [
            Figure(
                f"{kind}, {TOKENS:,}: memory / a full layer", short["added_mb"] / full["added_mb"], "×", MOST_MEMORY
            ),
            Figure(f"{kind}, {TOKENS:,}: time / a full layer", short["cpu_s"] / full["cpu_s"], "×", MOST_TIME),
            Figure(
                f"{kind}, {LONG_TOKENS:,}: memory / a full layer",
                long["added_mb"] / full["added_mb"] / times,
                "×",
                MOST_MEMORY,
            ),
            Figure(
                f"{kind}: time at {LONG_TOKENS:,} / at {TOKENS:,}", long["cpu_s"] / short["cpu_s"], "×", SPARE * times
            ),
            Figure(f"{kind}, {LONG_TOKENS:,}: memory", long["added_mb"], "MB"),
            Figure(f"{kind}, {LONG_TOKENS:,}: time", long["cpu_s"], "s"),
        ]
    found += [Figure(f"{kind}: worst difference from one mask", each, "", DIFFERENCE) for kind, each in parity.items()]
    return found


# --- one call ---------------------------------------------------------------------------------------------------------


def main(kind: str, tokens: int) -> None:
    """Time one call and see what it holds, or compare all of them."""
    import torch

    from mindspeed_mm.fsdp.ops.attention import varlen_attention

    if kind == "parity":
        print(json.dumps({kind: difference(kind, tokens) for kind in KINDS}))
        return
    q, k, v, options = inputs(kind, tokens)
    module = torch.nn.Module()
    first = slice(0, 2 * WINDOW)
    few = [part[:, :, first].detach().requires_grad_() for part in (q, k, v)]
    varlen_attention(module, *few, None, **{key: options[key] for key in ("s_aux",)})[0].sum().backward()
    before_mb = held_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest so far is forgotten
    began = time.process_time()
    output = varlen_attention(module, q, k, v, None, **options)[0]
    output.sum().backward()
    cpu_s = time.process_time() - began
    print(json.dumps({"cpu_s": cpu_s, "added_mb": held_mb("VmHWM") - before_mb}))


def inputs(kind: str, tokens: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Queries, keys and values (1, H, T, D), and what else attention is given."""
    import torch

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH).requires_grad_() for _ in range(3))
    options: dict[str, Any] = {"s_aux": torch.randn(HEADS).requires_grad_() if "sinks" in kind else None}
    if "window" in kind:
        options["sliding_window"] = WINDOW
    if "packed" in kind:
        borders = torch.arange(0, tokens + 1, tokens // DOCUMENTS, dtype=torch.int32)
        options |= {"cu_seq_lens_q": borders, "max_length_q": tokens // DOCUMENTS, "max_length_k": tokens // DOCUMENTS}
    return q, k, v, options


def difference(kind: str, tokens: int) -> float:
    """Largest difference of outputs and gradients from the softmax of all scores under one mask, over their norm."""
    import torch

    from mindspeed_mm.fsdp.ops.attention import varlen_attention

    q, k, v, options = inputs(kind, tokens)
    seed = torch.randn(1, tokens, HEADS, WIDTH)
    leaves = [q, k, v] if options["s_aux"] is None else [q, k, v, options["s_aux"]]
    output = varlen_attention(torch.nn.Module(), q, k, v, None, **options)[0]
    found = [output, *torch.autograd.grad(output, leaves, seed)]
    length = tokens // DOCUMENTS if "packed" in kind else tokens
    place = torch.arange(tokens)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < WINDOW) & (place[:, None] // length == place // length)
    exact, gradients = torch.empty_like(output), [torch.zeros_like(leaf) for leaf in leaves]
    for head in range(HEADS):  # all scores of one head at a time
        parts = [leaf.detach()[:, head].requires_grad_() for leaf in (q, k, v)]
        sink = None if len(leaves) == 3 else leaves[3].detach()[head].requires_grad_()
        scores = (parts[0] @ parts[1].transpose(1, 2) * WIDTH**-0.5).masked_fill(~seen, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.expand(1, tokens, 1)], dim=2)
        one_head = scores.softmax(dim=-1)[:, :, :tokens] @ parts[2]
        asked = parts if sink is None else [*parts, sink]
        exact[:, :, head] = one_head.detach()
        of_head = torch.autograd.grad(one_head, asked, seed[:, :, head])
        for whole, part in zip(gradients[:3], of_head, strict=False):
            whole[:, head] = part
        if sink is not None:
            gradients[3][head] = of_head[3]
    return max(
        float((one - other).detach().norm() / other.norm())
        for one, other in zip(found, [exact, *gradients], strict=True)
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
