"""`pretrain` from flags to trained weights: a user's script, the entries, and what stands under Megatron's names."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm import inference_sora, inference_vlm, pretrain_transformers, training
from mindspeed_mm.core.errors import CheckpointError, ConfigError, MMError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.megatron_names import NAMES
from mindspeed_mm.megatron_names.__main__ import main
from mindspeed_mm.megatron_names.install import install
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.tasks.answer.infer import answer_prompt
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.fsdp.train.provider.user_run import data_provider, forward_step, seeded_model
from tests.helpers.distributed import alone
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

FLAGS = "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0 --save"


def pretrain(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, **options: Any) -> None:
    argv = ["entry.py", *FLAGS.split(), str(folder), *words]
    monkeypatch.setattr(sys, "argv", argv)
    step = options.pop("step", partial(forward_step, "loss and dict"))
    model = options.pop("model", lambda: seeded_model().float())
    data = options.pop("data", partial(as_float, data_provider, 12))
    training.pretrain(data, model, None, step, **options)


def as_float(provider: Any, count: int) -> Any:
    loader, *others = provider(count)
    loader.dataset.tensors = tuple(part.float() for part in loader.dataset.tensors)
    return loader, *others


def test_a_run_by_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    called: list[str] = []

    def add_flags(parser: Any) -> Any:
        parser.add_argument("--mine", type=int, default=3)
        return parser

    def watching(data_iterator: Any, model: nn.Module) -> Any:
        args = training.get_args()
        seen.append((args.mine, args.curr_iteration, args.consumed_train_samples, args.params_dtype, args.seed))
        return forward_step("loss and dict", data_iterator, model)

    defaults = {"seed": 4321, "init_func": lambda: called.append("init")}
    pretrain(monkeypatch, tmp_path, "--mine", "5", step=watching, extra_args_provider=add_flags, args_defaults=defaults)
    assert called == ["init"]
    assert seen == [(5, step, 4 * step, torch.float32, 4321) for step in range(3) for _ in range(2)]
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "] iteration " in line]
    assert [line.split("iteration")[1].split("|")[0].split() for line in lines] == [
        ["1/", "3"],
        ["2/", "3"],
        ["3/", "3"],
    ]
    assert all(float(line.split(":")[4].split()[0]) > 0 for line in lines)
    assert (tmp_path / "iter_0000003").is_dir()
    assert f"saving checkpoint at iteration       3 to {tmp_path} in torch_dcp format" in printed
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("reported/mean" in line for line in metrics) == 3


def test_a_run_of_ones_own_says_what_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines, notes on what has no effect, and the ways out of an error: flags of this command line."""
    more = ["--calculate-per-sample-loss", "--init-method-std", "0.01"]
    model = lambda: seeded_model().double()  # noqa: E731
    step = partial(forward_step, "loss and dict")
    pretrain(monkeypatch, tmp_path, *more, model=model, data=partial(as_float, data_provider, 12), step=step)
    printed = capsys.readouterr().out
    assert f"next   mm report {tmp_path}" in printed and "mm infer" not in printed
    assert "--calculate-per-sample-loss has no effect: your own forward step computes the loss." in printed
    assert "--init-method-std has no effect" in printed
    assert "model_provider returned parameters in fp64, which are trained in fp32" in printed
    assert "tokens per sample" not in printed
    with pytest.raises(CheckpointError) as raised:
        pretrain(monkeypatch, tmp_path, "--global-batch-size", "8", "--train-iters", "6")
    told = str(raised.value)
    assert "--save <new folder> --load <this run> --weights-only" in told and "Choose --global-batch-size" in told
    assert "training." not in told.replace("training.lr", "")


