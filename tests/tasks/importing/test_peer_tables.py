"""docs/coming-from.md: its tables are those of the importer, and what it calls different is different."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.other_tools import TOOLS, rows_of, words_of

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"
BEGIN, END = "<!-- words: begin -->\n", "<!-- words: end -->\n"


def tables() -> str:
    """A table of each tool: its settings, and what they are here."""
    return "\n".join(f"### {tool.title}: all settings\n\n{table(name)}" for name, tool in TOOLS.items())


def table(tool: str) -> str:
    """Settings that are translated, by our key; then those that are not supported."""
    rows = rows_of(tool)
    by_key: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == "translated" and row.ours:
            by_key.setdefault(row.ours, []).extend(row.words)
    lines = [f"| {_listed(words)} | `{key}` |" for key, words in by_key.items()]
    lines += [f"| {_listed(row.words)} | not supported: {row.note} |" for row in rows if row.kind == "unsupported"]
    return "\n".join(["| there | here |", "|---|---|", *lines]) + "\n"


def _listed(words: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def test_the_tables_are_those_of_the_importer() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == tables()


@pytest.mark.parametrize(
    ("tool", "word", "theirs", "ours"),
    [
        ("trl", "lr_scheduler_type", "linear", "cosine"),
        ("trl", "warmup_ratio", "0", 0.03),
        ("llamafactory", "cutoff_len", "2048", 1024),
        ("llamafactory", "num_train_epochs", "3.0", None),
        ("ms-swift", "weight_decay", "0.1", 0.0),
        ("ms-swift", "adam_beta2", "0.95", 0.999),
        ("kohya", "network_alpha", "1", 16),
        ("kohya", "lr_scheduler", "constant", "cosine"),
        ("diffusers", "adam_weight_decay", "1e-4", 0.0),
    ],
)
def test_defaults_differ_as_the_page_says(tool: str, word: str, theirs: str, ours: object) -> None:
    row = words_of(tool)[word]
    assert row.default == theirs and row.ours is not None
    value: object = Arguments()
    for name in row.ours.split("."):
        value = getattr(value, name)
    assert value == ours != theirs
    section = PAGE.read_text(encoding="utf-8").partition("## What is different on purpose")[2].partition("\n## ")[0]
    assert re.search(rf"`{word}`.*{re.escape(theirs)}", " ".join(section.split()))


def test_the_sign_of_the_logit_mean() -> None:
    """diffusers' scripts index timesteps that run down: a mean above 0 there is less noise, here more."""
    from mindspeed_mm.tasks.importing.draft import PeerSetup, Told
    from mindspeed_mm.tasks.importing.generators import di_weighting
    from mindspeed_mm.tasks.importing.given import Given, Setting

    given = Given("x", [Setting("weighting_scheme", "logit_normal", "x"), Setting("logit_mean", 0.5, "x")])
    found = di_weighting(
        PeerSetup(TOOLS["diffusers"], given), words_of("diffusers")["weighting_scheme"], "logit_normal"
    )
    assert not isinstance(found, Told) and found["training.diffusion.logit_mean"] == -0.5
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    steps = torch.arange(1000, 0, -1) / 1000  # timesteps as the scripts list them
    there = steps[(torch.sigmoid(normal + 0.5) * 1000).long().clamp(max=999)]
    here = torch.sigmoid(-normal - 0.5)
    assert abs(float(there.mean() - here.mean())) < 0.005


def test_the_end_of_a_turn() -> None:
    """LLaMA-Factory's `format_assistant` of Qwen is the answer, its end mark and a line break, all of them trained."""
    from mindspeed_mm.fsdp.data.data_utils.template import build_template
    from mindspeed_mm.fsdp.params.data_args import BasicParameters
    from tests.helpers.tiny_models import build_tokenizer

    tokenizer = build_tokenizer()
    template = build_template(tokenizer, BasicParameters())
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    text, ((start, end),) = template.render_with_spans(chat, [False, True])
    ours, theirs = text[start:end], "two<|im_end|>\n"
    assert (ours, text[start : end + 1]) == ("two<|im_end|>", theirs)
    assert len(tokenizer.encode(theirs)) - len(tokenizer.encode(ours)) == 1
