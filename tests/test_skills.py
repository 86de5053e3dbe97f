"""The guides for coding agents: their commands run and print what they show, their paths and names exist."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import mindspeed_mm
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.cli import mm_convert
from mindspeed_mm.cli.converter_flags import taken
from mindspeed_mm.cli.mm_convert import CONVERTERS
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from tests.helpers.documented_steps import blocks, command_lines, fits, follow
from tests.helpers.own_package import counted_as_the_package
from tests.helpers.tiny_clip import make_tiny_clip
from tests.helpers.tiny_generator_run import make_pictures
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows
from tests.tasks.test_download import CLIENT
from tests.test_documented_steps import environment_of
from tests.test_readme import parse

ROOT = Path(__file__).parents[1]
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
WORKFLOW = ROOT / "docs" / "agent-task-workflow.md"
PAGES = [ROOT / "AGENTS.md", WORKFLOW, *sorted((ROOT / "skills").glob("**/*.md"))]
NAMES = {
    "mindspeed-mm-fsdp2-model-only-vlm-migration", "mindspeed-mm-pipeline", "mindspeed-mm-vlm",
    "mindspeed-mm-generative", "mindspeed-mm-env-setup", "mindspeed-mm-weight-prep",
}  # fmt: skip
RUN = """\
model: {model_name_or_path: models/Qwen3-VL-2B-Instruct}
data:
  dataset_param:
    basic_parameters: {dataset: data/rows.jsonl, dataset_dir: data}
training: {lr: 1e-4, micro_batch_size: 2, train_iters: 2, save: runs/mine}
"""
FLUX = """\
model: {model_name_or_path: models/FLUX.1-dev}
data:
  dataset_param:
    dataset_type: generation
    basic_parameters: {dataset: pictures/rows.jsonl, dataset_dir: pictures, features_dir: pictures/features}
    preprocess_parameters: {height: 16, width: 16}
training: {lr: 1e-4, micro_batch_size: 2, train_iters: 2, save: runs/flux}
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the guides has: weights under released names, only tiny, rows, and a YAML for each kind."""
    stock = tmp_path_factory.mktemp("stock")
    make_tiny_qwen3_vl(stock / "models" / "Qwen3-VL-2B-Instruct")
    rows = make_rows(stock / "data", count=8)
    (stock / "data" / "test.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    shutil.copy(stock / "data" / "images" / "0_0.png", stock / "a.png")
    make_tiny_flux(stock / "models" / "FLUX.1-dev")
    make_tiny_clip(stock / "models" / "clip-vit-large-patch14")
    make_pictures(stock / "pictures", count=4)
    (stock / "run.yaml").write_text(RUN)
    (stock / "flux.yaml").write_text(FLUX)
    (stock / "bin").mkdir()
    (stock / "bin" / "hf").write_text(CLIENT)
    (stock / "bin" / "hf").chmod(stat.S_IRWXU)
    return stock


def registered() -> set[str]:
    """Names that the files of the guides register."""
    texts = (block.text for page in PAGES for block in blocks(page) if block.file)
    return {name for text in texts for name in re.findall(r'register(?:_template)?\(\s*"(\w+)"', text)}


@pytest.fixture
def clone(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the stock, whose folders of the package count as the package's own; what is registered
    there is forgotten afterwards."""
    clone = tmp_path / "clone"
    shutil.copytree(stock, clone)
    for name in ("examples", "docs", "tests", "skills"):
        if not (clone / name).exists():
            (clone / name).mkdir()
            for path in (ROOT / name).iterdir():
                (clone / name / path.name).symlink_to(path)
    (clone / "mindspeed_mm").mkdir()
    (clone / "mindspeed_mm" / "tools").symlink_to(ROOT / "mindspeed_mm" / "tools")
    monkeypatch.setattr(Converter, "registry", dict(Converter.registry))
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PATH", f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with counted_as_the_package(clone, registered()):
        yield clone


IN_OTHERS = ROOT / "skills" / "mindspeed-mm-pipeline" / "SKILL.md"
"""Its commands are those of the guides that it leads to: run among the slow tests."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page == IN_OTHERS else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_guide_run_and_print_what_it_shows(page: Path, clone: Path) -> None:
    lines = follow(page)
    assert lines or "```sh" not in page.read_text(encoding="utf-8")


def test_the_converter_of_the_guide_runs_when_it_is_listed(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed converter's inputs are looked at first, by the names of its flags: none of them may be the target."""
    page = ROOT / "skills" / "mindspeed-mm-fsdp2-model-only-vlm-migration" / "references" / "converter.md"
    code, run = next(block for block in blocks(page) if block.file), next(b for b in blocks(page) if b.language == "sh")
    (clone / code.file).parent.mkdir()
    (clone / code.file).write_text(code.text, encoding="utf-8")
    monkeypatch.setitem(CONVERTERS, "GlanceConverter", ("my_converters.glance_converter", "Glance's names."))
    for line in command_lines(run)[:2]:
        plugin, words = taken("--plugin", line.split()[1:])
        assert plugin == [code.file]
        assert mm_convert.run(words) == 0
    assert (clone / "authors" / "model.safetensors").is_file() and (clone / "back" / "model.safetensors").is_file()