def test_steps_taken_by_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_step` inside of a run, on micro-batches of the script's own."""
    step = partial(forward_step, "loss and dict")
    found: list[Any] = []

    def stepping(data_iterator: Any, model: nn.Module) -> Any:
        if not found:
            found.append(None)
            loader = as_float(data_provider, 12)[0]
            found.append(training.train_step(step, iter(loader), [model], None, None, None, [found.append]))
        return step(data_iterator, model)

    with pytest.raises(ConfigError, match="another model"):
        pretrain(
            monkeypatch,
            tmp_path / "wrong",
            step=lambda d, m: training.train_step(step, d, nn.Linear(1, 1), *[None] * 3),
        )
    pretrain(monkeypatch, tmp_path / "run", step=stepping)
    _, model, (report, skipped, norm, zeros) = found
    assert isinstance(model, nn.Module)
    assert set(report) == {"squares", "mean"} and skipped == 0 and norm > 0 and zeros is None
    with pytest.raises(ConfigError, match="no training is under way"):
        training.train(step, None, None, None, None, None, None, None)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="outputs other than the loss"):
        pretrain(monkeypatch, tmp_path, process_non_loss_data_func=print)
    with pytest.raises(ConfigError, match="is not a function to call"):
        training.train_valid_test_datasets_provider()


def test_sections_by_attribute_and_key() -> None:
    section = JsonSection({"a": {"b": [1, {"c": 2}]}, "d": None})
    assert section.a.b[1].c == section["a"]["b"][1]["c"] == 2
    assert section.get("e", 7) == 7 and "d" in section
    assert section.to_dict() == {"a": {"b": [1, {"c": 2}]}, "d": None}
    assert dict(**section.a) == {"b": section.a.b}


SCRIPT = """
from pathlib import Path
import mindspeed.megatron_adaptor
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, print_rank_0
from megatron.training.utils import average_losses_across_data_parallel_group, unwrap_model
from mindspeed_mm.training import pretrain
from tests.fsdp.train.provider.user_run import seeded_model
from tests.test_training import as_float, data_provider, forward_step

def step(data_iterator, model):
    assert mpu.get_data_parallel_world_size() == 1 and get_num_microbatches() == 2
    output, loss_func = forward_step("loss and dict", data_iterator, unwrap_model(model))
    def averaged(output):
        loss, _ = loss_func(output)
        return loss, {"averaged": average_losses_across_data_parallel_group([loss])[0]}
    return output, averaged

pretrain(lambda: as_float(data_provider, 12), lambda: seeded_model().float(), ModelType.encoder_or_decoder, step)
print_rank_0("ended")
(Path(get_args().save) / "ended").touch()
"""


@alone
def test_a_script_that_imports_megatron(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    sys.argv = ["-m", str(script), *FLAGS.split(), str(tmp_path / "run")]
    main()
    assert "reported/averaged" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert (tmp_path / "run" / "ended").exists()
    sys.argv = ["-m", str(script), *FLAGS.split(), str(tmp_path / "run"), "--lrr", "1"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


UPSTREAM = """
from copy import deepcopy
from functools import partial

import torch
from datasets import Dataset

import mindspeed.megatron_adaptor
from mindspeed.megatron_adaptor import get_mindspeed_args
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, print_rank_0
from megatron.training.utils import average_losses_across_data_parallel_group
from mindspeed_mm.configs.config import mm_extra_args_provider
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.data_utils.utils import build_iterations
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.models.vlm_model import VLMModel
from mindspeed_mm.patchs import dummy_optimizer_patch
from mindspeed_mm.tasks.requests.infer import InferRequest
from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.hetero_parallel import apply_hetero_parallel_hooks, change_parallel_state, hetero_align_config
from mindspeed_mm.utils.transformer_model_config import get_model_config
from mindspeed_mm.utils.utils import EncoderBalanceComm, compute_token_level_loss

assert get_mindspeed_args().ai_framework == "pytorch"


def build(pre_process=True, post_process=True, modules=None):
    config = deepcopy(get_args().mm.model)
    config.pre_process = pre_process
    if get_args().hetero_parallel:
        apply_hetero_parallel_hooks(config)
    if not hasattr(config, "image_encoder"):
        return TransformersModel(config)
    config.text_decoder = get_model_config(config.text_decoder)
    config.audio_encoder = None
    model = VLMModel(config)
    model.freeze(freeze_image_encoder=getattr(config.image_encoder.vision_encoder, "freeze", True))
    return model


def batch_of(data_iterator, towers_end_here):
    batch, device = next(data_iterator), torch.cuda.current_device()
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            kind = get_args().params_dtype if torch.is_floating_point(value) else None
            batch[name] = value.to(device=device, dtype=kind)
    if hasattr(get_args().mm.model, "image_encoder"):
        balanced = (mpu.is_pipeline_first_stage() or towers_end_here) and get_args().encoder_dp_balance
        batch["tranfer"] = None
        if balanced:
            group = mpu.get_data_parallel_group()
            batch["pixel_values"], batch["tranfer"] = EncoderBalanceComm.apply(batch["pixel_values"], group)
    return batch


def loss_of(output):
    if get_args().calculate_per_token_loss:
        both, tokens, reported = compute_token_level_loss(output)
        return both[0].clone(), tokens, {"loss": (reported[0], reported[1])}
    loss = output["loss"].mean()
    averaged = average_losses_across_data_parallel_group([loss])
    return loss.unsqueeze(0).clone() / mpu.get_context_parallel_world_size(), {"loss": averaged[0]}


def step(data_iterator, model):
    towers = getattr(model.module.module, "add_image_encoder", False) and model.module.module.image_encoder.post_process
    return model(**batch_of(data_iterator, towers)), loss_of


def rows(numbers):
    args = get_args()
    data = args.mm.data
    found = build_mm_dataset(data.dataset_param)
    assert not isinstance(found, (Dataset, tuple)) and getattr(data.dataset_param.basic_parameters, "val_rate", 0) == 0
    loader = partial(
        build_mm_dataloader,
        dataloader_param=data.dataloader_param,
        process_group=mpu.get_data_parallel_group(),
        dataset_param=data.dataset_param,
        consumed_samples=args.consumed_train_samples,
    )
    return build_iterations(loader(found))


if __name__ == "__main__":
    from mindspeed_mm.patchs import meta_device_patches, ring_attn_patch, torch_dcp_patch, ulysses_patches

    print_rank_0("begins")
    rows.is_distributed = True
    pretrain(
        rows,
        build,
        ModelType.encoder_or_decoder,
        step,
        extra_args_provider=mm_extra_args_provider,
        args_defaults={"dataloader_type": "external"},
    )
"""
"""Ours: it imports all that MindSpeed-MM's pretrain_vlm.py and pretrain_transformers.py do, and uses it as they do."""


@alone
@pytest.mark.parametrize("kind", ["vlm", pytest.param("transformers", marks=pytest.mark.slow), "per token"])
def test_scripts_in_the_manner_of_mindspeed_mm(tmp_path: Path, kind: str) -> None:
    yaml = make_tiny_run(tmp_path, training={"train_iters": 2})
    settings = load_with_plugins(yaml).arguments.data.model_dump(mode="json", exclude_unset=True)
    settings["dataset_param"].setdefault("preprocess_parameters", {})["model_name_or_path"] = str(tmp_path / "model")
    data, script = tmp_path / "data.json", tmp_path / "mine.py"
    data.write_text(json.dumps(settings), encoding="utf-8")
    script.write_text(UPSTREAM)
    parts: dict[str, Any] = {"text_decoder": {}, "image_encoder": {"vision_encoder": {"freeze": False}}}
    model = parts if kind == "vlm" else {"init_from_hf_path": str(tmp_path / "model")}
    words = ["--mm-model", write_model_json(tmp_path, **model), "--mm-data", str(data), "--num-workers", "0"]
    words += ["--calculate-per-token-loss"] * (kind == "per token")
    sys.argv = ["-m", str(script), *FLAGS.split(), str(tmp_path / "run"), "--seed", "7", *words]
    main()
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in found if "loss" in line]
    reported = [line["reported/loss"] for line in found if "reported/loss" in line]
    assert len(losses) == 3 and losses[0] != losses[1] and reported == pytest.approx(losses, rel=1e-6)


OWN = """
from mindspeed_mm.training import pretrain
try:
    pretrain(None, None, None, None)
except Exception as error:
    print("caught", type(error).__name__)
    raise ZeroDivisionError if {bug} else error
"""


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "code", "last"), [(False, 2, "--lrr  unknown flag."), (True, 1, "ZeroDivisionError")])
def test_a_script_of_ones_own_ends_by_its_error(tmp_path: Path, bug: bool, code: int, last: str) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN.format(bug=bug))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, str(script), *FLAGS.split(), str(tmp_path / "run"), "--lrr", "1"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == code and "caught UsageError" in done.stdout
    assert last in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) is bug


@alone
def test_a_script_of_ones_own_ends_by_the_hook_of_its_error(tmp_path: Path) -> None:
    """As Python ends it, in a process that has imported what it needs."""
    sys.argv = ["own.py", *FLAGS.split(), str(tmp_path / "run"), "--lrr", "1"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        try:
            exec(OWN.format(bug=False), {"__name__": "__main__"})
        except MMError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    assert ended.value.code == 2 and "caught UsageError" in out.getvalue()
    assert "--lrr  unknown flag." in err.getvalue().splitlines()[-1] and "Traceback" not in err.getvalue()


def test_unknown_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_vlm.py", *FLAGS.split(), str(tmp_path), "--lrr", "1"])
    with pytest.raises(SystemExit) as ended:
        pretrain_transformers.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--lrr" in told and "Did you mean '--lr'?" in told and "Traceback" not in told


def test_names_of_installed_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: sys.modules.get(name) for name in NAMES}
    for library in ("megatron", "mindspeed", "mindspeed_llm"):
        monkeypatch.setitem(sys.modules, library, sys)
    assert install() == []
    assert {name: sys.modules.get(name) for name in NAMES} == before


def write_model_json(folder: Path, **values: Any) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def test_answers_to_the_prompts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_qwen3_vl(tmp_path / "model")
    make_rows(tmp_path, 1)
    image = tmp_path / "images" / "0_0.png"
    path = write_model_json(
        tmp_path,
        init_from_hf_path=str(model),
        prompts=["What is it?", "And now?"],
        image_path=str(image),
        generation_config={"max_new_tokens": 3},
    )
    monkeypatch.setattr(sys, "argv", ["inference_vlm.py", "--mm-model", path])
    inference_vlm.main()
    asked = [InferRequest(model, prompts=(p,), images=(image,), max_new_tokens=3) for p in ("What is it?", "And now?")]
    expected = [answer_prompt(each).text for each in asked]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    monkeypatch.setattr(sys, "argv", ["inference_vlm.py"])
    with pytest.raises(SystemExit) as ended:
        inference_vlm.main()
    assert ended.value.code == 2
    assert "no model is named" in capsys.readouterr().err


def test_samples_of_the_prompt_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_flux(tmp_path / "flux", identity_vae=True)
    out = tmp_path / "samples"
    path = write_model_json(
        tmp_path,
        predictor={"model_id": "flux"},
        ae={"from_pretrained": str(folder / "vae")},
        diffusion={"num_inference_steps": 2},
        pipeline_config={"input_size": [1, 16, 16]},
        prompt="a cat",
        save_path=str(out),
    )
    monkeypatch.setattr(sys, "argv", ["inference_sora.py", "--mm-model", path, "--load", str(folder / "transformer")])
    inference_sora.main()
    assert f"{out}: 1 sample made" in capsys.readouterr().out
    assert len(list(out.glob("*.png"))) == 1


def test_an_entry_trains_what_model_json_and_data_json_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pretrain_transformers`, with a class that the script has registered; the loss is that of the YAML's run."""
    from transformers import Qwen3VLForConditionalGeneration

    yaml = make_tiny_run(tmp_path, training={"train_iters": 2})
    ModelHub.MODEL_MAPPINGS["of the test of training"] = Registered = type(
        "Registered", (Qwen3VLForConditionalGeneration,), {}
    )
    settings = load_with_plugins(yaml).arguments.data.model_dump(mode="json", exclude_unset=True)
    data = tmp_path / "data.json"
    data.write_text(json.dumps(settings), encoding="utf-8")
    model = write_model_json(tmp_path, init_from_hf_path=str(tmp_path / "model"), model_id="of the test of training")
    words = ["--mm-model", model, "--mm-data", str(data), "--seed", "7", "--micro-batch-size", "2", "--lr", "1e-3"]
    words += ["--train-iters", "2", "--num-workers", "0", "--lr-decay-style", "constant", "--save", str(tmp_path / "f")]
    monkeypatch.setattr(sys, "argv", ["pretrain_transformers.py", *words])
    pretrain_transformers.main()
    run = json.loads((tmp_path / "f" / "run.json").read_text())
    assert run["model_class"] == "Registered" == Registered.__name__
    lines = [json.loads(line) for line in (tmp_path / "f" / "metrics.jsonl").read_text().splitlines()]
    overrides = [f"training.save={tmp_path / 'y'}", "training.lr_decay_style=constant", "training.weight_decay=0.01"]
    overrides.append("features.loss_cfg.loss_type=per_micro_batch_loss")  # as Megatron-LM normalises
    engine = Trainer(load_with_plugins(yaml, overrides)).train()
    assert engine is not None
    own = [json.loads(line) for line in (tmp_path / "y" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] == own[-1]["loss"]
