"""Launches of every kind with the YAML that each means; written anew by `python -m tests.provider.test_golden`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.provider.flags import FLAGS
from mindspeed_mm.provider.translate import Translated, from_flags
from mindspeed_mm.tasks.config import as_text, run_flags

GOLDEN = Path(__file__).parent / "golden"
LAUNCHES = (
    "vlm.sh",
    "fsdp2.sh",
    "wan.sh",
    "experts.sh",
    "stages.sh",
    "dreambooth.sh",
    "one.yaml",
    "features.sh",
    "drawing.sh",
    "one_model.sh",
    "language_alone.sh",
    "older.sh",
    "pairs.sh",
    "media_pairs.sh",
)
"""One of each kind that MindSpeed-MM's scripts are of."""


def written(launch: str) -> str:
    """What `mm config --from-flags` prints, from the folder of the launches."""
    ranks = {"WORLD_SIZE": "8"} if launch == "one.yaml" else {}
    translated = run_flags([launch], ranks)
    notes = "".join(f"# {note}\n" for note in translated.notes)
    return notes + as_text(translated.config, only_given=True)


@pytest.fixture(autouse=True)
def _in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_means_its_yaml(launch: str) -> None:
    assert written(launch) == Path(f"expected/{launch}.yaml").read_text()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_yaml_gives_the_same_configuration(launch: str, tmp_path: Path) -> None:
    config = run_flags([launch], {"WORLD_SIZE": "8"} if launch == "one.yaml" else {}).config
    (tmp_path / "run.yaml").write_text(as_text(config, only_given=True))
    assert load_config(tmp_path / "run.yaml").arguments == config.arguments


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--from-flags", "vlm.sh", "--seed", "7"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "run.yaml").arguments.training.seed == 7


def test_the_launches_use_every_rule() -> None:
    words = re.findall(r"--([\w-]+)", "\n".join((GOLDEN / launch).read_text() for launch in LAUNCHES))
    used = {word.replace("_", "-") for word in words} | {"use-torch-fsdp2", "lora-r"}
    rules = {flag.rule for flag in FLAGS if flag.rule}
    assert rules - {flag.rule for flag in FLAGS if flag.name.replace("_", "-") in used} == set()


def test_flags_and_a_yaml_written_by_hand_are_the_same() -> None:
    words = "--lr 1e-5 --train-iters 7 --micro-batch-size 2 --global-batch-size 32 --bf16 --weight-decay 0 --seed 42"
    by_flags = from_flags([*words.split(), "--lr-decay-style", "cosine"], {"WORLD_SIZE": "8"})
    by_hand = load_config(Path("by_hand.yaml"))
    assert by_flags.arguments == by_hand.arguments


NEEDED = "--lr 1 --train-iters 1 --micro-batch-size 1"


def of_script(tmp_path: Path, text: str, environment: Mapping[str, str] | None = None) -> Translated:
    (tmp_path / "run.sh").write_text(text)
    return run_flags([str(tmp_path / "run.sh")], environment or {})


def test_a_script_that_only_a_shell_can_work_out(tmp_path: Path) -> None:
    text = (
        "ADDRESS=`hostname -I | awk '{print $1}'`  # of this host\n"
        "N=$(cat hosts | wc -l)\nGBS=$((2 * N * 2))\n"
        'D="--nnodes $N --nproc_per_node 2 --master_addr $ADDRESS"\n'
        f"torchrun $D a.py {NEEDED} --global-batch-size $GBS\n"
    )
    with pytest.raises(UsageError, match=r"N is worked out while the script runs\. Set it before the command: N="):
        of_script(tmp_path, text)
    assert of_script(tmp_path, text, {"N": "3"}).arguments.training.gradient_accumulation_steps == 2
    with pytest.raises(UsageError, match=r"\$\(…\) is worked out while the script runs. Write"):
        of_script(tmp_path, f"python b.py {NEEDED} --save run_$(date +%F)\n")
    with pytest.raises(UsageError, match="holds no line that starts an entry"):
        of_script(tmp_path, "echo nothing\n")


@pytest.mark.parametrize(
    ("text", "save"),
    [
        ('A=x\nif [ -d y ]; then\n  B=1\nfi\nexport C="$A/z"\n', "$C"),
        ("A='x/$y'\n", '"$A"'),
        ("A=x/z # words\n", "${A}"),
        ("", "${B:-x/z}"),
        ("A=x/z\n# --trust-remote-code \\\nD=1\n", "$A $ROPE_ARGS"),
        ('B=""\n', "x/z $B --bf16 ${NOWHERE}"),
    ],
)
def test_forms_of_a_shell(tmp_path: Path, text: str, save: str) -> None:
    found = of_script(tmp_path, f"{text}python b.py {NEEDED} --save {save} 2>&1 | tee log_$(date).txt\n")
    assert found.arguments.training.save in ("x/z", "x/$y")


