"""Runs on preference pairs: media that are encoded once, references that are stored, the log, resuming, and what is
refused.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm.core.errors import ConfigError, DataError, MMError, UsageError
from mindspeed_mm.fsdp.models.behaviour import shared_media
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.stored_reference import StoredLogProbs, is_stored_log_probs
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.posttrain import reference
from mindspeed_mm.tasks.requests.train import ReferenceRequest
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.counted_patches import counted_patches
from tests.helpers.parity import compare_steps, full
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_run import make_tiny_run

LORA = ("training.lora.enable=true", "training.lora.rank=2")
STORED = "posttrain.reference.kind=stored"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_pairs(tmp_path_factory.mktemp("pairs"), images=(1, 2), **FP64))


@pytest.fixture(scope="module")
def scored(yaml: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored log-probabilities of the pairs."""
    file = tmp_path_factory.mktemp("scored") / "reference.safetensors"
    with keeping_double():
        outcome = reference.run(ReferenceRequest(Path(yaml), (f"posttrain.reference.path={file}",)))
    assert outcome.pairs == 24
    return file


def steps(yaml: str, *words: str) -> Any:
    with keeping_double():
        return train_steps(yaml, ["training.micro_batch_size=4", *words])


def test_pictures_that_both_answers_show_are_encoded_once(yaml: str) -> None:
    with counted_patches() as once:
        first = steps(yaml, *LORA)
    with mock.patch.object(shared_media, "_takes_grids", lambda _: False), counted_patches() as twice:
        second = steps(yaml, *LORA)
    assert once and [2 * patches for patches in once] == twice
    compare_steps(second, first, 1e-12)


def test_stored_log_probabilities_train_as_a_frozen_copy_does(yaml: str, scored: Path) -> None:
    compare_steps(steps(yaml), steps(yaml, STORED, f"posttrain.reference.path={scored}"), 1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("posttrain.dpo.ld_alpha=0.5", "posttrain.dpo.ld_alpha"),
        ("data.dataset_param.basic_parameters.cutoff_len=77", "rows or their template"),
        ("parallel.fsdp_plan.param_dtype=bf16", r"parallel\.fsdp_plan\.param_dtype \(fp64, and the run has bf16\)"),
        ("model.model_name_or_path=", "weights"),
    ],
)
def test_what_was_stored_of_something_else_is_refused(
    yaml: str, scored: Path, tmp_path: Path, change: str, words: str
) -> None:
    if change.endswith("="):
        other = tmp_path / "other"
        make_tiny_pairs(other)
        (other / "model/model.safetensors").write_bytes(_changed(other / "model/model.safetensors"))
        change += str(other / "model")
    path = f"posttrain.reference.path={scored}"
    with pytest.raises(ConfigError, match=f"are of other {words}") as caught:
        Trainer(load_with_plugins(Path(yaml), [STORED, path, change])).train()
    assert "mm posttrain reference" in str(caught.value)


def _changed(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[-8:] = b"\0" * 8
    return bytes(content)


def test_the_check_opens_what_is_stored(yaml: str, scored: Path, tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    words = [STORED, f"posttrain.reference.path={file}"]
    said = mm("check", yaml, *words)
    assert said.code != 0 and f"{file}  posttrain.reference.path  there are no stored" in said.out
    shutil.copy(scored, file)
    assert mm("check", yaml, *words).code == 0
    said = mm("check", yaml, *words, "data.dataset_param.basic_parameters.cutoff_len=77")
    assert said.code != 0 and "are of other rows or their template" in said.out and str(file) in said.out


def test_pairs_that_were_not_scored_are_refused(yaml: str, scored: Path, tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    path = f"posttrain.reference.path={file}"
    stored = StoredLogProbs.load(scored)
    stored.digests = {name: bytes(16) for name in stored.digests}
    stored.save(file)
    with pytest.raises(DataError, match="has other tokens than the pairs whose log-probabilities are stored"):
        Trainer(load_with_plugins(Path(yaml), [STORED, path])).train()
    content = bytearray(scored.read_bytes())
    header = json.loads(content[8 : (begin := 8 + int.from_bytes(content[:8], "little"))])
    content[begin + header["log_probs"]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="does not fit its checksum") as caught:
        StoredLogProbs.load(file)
    assert "mm posttrain reference" in str(caught.value)
    file.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="is not a file of stored log-probabilities"):
        Trainer(load_with_plugins(Path(yaml), [STORED, path])).train()


def test_only_what_was_stored_is_stored_over(yaml: str, scored: Path, tmp_path: Path) -> None:
    mine = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, mine, {"format": "pt"})
    before = mine.read_bytes()
    with pytest.raises(UsageError, match="this command did not write") as caught:
        reference.run(ReferenceRequest(Path(yaml), (f"posttrain.reference.path={mine}",)))
    assert "posttrain.reference.path" in str(caught.value) and mine.read_bytes() == before
    assert is_stored_log_probs(scored.read_bytes())


def test_a_reference_that_follows(yaml: str) -> None:
    """Whole after two steps, it is the policy then: the loss is ln 2. With 0.6 of it, it is the mixture of both."""
    kept: list[Any] = []

    class Copies(Hook):
        def on_step_end(self, engine: TrainEngine, result: Any) -> None:
            assert engine.ema is not None
            weights = {name: full(p.detach()).clone() for name, p in engine.model.named_parameters()}
            kept.append((weights, {name: full(each).clone() for name, each in engine.ema.tensors().items()}))

    def losses(*words: str) -> list[float]:
        given = ["training.micro_batch_size=4", "training.train_iters=4", "posttrain.reference.sync_steps=2", *words]
        recorder = StepRecorder()
        with keeping_double():
            Trainer(load_with_plugins(Path(yaml), given), hooks=[recorder, Copies()]).train()
        return [float(step["loss"]) for step in recorder.steps]

    whole = losses("posttrain.reference.mixup_alpha=1")
    assert whole[0] == pytest.approx(math.log(2), abs=1e-12) and whole[2] == pytest.approx(math.log(2), abs=1e-12)
    assert all(abs(loss - math.log(2)) > 1e-6 for loss in (whole[1], whole[3]))
    kept.clear()
    mixed = losses()
    assert mixed[:2] == whole[:2] and abs(mixed[2] - math.log(2)) > 1e-6
    (_, start), (weights, after), (_, then), _ = kept
    for name, copy in after.items():
        torch.testing.assert_close(copy, 0.4 * start[name] + 0.6 * weights[name], rtol=1e-12, atol=1e-14)
        assert torch.equal(then[name], copy)


def test_a_reference_that_follows_is_resumed(yaml: str, tmp_path: Path) -> None:
    words = [
        *LORA,
        "posttrain.reference.sync_steps=2",
        "training.micro_batch_size=4",
        "training.lr_decay_style=constant",
    ]
    train(yaml, tmp_path / "whole", *words, "training.train_iters=5")
    train(yaml, tmp_path / "parts", *words, "training.train_iters=3")
    train(yaml, tmp_path / "parts", *words, "training.train_iters=5")
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert len(whole) > 20 and differing(whole, parts) == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([STORED], "posttrain.reference.path"),
        (["posttrain.method=null"], "data.dataset_param.basic_parameters.stage"),
        (["data.dataset_param.basic_parameters.stage=sft"], "data.dataset_param.basic_parameters.stage"),
        (["posttrain.reference.sync_steps=2", "training.ema.enable=true"], "posttrain.reference.sync_steps"),
        (["posttrain.method=grpo", "posttrain.rewards=[{name: json}]"], "data.dataset_param.basic_parameters.stage"),
    ],
)
def test_refusals(yaml: str, words: list[str], key: str) -> None:
    with pytest.raises(MMError) as caught:
        Trainer(load_with_plugins(Path(yaml), words)).train()
    assert key in str(caught.value)


