"""Draws the packages layer by layer: `python -m tests.architecture`. And which modules stay apart, and why.

The layers are those of the import contract in `pyproject.toml`; a box holds the first sentence of the docstring of its
package. The picture in `docs/architecture.md` is what this program draws; a test says when the two differ.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PACKAGE = "mindspeed_mm"
WIDTH, GAP, MARGIN, PADDING = 960, 5, 8, 6
NAME_LINE, LINE = 17, 13
"""Heights of the name and of a line of text, in pixels."""
LETTER = 5.6
"""Width of a letter of the text, in pixels."""
COLOURS = ("#dbeafe", "#e0e7ff", "#ede9fe", "#fae8ff", "#fce7f3", "#ffe4e6", "#ffedd5", "#fef9c3", "#ecfccb", "#dcfce7",
           "#ccfbf1", "#cffafe")  # fmt: skip

SITTING_LINES = 450
"""A file is read in one sitting: two that fit are one, unless there is a reason."""
KEPT_APART = {
    "an import of another library is put off, by finders of its own; it goes when transformers imports scipy late": (
        "fsdp.utils.scipy_library",
    ),
    "it writes or reads pickles, which the rules of the sources allow in this file alone": (
        "checkpoint.conversion.pt_writing",
        "checkpoint.megatron.pt_index",
    ),
    "the files of a family of generators, one module a family; the other one is the list of families": (
        "checkpoint.original.cogvideox",
        "checkpoint.original.hunyuan_video",
        "checkpoint.original.ltx",
        "checkpoint.original.stepvideo",
    ),
    "loaded for a kind of model alone: a run of another kind starts without what it imports": (
        "fsdp.train.generator_family",
        "fsdp.train.unified_family",
    ),
    "the converter of a family, by whose name the command line finds it": ("checkpoint.original.lumina",),
    "a component that is loaded by its class's name in an index": (
        "fsdp.models.diffusion.identity_vae",
        "fsdp.models.diffusion.one_frame_vae",
    ),
    "one module a verb, by whose name the command line finds it": ("cli.train",),
    "one module a means of speed; the other one applies all of them in order": ("fsdp.features.speed.tower_operators",),
    "the documents name both programs": ("inference_sora", "pretrain_sora"),
    "examples use it without the other one": ("quickstart.scans", "quickstart.tiny_model"),
    "it can be imported without verl, which the other one needs": ("verl.batches", "verl.settings"),
    "loaded only when it is needed: it takes the plans and the losses of training": (
        "tasks.answer.spread",
        "fsdp.train.posttrain",
    ),
    "a program that `mm doctor` starts": ("tasks.doctor.group_probe",),
    "one module a measure, as `docs/architecture.md` says; the other one calls whichever is asked for": (
        "tasks.evaluate.generated.encoders",
        "tasks.evaluate.generated.pairs",
    ),
    "one module a kind of request; the other one lists the routes": (
        "tasks.serve.drawing",
        "tasks.serve.passing_on",
        "tasks.serve.speaking",
    ),
    "one module an optimizer; the other one chooses": ("fsdp.optimizer.lion", "fsdp.optimizer.muon"),
    "the order of a commit, of which each line matters when a process is killed, is read alone": (
        "fsdp.checkpoint.commit",
    ),
    "the interface of another library, by its releases": (
        "fsdp.distributed.expert.deepep",
        "fsdp.features.speed.fused_operators",
        "fsdp.models.lora.injection",
        "fsdp.posttrain_rewards.open_clip",
    ),
    "the processor of a family, as transformers divides its files": (
        "fsdp.models.deepseek_ocr.processing_deepseek_ocr",
        "fsdp.models.internvl_chat.processing_internvl_chat",
        "fsdp.models.kimi_vl.processing_kimi_vl",
        "fsdp.models.step3_vl_10b.processing_step3_vl_10b",
    ),
    "an algorithm with its source, that is understood, and compared with its reference, without the other one": (
        "fsdp.data.dataloader.pairing",
        "fsdp.loss.code_heads",
        "fsdp.models.kimi_k3.tiktoken_file",
        "fsdp.loss.reward_pairs",
        "fsdp.models.mimov2_5.audio_codes",
        "fsdp.sampling.speech.talking",
        "fsdp.tools.intervals",
    ),
}
"""Why a module is not part of its only importer, which is beside it and short: reason → modules."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w.]+))", re.MULTILINE
)


