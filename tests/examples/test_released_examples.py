"""The training examples of released sizes: they parse, their scripts start what they say, and
every recipe of docs/recipes.md applies to them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_mm.checkpoint.dequantized import read_quantization, sections_of
from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.helpers.released_examples import ROOT, examples, names_of_parts, recipes
from tests.helpers.released_rows import ROWS, write_rows
from tests.helpers.runs import mm
from tests.helpers.tiny_bagel import SIZES, make_tiny_bagel
from tests.helpers.tiny_bagel import write_rows as write_rows_of_parts
from tests.helpers.tiny_internvlu import run_of
from tests.helpers.tiny_janus import make_tiny_janus, write_drawn_rows

EXAMPLES = examples()
NAMES = {example.name for example in EXAMPLES}
PER_HOST = 8


def test_every_released_size_of_the_tables_has_a_file() -> None:
    assert len(EXAMPLES) >= 35
    assert {"qwen3vl/qwen3vl_30B_config_v1.yaml", "qwen2vl/qwen2vl_72B_config.yaml"} <= NAMES
    for example in EXAMPLES:
        folder = example.path.parent.name
        assert re.fullmatch(rf"{re.escape(folder)}_[\w.-]+_config(_v1)?\.yaml", example.path.name)
        assert example.script.name.startswith(f"finetune_{folder}_")
    assert (ROOT / "examples" / "qwen3vl" / "finetune_qwen3vl_30B_v1_A5.sh").is_file()


def test_files_resolve_on_the_devices_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    for example in EXAMPLES:
        words = ["check", str(example.path), "--config-only", "--nproc", str(example.promise.devices)]
        assert run(words) == 0, capsys.readouterr().out


ON_SMALL_FOLDERS = {
    "deepseekocr/": "deepseek_ocr",
    "deepseekocr2/": "deepseek_ocr2",
    "kimik2_5/": "kimik2_5",
    "kimi_k3/": "kimi_k3",
    "step3_vl/step3_vl_198B": "step3_vl",
    "step3_vl/step3_vl_10b": "step3_vl_10b",
    "minimax_m3_vl/": "minimax_m3_vl",
    "mimov2_5/": "mimov2_5",
    "ming/": "ming",
}
"""Beginning of an example's name → row of its family."""
PACKED_TOKENS = 512


@pytest.mark.parametrize("name", [*ON_SMALL_FOLDERS, "JanusPro/", "bagel/", "internvlu/"])
def test_a_file_holds_on_a_small_folder(name: str, tmp_path: Path) -> None:
    """The whole check of `mm check`, on as many ranks as small experts can be divided among; the rows are short, and a
    packed one takes as few of them."""
    sizes: list[str] = []
    if name == "JanusPro/":
        make_tiny_janus(tmp_path / "model")
        rows = write_drawn_rows(tmp_path / "rows")
    elif name == "bagel/":
        (tmp_path / "model").mkdir()
        make_tiny_bagel(tmp_path / "model")
        sizes = [f"data.dataset_param.preprocess_parameters.{key}={value}" for key, value in SIZES.items()]
        rows = write_rows_of_parts(tmp_path / "rows")
    elif name == "internvlu/":
        rows = run_of(tmp_path).parent / "rows" / "rows.jsonl"
    else:
        row = ROWS[ON_SMALL_FOLDERS[name]]
        row.write(tmp_path / "model")
        rows = write_rows(tmp_path / "rows", row.kinds)
    (example,) = (each for each in EXAMPLES if each.name.startswith(name))
    ranks = min(load_config(example.path).arguments.parallel.expert_parallel_size or 1, 2)
    basic = "data.dataset_param.basic_parameters"
    said = mm("check", example.path, f"model.model_name_or_path={tmp_path / 'model'}", f"{basic}.dataset={rows}",
              f"{basic}.dataset_dir={rows.parent}", f"{basic}.cutoff_len={PACKED_TOKENS}",
              f"parallel.expert_parallel_size={ranks}", *sizes,
              "data.dataloader_param.drop_last=false", f"training.save={tmp_path / 'run'}",
              "--nproc", ranks)  # fmt: skip
    assert said.code == 0, said.out + said.err


def test_pages_name_every_file() -> None:
    for example in EXAMPLES:
        page = (example.path.parent / "README.md").read_text(encoding="utf-8")
        assert f"`{example.path.name}`" in page and f"`{example.script.name}`" in page
        assert f"`models/{example.hub_name}`" in page
        assert f"| {example.promise.devices} of {example.promise.gigabytes} GB" in page


def test_a_release_in_few_bits_is_trained_as_it_is() -> None:
    """Its numbers are what training loads: no file names a folder that the reader would have to write first."""
    in_few_bits = 0
    for example in EXAMPLES:
        released = example.released()
        for key, section in sections_of(released["config"]):
            in_few_bits += 1
            read_quantization(section, example.name, key)
            assert example.hub_name == released["hub"].rpartition("/")[2], example.name
    assert in_few_bits >= 3


STUB = '#!/bin/sh\necho "${NNODES:-1} $*"\n'


def started(script: Path, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script with an `mm` that says what it is given."""
    (folder / "mm").write_text(STUB)
    (folder / "mm").chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", **environment}
    return subprocess.run(["bash", str(script), *words], env=env, capture_output=True, text=True, timeout=600)


def test_scripts_start_what_their_files_name(tmp_path: Path) -> None:
    for example in EXAMPLES:
        assert "set -euo pipefail" in example.script.read_text(encoding="utf-8")
        assert example.script.stat().st_mode & 0o111
        done = started(example.script, tmp_path, "training.lr=5e-6", MASTER_ADDR="10.0.0.1", NODE_RANK="0")
        assert done.returncode == 0, done.stderr
        hosts, verb, path, *words = done.stdout.split()
        assert (verb, path) == ("train", f"examples/{example.name}")
        assert "training.lr=5e-6" in words and words[words.index("--nproc") + 1] == str(PER_HOST)
        assert int(hosts) * PER_HOST == example.promise.devices, example.name


def test_hosts_are_asked_for(tmp_path: Path) -> None:
    done = started(ROOT / "examples" / "qwen3vl" / "finetune_qwen3vl_30B_v1_A5.sh", tmp_path)
    assert done.returncode and not done.stdout
    assert "NODE_RANK: the number of this host" in done.stderr


def test_recipes_resolve_on_every_file() -> None:
    found, families = recipes(), names_of_parts()
    assert set(found) == {"Full fine-tuning", "Vision frozen", "Projector only", "LoRA", "QLoRA"}
    for example in EXAMPLES:
        parts = families.get(example.path.parent.name)
        parallel = load_config(example.path).arguments.parallel
        is_split = max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1
        for title, (words, *more) in found.items():
            if parts is None and title in ("Vision frozen", "Projector only"):
                continue
            words = [*words, *more[0]] if title == "QLoRA" and is_split else words
            config = load_config(example.path, [parts.fill(word) if parts else word for word in words])
            resolve_parallel_sizes(config.arguments.parallel, example.promise.devices)
            assert config.arguments.training.lora.enable == ("LoRA" in title)