def test_a_reference_that_reads_rows_otherwise_is_refused(yaml: str, tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path)
    words = [f"posttrain.reference.model_name_or_path={tmp_path}"]
    with pytest.raises(ConfigError, match="is a qwen3 with 320 tokens, and the trained model is a qwen3_vl") as caught:
        Trainer(load_with_plugins(Path(yaml), words)).train()
    assert "posttrain.reference.model_name_or_path" in str(caught.value)


def test_dropout_is_refused(tmp_path: Path) -> None:
    yaml = make_tiny_pairs(tmp_path, images=(0,))
    config = tmp_path / "model/config.json"
    content = json.loads(config.read_text())
    content["text_config"]["attention_dropout"] = 0.1
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has a dropout of 0\.1 in model\.language_model"):
        Trainer(load_with_plugins(yaml, [])).train()


def test_a_checkpoint_is_no_reference(yaml: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    make_tiny_qwen3(text / "model")
    run = make_tiny_run(text, data=_of(make_tiny_pairs(text, images=(0,))), posttrain={"method": "dpo"})
    save = tmp_path / "run"
    Trainer(load_with_plugins(run, ["training.train_iters=1", f"training.save={save}"])).train()
    with pytest.raises(ConfigError, match="is a checkpoint of a training, and a reference starts from a folder"):
        Trainer(load_with_plugins(run, [f"training.load={save}", "training.no_load_optim=true"])).train()


def _of(yaml: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML

    return dict(YAML(typ="safe").load(yaml)["data"])


@pytest.mark.slow
@pytest.mark.parametrize("words", [LORA, ()])
def test_a_run_that_goes_on_ends_with_the_same_weights(yaml: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    def weights(*more: str) -> Any:
        recorder = StepRecorder()
        Trainer(load_with_plugins(Path(yaml), [*words, "training.train_iters=4", *more]), hooks=[recorder]).train()
        return recorder.steps[-1]["weights"]

    save = f"training.save={tmp_path / 'run'}"
    straight = weights()
    Trainer(load_with_plugins(Path(yaml), [*words, "training.train_iters=4", save, "training.save_interval=2"])).train()
    for name in ("iter_0000004", "latest_checkpointed_iteration.txt"):
        path = tmp_path / "run" / name
        if path.is_dir():
            path.rename(tmp_path / name)
        else:
            path.write_text("2")
    resumed = weights(save)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_the_log_has_margins_and_log_probabilities(yaml: str, tmp_path: Path) -> None:
    save = tmp_path / "run"
    Trainer(load_with_plugins(Path(yaml), [*LORA, f"training.save={save}", "posttrain.dpo.pref_ftx=1"])).train()
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if "loss" in record)
    assert first["rewards/margins"] == 0 and first["kl/reference"] == 0
    assert first["logps/chosen"] < 0 and first["logps/rejected"] < 0
    assert first["loss"] == pytest.approx(first["loss/loss"] + first["loss/sft"])
    assert "loss/rewards/margins" not in first
