"""What is wrong on a command line of flags, or in its files: one line each, with the place and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_mm
from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import ConfigError, MMError, Problem
from mindspeed_mm.fsdp.data.dataloader.order import Deal
from mindspeed_mm.fsdp.params.data_args import DataloaderParam
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.fsdp.train.provider.callbacks import read_loss
from mindspeed_mm.fsdp.train.provider.loader import ProvidedDataset, ProvidedLoader
from mindspeed_mm.provider.flag_words import flag_of_key, in_flags, told_in_flags
from mindspeed_mm.provider.flags import FLAGS
from mindspeed_mm.provider.translate import from_flags
from mindspeed_mm.tasks.config import run_flags

NEEDED = "--lr 1e-5 --train-iters 100 --micro-batch-size 1"
CONFIG = {"model_type": "qwen2_5_vl", "text_config": {"num_hidden_layers": 36, "hidden_size": 2048}}
MODEL: dict[str, Any] = {"text_decoder": {"num_layers": 36}}
PP2 = f"{NEEDED} --pipeline-model-parallel-size 2 --mm-model model.json --mm-data data.json"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(CONFIG))
    data = {"dataset_param": {"preprocess_parameters": {"model_name_or_path": "hf"}}}
    Path("data.json").write_text(json.dumps(data))
    write_model(MODEL)


def write_model(content: Any) -> None:
    Path("model.json").write_text(json.dumps(content, indent=2))


def problems(words: str, world_size: int = 8) -> list[str]:
    with pytest.raises(MMError) as raised:
        from_flags(words.split(), {"WORLD_SIZE": str(world_size)})
    assert int(raised.value.exit_code) == 2
    return [str(problem) for problem in raised.value.problems]


def test_an_unknown_flag_names_the_nearest() -> None:
    assert problems("--lrr 1") == ["--lrr  unknown flag. Did you mean '--lr'?"]


def test_a_batch_that_does_not_divide_names_the_nearest() -> None:
    assert problems(f"{NEEDED} --global-batch-size 100") == [
        "--global-batch-size  100 is not a multiple of 1 x 8 data ranks. Nearest: 96, 104."
    ]
    assert problems(f"{NEEDED} --global-batch-size 3")[0].endswith("Nearest: 8.")


def test_steps_of_a_schedule_that_contradict() -> None:
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-decay-iters 7"
    assert problems(f"{NEEDED} {wsd}")[0].startswith("--lr-decay-iters  7, but WSD anneals up to the last of all ")


def test_a_freeze_that_is_a_word() -> None:
    for word in ("false", "yes", 1):
        write_model({**MODEL, "text_decoder": {**MODEL.get("text_decoder", {}), "freeze": word}})
        found = problems(f"{NEEDED} --mm-model model.json --mm-data data.json")
        (told,) = [line for line in found if "freeze" in line]
        assert told.endswith(f"freeze is {word!r}, neither true nor false. Write true or false, without quotes.")
        assert told.startswith("model.json:")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"freezes": ["x"]}, "unknown key 'freezes'. Did you mean 'freeze'?"),
        (
            {"text_decoder": {"num_layers": 36, "hiden_size": 7}},
            "unknown key 'hiden_size'. Did you mean 'hidden_size'?",
        ),
        ({"text_decoder": [1, 2]}, "text_decoder is [1, 2], not an object. Put its settings into {}."),
        ({"image_encoder": "x"}, "image_encoder is 'x', not an object."),
        ({"model_id": 5}, "model_id is 5, not text. Write it in quotes."),
        ({"init_from_hf_path": ["hf"]}, "init_from_hf_path is ['hf'], not text."),
        ({"freeze": "model.visual"}, "freeze is 'model.visual', not a list of patterns."),
    ],
)
def test_slips_in_model_json(changes: dict[str, Any], line: str) -> None:
    write_model(MODEL | changes)
    found = problems(f"{NEEDED} --mm-model model.json --mm-data data.json")
    assert any(line in told and told.startswith("model.json:") for told in found), found


def test_too_few_ranks() -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8"
    assert problems(f"{NEEDED} {sizes}") == [
        "8 ranks are fewer than TP 2 x PP 8 x CP 1 = 16. Start more ranks, or lower a size."
    ]
    assert problems(f"{NEEDED} {sizes}", 24)[0].startswith("24 ranks are not a multiple of TP 2 x PP 8 x CP 1 = 16")


def test_a_path_with_spaces() -> None:
    assert problems(f"{NEEDED} --save path to") == ["'to' belongs to no flag. Quote paths that hold spaces."]
    assert problems("--lrr path to --save a b") == [
        "--lrr  unknown flag. Did you mean '--lr'?",
        "'b' belongs to no flag. Quote paths that hold spaces.",
    ]


def test_numbers_and_missing_values() -> None:
    assert problems("--train-iters ten --lr x") == [
        "--train-iters  'ten' is not a whole number",
        "--lr  'x' is not a number",
    ]
    assert problems("--lr --seed 3") == ["--lr  needs a value"]


def test_a_number_of_ranks_that_is_none() -> None:
    with pytest.raises(MMError, match="WORLD_SIZE  'eight' is not a whole number"):
        from_flags(NEEDED.split(), {"WORLD_SIZE": "eight"})


def test_what_every_training_needs() -> None:
    assert problems("") == [
        f"{flag}  is not given. Add it." for flag in ("--micro-batch-size", "--train-iters", "--lr")
    ]


def test_broken_json_names_line_and_column() -> None:
    Path("model.json").write_text('{\n  "text_decoder": {\n    "num_layers": 36\n  "a": 1}')
    assert problems(f"{NEEDED} --mm-model model.json") == ["model.json:4:3  not valid JSON: expecting ',' delimiter"]
    Path("model.json").write_text("[]")
    assert problems(f"{NEEDED} --mm-model model.json")[0].startswith("model.json  holds no object")
    assert "no such file" in problems(f"{NEEDED} --mm-model nothing.json")[0]


def test_sizes_that_the_folder_has_otherwise() -> None:
    write_model({"text_decoder": {"num_layers": 28, "hidden_size": 2048, "vocab_size": 99}})
    assert problems(f"{NEEDED} --mm-model model.json --mm-data data.json") == [
        "model.json:3:19  text_decoder.num_layers  28, hf/config.json says 36. The folder is what is built: change "
        "model.json."
    ]


def test_an_unknown_key_of_data_json_names_its_line() -> None:
    Path("data.json").write_text('{\n\t"dataset_param": {"basic_parameters": {"cutof_len": 3}}\n}')
    (line,) = problems(f"{NEEDED} --mm-data data.json")
    assert line.startswith("data.json:2:41  data.dataset_param.basic_parameters.cutof_len  unknown key. Did you mean")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--seq-length 7 --mm-data data.json", "--seq-length  7, but data.json:1:55 says 8"),
        ("--learning_rate 1e-4", "--learning_rate  0.0001, but --lr says 1e-05"),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "--lr-warmup-iters  5, but --lr-warmup-fraction says 0.1"),
        ("--bf16 --fp16", "--bf16  cannot be combined with --fp16"),
        ("--layerzero --use-torch-fsdp2", "--use-torch-fsdp2  cannot be combined with --layerzero"),
        ("--recompute-granularity full --use-torch-fsdp2", "cannot be combined with --use-torch-fsdp2"),
        ("--fsdp2-config-path f.yaml", "--fsdp2-config-path  is given without --use-torch-fsdp2"),
        ("--virtual-pipeline-model-parallel-size 2", "2, but there is one pipeline stage"),
        ("--context-parallel-size 2 --context-parallel-algo ulyses_cp_algo", "Did you mean 'ulysses_cp_algo'?"),
        ("--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo", "--ulysses-degree-in-cp  is not given"),
        ("--lr-decay-style inverse-square-root", "--lr-decay-style  'inverse-square-root' is not built"),
        ("--optimizer sgd", "--optimizer  'sgd' is not built. There are adam and muon."),
        ("--ai-framework mindspore", "--ai-framework  'mindspore' is not built"),
        ("--ckpt-format zarr", "--ckpt-format  'zarr' is not one of torch, torch_dcp, torch_dist"),
        ("--lr-warmup-iters 101", "--lr-warmup-iters  101 is more than all 100 steps"),
        ("--min-lr 1", "training.lr_min  1.0 is above training.lr"),
    ],
)
def test_contradictions_name_both_sides(words: str, line: str) -> None:
    Path("data.json").write_text('{"dataset_param": {"basic_parameters": {"cutoff_len": 8}}}')
    found = problems(f"{NEEDED} {words}")
    assert any(line in one for one in found), found


def test_stages_that_do_not_fit() -> None:
    def of(counts: list[Any]) -> str:
        write_model({"text_decoder": {"num_layers": 36, "pipeline_num_layers": counts}})
        return problems(PP2)[0]

    assert "[36] are not the numbers of layers of 2 stages" in of([36])
    assert "[12, 16] are 28 layers, but num_layers is 36" in of([12, 16])


def test_keys_of_fsdp2_config() -> None:
    Path("fsdp2.yaml").write_text("sharding_sise: auto\n")
    words = f"{NEEDED} --use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
    (line,) = problems(words)
    assert line == "fsdp2.yaml:1:1  'sharding_sise' is not a key of this file. Did you mean 'sharding_size'?"
    Path("fsdp2.yaml").write_text("sharding_size: half\nparam_dtype: bf61\n")
    first, second = problems(words)
    assert first == "fsdp2.yaml:1:16  sharding_size is 'half'. Write auto, or a whole number from 1."
    assert second.startswith("fsdp2.yaml:2:14  parallel.fsdp_plan.param_dtype  'bf61' is not one of bf16")


def test_a_tensor_size_that_the_flag_contradicts() -> None:
    write_model({"text_decoder": {"num_layers": 36, "tensor_model_parallel_size": 4}})
    (line,) = problems(f"{NEEDED} --tensor-model-parallel-size 2 --mm-model model.json --mm-data data.json")
    assert line.startswith("model.json:4:35  4, but --tensor-model-parallel-size says 2")


def test_a_loss_that_is_no_number() -> None:
    with pytest.raises(MMError) as raised:
        read_loss(torch.zeros(8, 16, requires_grad=True))
    assert str(raised.value) == "loss_func  returned shape (8, 16). Return one number."


def test_data_that_end() -> None:
    loader = ProvidedLoader(ProvidedDataset("mine"), Deal(1, 2, 0, 1), DataloaderParam(num_workers=0), None)
    loader.open(iter([{"x": torch.zeros(1)}] * 75), range(100))
    with pytest.raises(MMError) as raised:
        list(loader)
    assert str(raised.value).startswith(
        "train_valid_test_datasets_provider  the data ended after 37 of 100 steps. Return a loader"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "Say training.save=<new folder> training.load=runs/a --weights-only.",
            "Say --save <new folder> --load runs/a --weights-only.",
        ),
        (
            "Choose gradient_accumulation_steps so that micro_batch_size × data ranks × accumulation is 4.",
            "Choose --global-batch-size so that --micro-batch-size × data ranks × accumulation is 4.",
        ),
        ("Or set training.on_nonfinite=skip.", "Or set --mm-set training.on_nonfinite=skip."),
        ("Lower training.micro_batch_size, or training.lr.", "Lower --micro-batch-size, or --lr."),
        (
            "the file runs/training.save/x and data/model.json stay",
            "the file runs/training.save/x and data/model.json stay",
        ),
    ],
)
def test_messages_name_flags(text: str, told: str) -> None:
    assert in_flags(text) == told


def test_errors_of_a_run_name_flags() -> None:
    with pytest.raises(MMError) as raised, told_in_flags():
        raise ConfigError(
            "2", problems=[Problem("is 3", key="training.load", way_out="Set training.save_total_limit.")]
        )
    assert "--load  is 3. Set training.save_total_limit. (Here: --mm-set training.save_total_limit=….)" in str(
        raised.value
    )
    assert in_flags("training.lr_decay_ratio") == "--lr-decay-iters"


def test_every_flag_that_names_a_key_names_one_that_there_is() -> None:
    known = {key for key, _ in walk_fields()}
    assert {flag.sets for flag in FLAGS if flag.sets} <= known
    for flag in FLAGS:
        if flag.sets:
            assert flag_of_key()[flag.sets].startswith("--")


def test_schedules_that_lack_a_flag() -> None:
    (line,) = problems(f"{NEEDED} --lr-decay-style WSD")
    assert line.startswith("--lr-wsd-decay-iters  is not given, but WSD anneals.")
    assert problems(f"{NEEDED} --lr-warmup-iters -3") == [
        "--lr-warmup-iters  -3 is below 0. Give the length of the warm-up."
    ]


def test_a_script_with_functions_of_its_own() -> None:
    Path("mine.py").write_text(
        "import mindspeed.megatron_adaptor\n"
        "from mindspeed_mm.training import pretrain, train_valid_test_datasets_provider\n"
        "def model_provider(): ...\ndef step(it, m): ...\n"
        "pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step_func=partial(step, 3))\n"
    )
    own, others = run_flags(["torchrun", "mine.py", *NEEDED.split()], {}).notes
    assert own.startswith("mine.py passes its own functions to pretrain (model_provider, step): they are not used.")
    assert others.endswith("start it by -m mindspeed_mm.megatron_names mine.py.")
    by_runner = run_flags(["torchrun", "-m", "mindspeed_mm.megatron_names", "mine.py", *NEEDED.split()], {}).notes
    assert by_runner == (own,)
    entry = Path(mindspeed_mm.__file__).parent / "pretrain_vlm.py"
    assert run_flags(["torchrun", str(entry), *NEEDED.split(), "--mm-data", "data.json"], {}).notes == ()


def test_types_that_two_places_say() -> None:
    Path("fsdp2.yaml").write_text("sharding_size: auto\nparam_dtype: fp32\n")
    words = f"{NEEDED} --bf16 --use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
    notes = run_flags(words.split(), {"WORLD_SIZE": "2"}).notes
    assert any("--bf16 has no effect: fsdp2.yaml:2:14 says param_dtype: fp32." in note for note in notes), notes


def test_the_command_prints_lines_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--from-flags", "--lrr", "1"]) == 2
    assert capsys.readouterr().err == "1 problem in the flags\n  --lrr  unknown flag. Did you mean '--lr'?\n"