def test_a_command_that_fails_or_prints_something_else_is_found(clone: Path) -> None:
    page = clone / "page.md"
    page.write_text("```sh\nmm schema training.lr\n```\n\n```text\n…learning rate…\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md shows"):
        page.write_text("```sh\nmm schema training.lr\n```\n\n```text\n…of an elephant…\n```\n")
        follow(page)
    with pytest.raises(AssertionError, match="nowhere"):
        page.write_text("```sh\nmm check nowhere.yaml\n```\n")
        follow(page)
    assert fits("a … c\n…", "a b\nc d") and not fits("a … c", "a b c d")


def test_there_is_a_guide_for_each_documented_name() -> None:
    assert {path.parent.name for path in SKILLS} == NAMES
    for path in SKILLS:
        _, front, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        lines = dict(line.split(": ", 1) for line in front.splitlines())
        assert lines.keys() == {"name", "description"} and lines["name"] == path.parent.name
        assert len(lines["description"]) > 60
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 80
    for name in NAMES:
        assert name in (ROOT / "AGENTS.md").read_text(encoding="utf-8")


MADE_BY_THE_READER = re.compile(
    r"(models|data|runs|exported|pictures|my_\w+|samples|scores|transformer|vae)/|.*(<\w+>|glance|datasets/tables)|.*[*{…]"
)
"""Paths that a guide makes, or that stand for any."""


def named_paths(page: Path) -> set[str]:
    """Words in code marks, and targets of links, that look like files of the tree."""
    text = page.read_text(encoding="utf-8")
    words = re.findall(r"`([\w./<>*{},-]+/[\w./<>*{},-]*|[\w.-]+\.(?:py|md|sh|yaml|json|txt|toml))`", text)
    return {word for word in words if not MADE_BY_THE_READER.match(word)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_names_of_a_guide_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lacking = []
    for word in named_paths(page):
        homes = (ROOT, page.parent, ROOT / "mindspeed_mm/fsdp", ROOT / "mindspeed_mm")
        if "/" in word and not any((home / word).exists() for home in homes):
            lacking.append(word)
        if "/" not in word and not any(ROOT.glob(f"{word}")) and not any((ROOT / "mindspeed_mm").rglob(word)):
            lacking += [word] if word not in OF_A_MODEL else []
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        lacking += [] if (page.parent / target).exists() else [target]
    for module, name in re.findall(r"`?from (mindspeed_mm[\w.]*) import (\w+)`?", text):
        if "glance" not in module and not hasattr(importlib.import_module(module), name):
            lacking.append(f"{module}.{name}")
    keys = {key for key, _ in walk_fields()}
    for key in re.findall(r"`((?:model|data|parallel|training|features|tools|posttrain)\.[a-z_.]+)`", text):
        lacking += [] if key in keys or key in OLDER_KEYS or any(k.startswith(f"{key}.") for k in keys) else [key]
    for command in re.findall(r"`(mm [a-z][^`\n]*)`", text):
        if not re.search(r"[A-Z]{3,}|…|VERB", command) and len(command.split()) > 2:
            parse(command)
    lacking += [word for word in re.findall(r"`([A-Z][a-z]+\w*)(?:\([\w]*\))?`", text) if not is_class(word)]
    targets = set(re.findall(r"`make ([\w-]+)", text))
    lacking += [each for each in targets if f"\n{each}:" not in (ROOT / "Makefile").read_text()]
    lacking += [name for name in re.findall(r"`(\w+Converter)\b", text) if name not in {*CONVERTERS, "GlanceConverter"}]
    assert lacking == []


@functools.cache
def classes() -> set[str]:
    """Names of all classes of the package."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "mindspeed_mm").rglob("*.py"))
    return {name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)}


def is_class(name: str) -> bool:
    """Whether the package, or transformers, has a class of that name."""
    return name in classes() or hasattr(transformers, name)


OF_A_MODEL = {
    "config.json", "model.json", "data.json", "run.yaml", "flux.yaml", "npu_patch.py", "card.yaml", "layout.json",
    "model_index.json", "conversion_manifest.json", "tools.json",
}  # fmt: skip
"""Files without a folder that are a model's, or the reader's."""
OLDER_KEYS = {"tools.profiler", "training.py", "model.named_modules", "model.json", "data.json"}


def test_a_path_that_is_not_there_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`docs/architecture.md`, `mindspeed_mm/nowhere.py`, `models/<name>/x.py`")
    assert named_paths(page) == {"docs/architecture.md", "mindspeed_mm/nowhere.py"}


def run_in(tree: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_plugin_of_the_guide_trains_in_a_copy_of_the_tree_by_torchrun(stock: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(stock, tree)
    shutil.copytree(Path(mindspeed_mm.__file__).parent, tree / "mindspeed_mm")
    page = ROOT / "skills/mindspeed-mm-fsdp2-model-only-vlm-migration/references/model-plugin.md"
    for block in blocks(page):
        if block.file:
            (tree / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tree / block.file).write_text(block.text)
    run_in(tree, sys.executable, "make_folder.py")
    entry = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "mindspeed_mm/fsdp/train/trainer.py"]
    run_in(tree, sys.executable, *entry, "examples/glance/glance_tiny_config.yaml")
    assert [json.loads(line)["step"] for line in (tree / "runs/glance/metrics.jsonl").read_text().splitlines()] == [1]


def test_every_command_line_is_one_that_the_runner_reads() -> None:
    """Blocks in another language are no commands in disguise."""
    for page in PAGES:
        for block in blocks(page):
            if not command_lines(block) and not block.file:
                assert not re.search(r"^(mm|mm-convert|python|torchrun|bash) ", block.text, re.MULTILINE), block
