"""Every family trained from a folder in its released keys: two steps equal a bare loop over transformers' own model, in
fp64; two shards equal one process, also where one of them has no media; a run that is broken off and resumed, and one
with adapters, export the released keys."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.structure import spec
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.families.test_released_layouts import reference, run
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import StepRecord, compare_steps, record_step, record_weights
from tests.helpers.planned_steps import train_steps
from tests.helpers.released_rows import ROWS, write_run, write_uneven_rows
from tests.helpers.runs import differing, mm, tensors, train, watched_steps

DEFAULT = ("qwen3vl", "qwen3_moe", "llava")
"""Of the default run; the others are slow ones."""
ALONE = ("llava", "chameleon")
"""Of the default run where one rank of two has a picture."""
WITH_CLIPS = ("qwen2_5vl", "qwen3vl", "qwen3omni", "ming", "internvl", "llava_onevision", "gemma4", "minimax_m3_vl")
HEARING = ("whisper", "funasr")
"""They have nothing to say without a sound."""
LR = 1e-3
BOUND = 1e-8
every_family = pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@cache
def run_of(root: Path, name: str) -> Path:
    """A family's run, made once."""
    training = {"lr": LR, "lr_decay_style": "constant", "clip_grad": 0.5, "adam_fused": False}
    return write_run(ROWS[name], root / name, training=training)


def bare_steps(folder: Path, batches: list[dict[str, Any]]) -> list[StepRecord]:
    """The same steps by nothing but transformers and torch: cross-entropy over the labels, AdamW."""
    model = reference(folder).train()
    for name, parameter in type(model)(model.config).named_parameters():  # `from_pretrained` forgets what is frozen
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    found = []
    for batch in batches:
        output, labels = run(model, batch), batch["shift_labels"]
        total = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / (labels != -100).sum()
        if (codes := batch.get("code_targets")) is not None:  # codebooks by heads of their own, beside that of text
            heads = [F.cross_entropy(output.code_logits[:, n], codes[:, n]) for n in range(codes.shape[1])]
            loss = torch.stack([loss, *heads]).mean()
        elif "codec_ids" in batch:  # frames of speech, whose further codebooks a code predictor tells
            codes = batch["codec_ids"][..., 1:]
            loss = loss + 0.3 * F.cross_entropy(output.code_logits.flatten(0, 1), codes[codes[..., 0] >= 0].flatten())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        step = record_step(model, loss, norm)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(step | {"weights": record_weights(model)})
    return found


@every_family
def test_two_steps_equal_a_bare_loop(name: str, root: Path) -> None:
    yaml = run_of(root, name)
    batches: list[dict[str, Any]] = []

    def keep(engine: TrainEngine, given: list[Any]) -> None:
        batches.extend(copy.deepcopy(given))

    with keeping_double(), InDouble():
        with watched_steps(before=keep):
            measured = train_steps(str(yaml), ["parallel.fsdp_plan.param_dtype=fp64"])
        expected = bare_steps(yaml.parent / "model", batches)
    assert len(measured) == len(batches) == 2
    compare_steps(expected, measured, BOUND)


def steps_of(yaml: str, words: list[str]) -> list[StepRecord]:
    """Two steps on this rank."""
    with keeping_double(), InDouble():
        return train_steps(yaml, ["parallel.fsdp_plan.param_dtype=fp64", *words])


