"""Refusals of run folders, of going on, and of samples while training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fsdp.refusals_of_generators import SAMPLES, SAMPLING
from tests.fsdp.refusals_of_settings import with_foreign_files, with_old_style_checkpoint
from tests.helpers.refusal import DATA, LOADER, LORA, Refusal, with_file, with_first_row
from tests.helpers.runs import train
from tests.helpers.tiny_models import make_tiny_qwen3

SAVE = "training.save={folder}/out"
TWICE = "posttrain.grpo.num_iterations=2"
OTHER_TEXT = with_first_row(
    messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}], images=[]
)


def with_a_run(afterwards: Callable[[Path], object] = lambda folder: None, *words: str) -> Callable[[Path], None]:
    """A run of one step, started with these words, of which something is changed."""

    def spoil(folder: Path) -> None:
        train(folder / "run.yaml", folder / "out", "training.train_iters=1", *words)
        afterwards(folder)

    return spoil


def damage(folder: Path) -> None:
    """The only checkpoint lacks content."""
    next((folder / "out").glob("iter_*/trainer_state.json")).write_text("[]")


def deeper(folder: Path) -> None:
    """Another model of the same kind."""
    make_tiny_qwen3(folder / "other", num_hidden_layers=3)


def without_rollouts(folder: Path) -> None:
    """What was drawn is gone."""
    for file in (folder / "out").rglob("rollout*.jsonl"):
        file.unlink()


RESUMES = (
    Refusal("a used folder", (SAVE, "--resume", "never"), "holds a run already", "training.save", DATA, with_a_run()),
    Refusal(
        "weights of the run's own folder",
        (SAVE, "--weights-only"),
        "needs a folder of its own",
        "training.save",
        DATA,
        with_a_run(),
    ),
    Refusal(
        "a checkpoint without an optimizer",
        (SAVE,),
        "holds no optimizer state",
        "",
        DATA,
        with_a_run(lambda folder: None, "training.no_save_optim=true"),
    ),
    Refusal(
        "a checkpoint of a model of another depth",
        (SAVE, "model.model_name_or_path={folder}/other"),
        "model.layers.2.",
        "",
        DATA,
        with_a_run(deeper),
        base="text",
    ),
    Refusal(
        "a checkpoint within a rollout that is gone",
        (SAVE, TWICE),
        "the checkpoint was saved within rollout 0",
        "posttrain.rollout.keep",
        DATA,
        with_a_run(without_rollouts, TWICE),
        base="answers",
    ),
    Refusal(
        "another optimizer",
        (SAVE, "training.optimizer=muon"),
        'was "adamw", is "muon"',
        "training.optimizer",
        DATA,
        with_a_run(),
    ),
    Refusal("another seed", (SAVE, "training.seed=8"), "was 7, is 8", "training.seed", DATA, with_a_run()),
    Refusal(
        "another order",
        (SAVE, f"{LOADER}.shuffle=false"),
        "was true, is false",
        f"{LOADER}.shuffle",
        DATA,
        with_a_run(),
    ),
    Refusal("other rows", (SAVE,), "add --accept-data-change", "data: ", DATA, with_a_run(OTHER_TEXT)),
    Refusal(
        "adapters instead of weights", (SAVE, *LORA), "was false, is true", "training.lora.enable", DATA, with_a_run()
    ),
    Refusal("a damaged checkpoint", (SAVE,), "were committed", "", DATA, with_a_run(damage)),
    Refusal(
        "a checkpoint of Megatron's without files",
        ("training.load={folder}/old",),
        "does not exist",
        "",
        DATA,
        with_old_style_checkpoint,
    ),
    Refusal(
        "a checkpoint that is pictures",
        ("training.load={folder}/images",),
        "is neither a checkpoint nor a model folder",
        "",
        DATA,
    ),
    Refusal(
        "weights to go on from that are none",
        ("training.load={folder}/old", "training.load_format=hf"),
        "no *.safetensors here",
        "",
        DATA,
        lambda folder: (folder / "old").mkdir(),
    ),
    Refusal(
        "a run folder of somebody else",
        (SAVE,),
        "is not a run folder and holds metrics.jsonl",
        "training.save",
        spoil=with_foreign_files,
    ),
    Refusal(
        "a run in a model folder", ("training.save={folder}/model/run",), "lies in a model folder", "training.save"
    ),
)

SAMPLES_OF_RUNS = (
    Refusal(
        "samples without a run folder",
        (f"{SAMPLING}.interval=2", f"{SAMPLING}.prompts=[a]"),
        "there is no run folder to put them in",
        "training.save",
        base="flux",
    ),
    Refusal("samples without prompts", SAMPLES, "there are no prompts", f"{SAMPLING}.prompts", base="flux"),
    Refusal(
        "samples of prompts that are not there",
        (*SAMPLES, f"{SAMPLING}.prompts_file={{folder}}/none.txt"),
        "there is no such file",
        "",
        DATA,
        base="flux",
    ),
    Refusal(
        "samples of no prompts",
        (*SAMPLES, f"{SAMPLING}.prompts_file={{folder}}/p.txt"),
        "the file is empty",
        "",
        DATA,
        with_file("p.txt", ""),
        base="flux",
    ),
    Refusal(
        "samples of a size that a VAE cannot make",
        (*SAMPLES, f"{SAMPLING}.prompts=[a]", f"{SAMPLING}.height=15", f"{SAMPLING}.width=16"),
        "cannot be encoded",
        SAMPLING,
        base="flux",
    ),
    Refusal(
        "samples without a picture to go on from",
        (*SAMPLES, f"{SAMPLING}.prompts=[a]"),
        "the prompt has no picture",
        "image",
        DATA,
        base="i2v",
    ),
)
