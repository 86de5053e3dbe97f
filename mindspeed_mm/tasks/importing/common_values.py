"""Conversions that several tools share: switches, models, adapters, schedules, optimizers, intervals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.tasks.importing.draft import (
    LORA,
    Outcome,
    PeerSetup,
    conversion,
    idle,
    is_on,
    model_fetch,
    no,
    texts,
)
from mindspeed_mm.tasks.importing.given import value_of


def key_of(row: PeerRow) -> str:
    """The key that a row's settings become."""
    assert row.ours is not None
    return row.ours


def plain_value(row: PeerRow, value: object) -> Outcome:
    """A value that means the same here."""
    return {key_of(row): value_of(value) if isinstance(value, str) else value}


def mapped(row: PeerRow, value: object, how: str) -> Outcome:
    """A word of theirs as a word of ours, by the list `theirs=ours …` of the table; `null` is our default."""
    pairs = dict(pair.split("=") for pair in how.split()[1:])
    found = {theirs.lower(): value_of(ours) for theirs, ours in pairs.items()}
    word = str(value).lower()
    if word not in found:
        return no(
            f"{value} is not built; {key_of(row)} takes {', '.join(str(each) for each in found.values() if each)}"
        )
    if found[word] is None:
        return {}
    return {key_of(row): found[word]}


def fixed(row: PeerRow, value: object, how: str) -> Outcome:
    """A switch that stands for a value of ours: `=bf16`."""
    if value in (None, "", "null") or str(value).lower() in ("false", "no", "0", "none"):
        return {}
    wanted = value_of(how[1:])
    return {key_of(row): [wanted] if key_of(row) == "training.report_to" else wanted}