@pytest.mark.parametrize(
    "name", [name if name in ALONE else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_two_shards_equal_one_process(name: str, root: Path) -> None:
    yaml, row = run_of(root, name), ROWS[name]
    words = ["training.train_iters=3"]
    if row.rows is None and name not in HEARING:
        small = (32, 16) if name == "mistral3" else (16, 16)  # transformers' class cannot split one token
        rows = write_uneven_rows(yaml.parent / "rows", row.kinds, small)
        words += [f"data.dataset_param.basic_parameters.dataset={rows}"]
    expected = steps_of(str(yaml), words)
    assert len(expected) == 3
    for measured in run_ranks(2, steps_of, str(yaml), [*words, "training.micro_batch_size=1"]):
        compare_steps(expected, measured, BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CLIPS)
def test_two_shards_with_clips_equal_one_process(name: str, root: Path) -> None:
    """Pictures and clips go through one tower: both on one rank, or one on each."""
    yaml = run_of(root, name)
    rows = write_uneven_rows(yaml.parent / "clips", ("image", "video"))
    basic = "data.dataset_param.basic_parameters"
    words = ["training.train_iters=3", f"{basic}.dataset={rows}", f"{basic}.dataset_dir={rows.parent}"]
    expected = steps_of(str(yaml), words)
    for measured in run_ranks(2, steps_of, str(yaml), [*words, "training.micro_batch_size=1"]):
        compare_steps(expected, measured, BOUND)


def hide_towers(patch: pytest.MonkeyPatch) -> None:
    """Let the model be one whose towers nobody knows."""
    patch.setattr(spec, "find_towers", lambda _model: [])
    patch.setattr(spec, "find_media_without_towers", lambda _model: ["pixel_values"])


def refused_steps(yaml: str, words: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as refused:
        hide_towers(patch)
        steps_of(yaml, words)
    return str(refused.value)


def test_pictures_that_nothing_stands_in_for_are_refused_beside_text(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = run_of(root, "llava")
    rows = write_uneven_rows(yaml.parent / "rows", ("image",))
    words = [f"data.dataset_param.basic_parameters.dataset={rows}", "training.micro_batch_size=1"]
    for said in run_ranks(2, refused_steps, str(yaml), words):
        assert "some micro-batches of this step have pixel_values and some have none" in said
    hide_towers(monkeypatch)
    warned = "LlavaForConditionalGeneration: no placeholder input is known for pixel_values"
    assert warned in mm("check", yaml, "--nproc", "2").out
    assert warned not in mm("check", yaml, "--nproc", "1").out


def outline(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Key → type and shape of every stored tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (it is no mapping)
                part = file.get_slice(key)
                found[key] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def exported(run: Path, out: Path, *words: str) -> Path:
    """What `mm export` makes of a run."""
    said = mm("export", run, out, *words)
    assert said.code == 0, said.err
    return out


@pytest.mark.edge("BN15")
@every_family
def test_a_run_resumes_to_the_bit_and_exports_what_is_released(name: str, root: Path, tmp_path: Path) -> None:
    yaml, folder = run_of(root, name), run_of(root, name).parent / "model"
    train(yaml, tmp_path / "whole")
    train(yaml, tmp_path / "broken", "training.train_iters=1", "training.lr_decay_style=constant")
    train(yaml, tmp_path / "broken")
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "broken")) == []

    out = exported(tmp_path / "broken", tmp_path / "exported")
    assert outline(out) == outline(folder)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    again = reference(out).state_dict()  # misses nothing, has a place for everything
    held = tensors(tmp_path / "broken")
    same = {key: f"model.{key}" for key in again if f"model.{key}" in held}  # a tied head is held once
    assert len(again) - len(same) <= 1
    assert [key for key, name in same.items() if not torch.equal(again[key], held[name].double())] == []
    before = reference(folder).state_dict()
    assert any(not torch.equal(value, before[key]) for key, value in again.items()), "nothing was trained"


@pytest.mark.edge("BN15")
@every_family
def test_adapters_merge_into_what_is_released(name: str, root: Path, tmp_path: Path) -> None:
    yaml, folder = run_of(root, name), run_of(root, name).parent / "model"
    lora = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.1", "training.train_iters=1"]
    if ROWS[name].adapted:
        lora.append(f"training.lora.target_modules={json.dumps(ROWS[name].adapted)}")
    train(yaml, tmp_path / "run", *lora)
    out = exported(tmp_path / "run", tmp_path / "merged", "--merge")
    assert outline(out) == outline(folder)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