def test_a_variable_that_nothing_sets_is_empty_unless_a_flag_needs_it(tmp_path: Path) -> None:
    found = of_script(tmp_path, f"python b.py {NEEDED} $EXTRA --save x\n")
    assert found.arguments.training.save == "x" and "EXTRA is set nowhere in it" in "".join(found.notes)
    assert of_script(tmp_path, f"python b.py {NEEDED} $EXTRA\n", {"EXTRA": "--save y"}).arguments.training.save == "y"
    with pytest.raises(UsageError, match=r"PLACE is set nowhere in the script\. Set it before the command: PLACE="):
        of_script(tmp_path, f"python b.py {NEEDED} --save $PLACE\n")
    with pytest.raises(UsageError, match="X is worked out while the script runs"):
        of_script(tmp_path, f"read X\npython b.py {NEEDED} $X\n")


@pytest.mark.parametrize(
    "text",
    [
        'A="--bf16 --lora-target-modules "q_proj,v_proj" --save x/z"\n',
        "A='--bf16 --lora-target-modules q_proj,v_proj'\" --save x/z\"\n",
        'T=q_proj B="--save x/z"\nA="--bf16 --lora-target-modules "$T",v_proj $B"\n',
        'A="\n --bf16 \\\n --lora-target-modules "q_proj,v_proj" \\\n --save x/z\n"\n',
    ],
)
def test_quotes_inside_quotes_are_joined_as_a_shell_joins_them(tmp_path: Path, text: str) -> None:
    training = of_script(tmp_path, f"{text}python b.py {NEEDED} $A --lora-r 4\n").arguments.training
    assert (training.lora.target_modules, training.lora.rank, training.save) == (("q_proj", "v_proj"), 4, "x/z")


def test_launches_of_mindspore_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.sh  msrun starts it, which is MindSpore's"):
        of_script(tmp_path, f"A=1\nmsrun --worker_num=8 pretrain_vlm.py {NEEDED} 2>&1 | tee log\n")
    with pytest.raises(UsageError, match=r"pretrain_vlm\.py  msrun starts it"):
        run_flags(["msrun", "--worker_num", "8", "pretrain_vlm.py", *NEEDED.split()], {})


def test_a_launch_without_data_is_refused_as_its_run_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--mm-data  is not given: there is nothing to train on"):
        of_script(tmp_path, f"torchrun posttrain_qwen2vl_dpo.py {NEEDED}\n")
    own = "def f(*_): ...\npretrain(f, None, None, None)\n"
    (tmp_path / "pretrain_vlm.py").write_text(own)  # data of its own
    assert of_script(tmp_path, f"torchrun {tmp_path}/pretrain_vlm.py {NEEDED}\n").arguments.training.lr == 1


def test_the_command_tells_of_inputs_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*NEEDED.split(), "--posttrain-method", "dpo", "--ref-model", "nothing", "--load", "neither"]
    assert run(["config", "--from-flags", *words]) == 0
    said = capsys.readouterr().err
    assert "note: --ref-model  posttrain.reference.model_name_or_path  'nothing' does not exist" in said
    assert "note: --load  training.load  'neither' does not exist" in said


def test_entries(tmp_path: Path) -> None:
    words = [*NEEDED.split(), "--output_dir", "x"]
    found = run_flags(["accelerate", "launch", "--config_file", "c.yaml", "train_dreambooth_flux.py", *words], {})
    assert found.arguments.training.save == "x"
    assert of_script(tmp_path, f"accelerate launch train.py {NEEDED} --save y\n").arguments.training.save == "y"
    with pytest.raises(UsageError, match=r"posttrain_flux_dancegrpo.py  reads its flags itself"):
        run_flags(["torchrun", "posttrain_flux_dancegrpo.py", *words], {})


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("finetune_t2i.py", "reads its flags itself and writes them as a YAML beside the folder of --output_dir"),
        ("inference_qihoo.py", "starts Qihoo-T2X, which is not built"),
        ("pretrain_ae.py", "starts the training of autoencoders, which is not built"),
    ],
)
def test_entries_that_are_not_built(entry: str, says: str, tmp_path: Path) -> None:
    """Their flags are their own: nothing is said of these."""
    words = f"{entry} --resolution 512 512 {NEEDED}"
    with pytest.raises(UsageError, match=f"{entry}  {says}"):
        of_script(tmp_path, f"torchrun --nproc_per_node 8 {words}\n")


def test_what_a_block_sets_is_not_known(tmp_path: Path) -> None:
    text = f"A=x\nif true; then\n  A=y\nfi\npython b.py {NEEDED} --save $A\n"
    with pytest.raises(UsageError, match="A is worked out while the script runs"):
        of_script(tmp_path, text)


if __name__ == "__main__":
    os.chdir(GOLDEN)
    Path("expected").mkdir(exist_ok=True)
    for name in LAUNCHES:
        Path(f"expected/{name}.yaml").write_text(written(name))