@conversion("number")
def number(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A number, however it is written: `1e-4`, `"0.1"`, the list of one of them."""
    if isinstance(value, list) and value:
        value = value[0]
    try:
        return {key_of(row): float(value)}
    except (TypeError, ValueError):
        return no(f"'{value}' is not a number; set {key_of(row)}")


@conversion("flag")
def flag(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A switch that is one here, too."""
    return {key_of(row): is_on(value)}


@conversion("not")
def negated(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A switch that says the opposite here."""
    return {key_of(row): not is_on(value)}


@conversion("on")
def switched_on(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A switch whose being off leaves our default."""
    if is_on(value):
        return {key_of(row): True}
    return {}


@conversion("list")
def listed(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A list, or words with commas between them."""
    if value:
        return {key_of(row): texts(value)}
    return {}


@conversion("path")
def path(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A path, which stays as it is written."""
    if isinstance(value, bool):
        return no(f"no value is given; set {key_of(row)}")
    return {key_of(row): str(value)}


@conversion(":text")
def text(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A text; a switch that is off is none."""
    if isinstance(value, str) and value:
        return {key_of(row): value}
    return {}


@conversion(":first")
def first(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The first of a list, where one is taken here."""
    several = value if isinstance(value, list) else [value]
    if not several:
        return {}
    if len(several) > 1:
        draft.note(key_of(row), "the first of several")
    return {key_of(row): several[0]}


@conversion(":model")
def model(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A folder, or a name on a hub, which is downloaded first."""
    if isinstance(value, bool):
        return no(f"no value is given; set {key_of(row)}")
    name = str(value[0] if isinstance(value, list) and value else value)
    key = key_of(row)
    if Path(name).suffix in (".safetensors", ".ckpt", ".pt", ".pth", ".gguf") and draft.tool.is_for_generators:
        draft.note(key, f"the folder in diffusers' layout, not the single file {Path(name).name}")
        return {key: str(Path(name).with_suffix(""))}
    return {key: draft.folder_of(name, "models", model_fetch)}


@conversion(":dtype")
def dtype(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The type that is computed in."""
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": None, "float32": None}
    word = str(value).lower().removeprefix("torch.")
    if word in ("auto", "none"):
        return {key_of(row): "bf16"}
    if word not in names:
        return no(f"{value} is not built; bf16, fp16 and fp32 are")
    if names[word] is None:
        return {}
    return {key_of(row): names[word]}


@conversion(":attention")
def attention(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The attention kernel, under the names that transformers and ms-swift use."""
    word = str(value).lower().replace("-", "_")
    names = {
        "flash_attention_2": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "flash_attention": "flash_attention_2",
        "flash_attention_3": "flash_attention_3",
        "flash_attention_4": "flash_attention_4",
        "sdpa": "sdpa",
        "eager": "eager",
        "flex_attention": "flex_attention",
        "unfused": "sdpa",
        "auto": None,
        "none": None,
    }
    if "/" in word or word == "flash":
        word = "flash_attention_2"
    if word not in names:
        return idle("the best attention on the machine is chosen and printed; model.attn_implementation names another")
    if names[word] is None:
        return {}
    return {key_of(row): names[word]}


@conversion(":resume")
def resume(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A run continues by itself; a checkpoint elsewhere is named."""
    if isinstance(value, bool) or str(value).lower() in ("latest", "auto", "none", ""):
        return idle("a run continues from the newest checkpoint in training.save")
    return {"training.load": str(value)}


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_lora(draft: PeerSetup) -> None:
    """Train adapters instead of all weights."""
    draft.put(f"{LORA}.enable", True)


_OF_WAN = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}
"""Layer of Wan in its own repository → in diffusers."""


@conversion(":targets")
def targets(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The modules that get adapters; all linear layers are our default."""
    if isinstance(value, str) and re.search(r"mlp.*attn|attn.*mlp", value) and "vision" not in value:
        return {}  # all linear layers of the language model, in a regular expression
    if isinstance(value, str) and re.search(r"[\\(^$*|\[]", value):
        return no("a regular expression; write patterns such as model.layers.{*}.mlp.*_proj")
    names = [name for each in texts(value) if (name := each.strip(", "))]  # `q_proj, v_proj` of a command
    if draft.tool.name == "trl" and isinstance(value, list) and any(str(each).endswith(",") for each in value):
        draft.note(key_of(row), "TRL takes the commas for parts of the names, and adapts only names without one")
    if draft.tool.name == "diffsynth" and "wan" in f"{draft.given.tree} {draft.given.program}".lower():
        names = [_OF_WAN.get(name, name) for name in names]
    if not names or set(names) <= {
        "all",
        "all-linear",
        "all_linear",
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }:
        if names:
            return _with_tower(draft, row)
        return {}
    return {key_of(row): [f"*.{name}" if "." in name and draft.tool.is_for_generators else name for name in names]}


def _with_tower(draft: PeerSetup, row: PeerRow) -> Outcome:
    """All linear layers: our default, and with PEFT those of a vision tower, which TRL and axolotl leave to it."""
    if draft.tool.name not in ("trl", "axolotl") or not draft.sees or draft.parts is None:
        return {}
    tower, bridge = draft.parts
    has_layers = not bridge.startswith(tower) and "gemma" not in f"{draft.model_name} {draft.model_type}".lower()
    return {key_of(row): ["all-linear", f"{tower}.*", *([f"{bridge}.*"] if has_layers else [])]}


@conversion(":alpha")
def alpha(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The numerator of the adapters' scale."""
    return {key_of(row): value}


@conversion(":rslora")
def rslora(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The scale alpha / √rank is that of another alpha here (rsLoRA, arXiv:2312.03732)."""
    if not is_on(value):
        return {}
    rank = float(draft.get("lora_rank", draft.get("lora_r", 8)))
    given = draft.get("lora_alpha")
    of_tool = {"llamafactory": 2 * rank, "ms-swift": 32.0}.get(draft.tool.name, 16.0)
    return {f"{LORA}.alpha": round(float(given if given is not None else of_tool) * math.sqrt(rank), 6)}


@conversion(":loraplus")
def loraplus(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The factor on the rate of the adapters' B (LoRA+, arXiv:2402.12354)."""
    return {key_of(row): [{"match": "lora_B", "scale": float(value)}]}


@conversion(":adapters")
def adapters(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Adapters of a folder, a file or a hub, which stay as they are."""
    if value:
        return {key_of(row): [draft.folder_of(name, "models", model_fetch) for name in texts(value)]}
    return {}


@conversion(":lora_path")
def lora_path(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The folder or file of adapters that training continues from."""
    if isinstance(value, bool):
        return idle("the rank is that of the adapters in training.lora.pretrained_lora_path")
    several = value if isinstance(value, list) else [value]
    if several:
        return {key_of(row): str(several[0])}
    return {}