def sources() -> dict[str, str]:
    """Module, without the name of the package, → its text."""
    texts = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        inside = path.relative_to(ROOT / PACKAGE).with_suffix("")
        parts = inside.parts[:-1] if inside.name == "__init__" else inside.parts
        texts[".".join(parts)] = path.read_text(encoding="utf-8")
    return texts


def lone_siblings(texts: Mapping[str, str]) -> dict[str, str]:
    """Module → its only importer, where this one is in the same folder and both can be read in one sitting.

    Args:
        texts: Module → its text, as `sources` has them.
    """
    importers: dict[str, set[str]] = {module: set() for module in texts}
    for importer, text in texts.items():
        for origin, names, plain in _IMPORT.findall(text):
            named = [plain, origin, *(f"{origin}.{name}" for name in re.findall(r"\w+", names))]
            for each in named:
                module = each.removeprefix(PACKAGE).removeprefix(".")
                if each.startswith(PACKAGE) and module in importers and module != importer:
                    importers[module].add(importer)
    found = {}
    for module, by in importers.items():
        (importer, *others) = by or {""}
        together = texts[module].count("\n") + texts.get(importer, "").count("\n")
        are_siblings = importer.rpartition(".")[0] == module.rpartition(".")[0]
        if by and not others and are_siblings and together <= SITTING_LINES:
            found[module] = importer
    return found


def floors() -> list[list[str]]:
    """Packages by layer, the highest first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [each["layers"] for each in contracts["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return [[room.strip().removeprefix(f"{PACKAGE}.") for room in layer.split("|")] for layer in layers]


def purpose_of(room: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT / PACKAGE / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", " ".join(docstring.split()))[0].replace("`", "")


def draw() -> str:
    """The picture as SVG."""
    boxes: list[str] = []
    top = MARGIN
    for number, rooms in enumerate(floors()):
        height, drawn = _layer(rooms, top, COLOURS[number % len(COLOURS)])
        boxes += drawn
        top += height + GAP
    height = top - GAP + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *boxes,
            "</svg>",
            "",
        ]
    )


def _layer(rooms: list[str], top: int, colour: str) -> tuple[int, list[str]]:
    """The height of a layer and its boxes, all of one width; a box that is alone has name and text on one line."""
    width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) // len(rooms)
    if len(rooms) == 1:
        height = NAME_LINE + PADDING
        return height, [
            _box(MARGIN, top, width, height, colour),
            *_line(MARGIN + PADDING, top + NAME_LINE, rooms[0], purpose_of(rooms[0])),
        ]
    letters = int((width - 2 * PADDING) / LETTER)
    texts = {room: textwrap.wrap(purpose_of(room), letters) for room in rooms}
    height = NAME_LINE + LINE * max(map(len, texts.values())) + PADDING
    drawn = []
    for number, (room, lines) in enumerate(texts.items()):
        left = MARGIN + number * (width + GAP)
        drawn.append(_box(left, top, width, height, colour))
        drawn += _line(left + PADDING, top + NAME_LINE, room, "")
        for below, line in enumerate(lines, start=1):
            drawn.append(_text(left + PADDING, top + NAME_LINE + below * LINE, line))
    return height, drawn


def _box(left: int, top: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="#94a3b8"/>'


def _line(left: int, baseline: int, name: str, text: str) -> list[str]:
    named = f'<text x="{left}" y="{baseline}" font-size="13" font-weight="bold">{escape(name)}</text>'
    return [named, _text(left + 130, baseline, text)] if text else [named]


def _text(left: int, baseline: int, text: str) -> str:
    return f'<text x="{left}" y="{baseline}" font-size="11" fill="#334155">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
