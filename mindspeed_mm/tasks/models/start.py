"""What somebody needs next who begins with a family: the smallest YAML, the devices that train it, the names that
`model.freeze` and `training.lora.target_modules` take, and example files. Facts of a family are read from its card."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.tasks.models.first_yaml import RATES, ROOM, adapters, as_yaml, flow, merged, scalar, smallest
from mindspeed_mm.tasks.models.topics import YamlRecipe
from mindspeed_mm.tasks.requests.init import Method

DEVICES_GIB = (24, 48, 80)
ROOT = Path(__file__).resolve().parents[3]
_METHODS: Mapping[Method, str] = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
"""The best one first → what tables call it."""
_WIDTH = 100
_SHOWN_FILES = 4


@dataclass(frozen=True)
class FamilyStart:
    """What a family begins with, or any model of transformers."""

    family: str
    """Its name; empty: any model of transformers."""
    yaml: str
    fits: Mapping[str, Mapping[str, Method | None]]
    """Name on the hub → GiB of a device → the best method that fits on one; None: it takes several."""
    examples: Sequence[str]
    """Configurations below the working copy's root; none where the package is installed without them."""


def start_of(card: ModelCard | None, recipe: YamlRecipe) -> FamilyStart:
    """The start of a family, with the YAML that a wish asks for.

    Args:
        card: The family; None: any model of transformers.
        recipe: What the wish makes of the smallest YAML.
    """
    adds = recipe.adds
    if card is not None and card.generates and recipe.of_generators is not None:
        adds = recipe.of_generators
    yaml = as_yaml(merged(smallest(card, recipe.method), adds))
    if card is None:
        return FamilyStart("", yaml, {}, ())
    fits = {hub: {str(device): _best(needs, device) for device in DEVICES_GIB} for hub, needs in card.needs_gib.items()}
    return FamilyStart(card.name, yaml, fits, examples_of(card))


def _best(needs_gib: Mapping[str, float | None], device_gib: int) -> Method | None:
    # a method without a forecast is skipped, not taken for one that fits
    for method in _METHODS:
        need = needs_gib.get(method)
        if need is not None and need <= ROOM * device_gib:
            return method
    return None


# --- example files ----------------------------------------------------------------------------------------------------


def examples_of(card: ModelCard) -> tuple[str, ...]:
    """Example configurations of a family that are there: those of released sizes first, then those that train a small
    model of their own."""
    found = [(not is_released, path) for path, (name, is_released) in _examples().items() if name == card.name]
    return tuple(path for _, path in sorted(found, key=lambda each: (each[0], _by_number(each[1]))))


def _by_number(path: str) -> list[tuple[float, str]]:
    """In the order of the sizes in names: 2B before 32B."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", path)
    return [(float(piece), "") if piece[:1].isdigit() else (-1.0, piece) for piece in pieces]


@cache
def _examples() -> Mapping[str, tuple[str, bool]]:
    """Path of an example → its family, and whether its model is a released one."""
    found: dict[str, tuple[str, bool]] = {}
    if not (ROOT / "pyproject.toml").is_file():  # installed, beside other packages
        return found
    for path in sorted((ROOT / "examples").glob("*/*_config*.yaml")):
        text = path.read_text(encoding="utf-8")
        folders = re.findall(r"^ +model_name_or_path: (\S+)", text, re.MULTILINE)
        identity = re.search(r"^ +model_id: (\w+)", text, re.MULTILINE)
        if not folders:
            continue
        released = [folder for folder in folders if folder.startswith("models/")]  # or of the teacher
        is_released = bool(released)
        folder = model_id = ""
        if released:
            folder = released[0].rpartition("/")[2]
        if identity:
            model_id = identity[1]
        card = _family_of(folder, model_id)
        if card is not None:
            found[str(path.relative_to(ROOT))] = (card.name, is_released)
    return found


def _family_of(folder: str, identity: str) -> ModelCard | None:
    """The family that a configuration builds: that of its `model_id`, else the one that released its folder, perhaps
    converted to transformers' layout or to bf16, or the part of a release that films a picture."""
    if identity:
        return next((card for card in families() if identity in card.ids), None)
    # `X` and `X-hf` may be two releases, one of which is built by a class of this package
    name = re.sub(r"-(hf|bf16|i2v)$", "", folder, flags=re.IGNORECASE)
    is_converted = folder.lower().endswith("-hf")
    for card in families():
        released = {hub.partition("/")[2] for hub in card.released}
        is_chosen = "model_id" not in card.smallest.get("model", {})
        if is_chosen and {folder, name} & released and not (is_converted and card.model_class.startswith("mindspeed")):
            return card
    return None


# --- for a terminal ---------------------------------------------------------------------------------------------------


def as_lines(start: FamilyStart, card: ModelCard | None) -> list[str]:
    """The start for a terminal, without the table of devices."""
    lines = ["", "  run.yaml: mm check run.yaml, then mm train run.yaml; mm init writes one for your folder and rows"]
    lines += [f"    {line}" for line in start.yaml.split("\n")]
    # recipes of post-training have rates of their own
    if "lora:" not in start.yaml and "posttrain:" not in start.yaml:
        words = f"lr: {scalar(RATES['lora'])}, lora: {flow(adapters('lora'))}"
        lines.append(f"  LoRA: write {words} in training; QLoRA: add quantize: nf4")
    if card is None:
        return lines
    if card.freeze:
        width = max(map(len, card.freeze))
        lines += ["", "  modules for model.freeze"]
        for part, names in card.freeze.items():
            lines += wrapped(f"    {part:{width}}  ", ", ".join(names))
    if card.lora_targets:
        default = "these" if card.generates else "all-linear, which means these"
        lines += ["", f"  layers for training.lora.target_modules (default: {default})"]
        lines += wrapped("    ", ", ".join(map(scalar, card.lora_targets)))
    if start.examples:
        lines += ["", "  examples"]
        lines += [f"    {path}" for path in start.examples[:_SHOWN_FILES]]
        if len(start.examples) > _SHOWN_FILES:
            lines.append(f"    and {len(start.examples) - _SHOWN_FILES} more, with --json")
    return lines


def device_lines(start: FamilyStart, card: ModelCard) -> list[str]:
    """The table of released sizes: what one device of each kind trains."""
    width = max(map(len, card.released))
    heads = ""
    if start.fits:
        heads = "".join(f"  {f'{device} GB':>5}" for device in DEVICES_GIB)
    lines = [f"  {'released':{width}}  {'size':>7}{heads}"]
    for hub, size in card.released.items():
        billions = ""
        if size is not None:
            billions = f"{size:g} B"
        row = f"  {hub:{width}}  {billions:>7}"
        for best in start.fits.get(hub, {}).values():
            row += f"  {_METHODS[best] if best else '-':>5}"
        lines.append(row.rstrip())
    if start.fits:
        what = "one row of about 2,000 tokens"
        if card.generates:
            what = "one sample of the size below, encoded by mm extract"
        lines.append(f"  What one device trains, by the memory forecast of {what},")
        lines.append("  with features.recompute: true (-: several devices; empty: ask mm check with the folder).")
    return lines


def wrapped(head: str, text: str) -> list[str]:
    """Lines of a text behind a head, which are as far in as the head is long."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
