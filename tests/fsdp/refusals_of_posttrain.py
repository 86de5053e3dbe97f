"""Rows of the table of refusals: references, rewards and rollouts of post-training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.refusal import (
    BASIC,
    DATA,
    ENVIRONMENT,
    LORA,
    PREPROCESS,
    Refusal,
    with_config,
    with_first_row,
)
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_media_pairs import PAIRS as MEDIA_PAIRS
from tests.helpers.tiny_models import make_tiny_qwen3

REFERENCE = "posttrain.reference.model_name_or_path"
WEIGHED = ("posttrain.dpo.weight_alpha=1", "posttrain.dpo.histogram_path={folder}/scores.json")
STATIC = "tools.profile.static_param"
ITS_OWN = (f"{REFERENCE}={{folder}}/other",)


def rewarded(reward: str) -> tuple[str, ...]:
    return (f"posttrain.rewards=[{{name: {reward}}}]",)


def with_rows(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            change(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return spoil


def with_another_model(folder: Path) -> None:
    make_tiny_qwen3(folder / "other", vocab_size=352)


def with_a_model_without_weights(folder: Path) -> None:
    (make_tiny_qwen3(folder / "other") / "model.safetensors").unlink()


def without_the_answer(row: dict[str, Any]) -> None:
    row["messages"].pop()


def without_scores(row: dict[str, Any]) -> None:
    del row["score"], row["score_rejected"]


def with_scores_up_to(folder: Path, highest: float) -> None:
    """A histogram of two bins."""
    edges = [0.0, highest / 2, highest]
    (folder / "scores.json").write_text(json.dumps({"bin_edges": edges, "counts": [3, 1]}))


def with_another_generator(folder: Path) -> None:
    make_tiny_wan(folder / "other")


PAIRS = (
    Refusal(
        "a reference of another generator",
        (*MEDIA_PAIRS, *ITS_OWN),
        "is a WanTransformer3DModel with in_channels",
        REFERENCE,
        spoil=with_another_generator,
        base="media pairs",
    ),
    Refusal("a reference that is not there", ITS_OWN, "other'", REFERENCE, DATA, base="pairs"),
    Refusal(
        "a reference that reads otherwise",
        ITS_OWN,
        "with 352 tokens, and the trained model is a qwen3 with 320",
        REFERENCE,
        spoil=with_another_model,
        base="pairs",
    ),
    Refusal(
        "a reference without weights",
        ITS_OWN,
        "safetensors",
        REFERENCE,
        DATA,
        with_a_model_without_weights,
        base="pairs",
    ),
    Refusal(
        "nothing that is stored",
        ("posttrain.reference.kind=stored", "posttrain.reference.path={folder}/none"),
        "there are no stored log-probabilities",
        "posttrain.reference.path",
        base="pairs",
    ),
    Refusal(
        "pairs that are weighed by scores that they lack",
        (*MEDIA_PAIRS, *WEIGHED),
        "the rows have no scores",
        "posttrain.dpo.weight_alpha",
        DATA,
        lambda folder: (with_rows(without_scores)(folder), with_scores_up_to(folder, 1.0)),
        base="media pairs",
    ),
    Refusal(
        "pairs whose scores lie outside",
        (*MEDIA_PAIRS, *WEIGHED),
        "lies in none of its bins (0 to 0.5)",
        "posttrain.dpo.histogram_path",
        DATA,
        lambda folder: with_scores_up_to(folder, 0.5),
        base="media pairs",
    ),
    Refusal(
        "an empty answer",
        (),
        "the answer is empty",
        "rejected",
        DATA,
        with_rows(lambda row: row.update(rejected={"role": "assistant", "content": ""})),
        by_data_check=True,
        base="pairs",
    ),
)
ANSWERS = (
    Refusal(
        "rewards of a data set of media",
        ("posttrain.method=nft", *rewarded("jpeg_size"), "training.gradient_accumulation_steps=8"),
        "draws from prompts, and its rows are none for a generator model",
        "data.dataset_param.dataset_type",
        base="flux",
    ),
    Refusal(
        "a reward of pictures for answers to speech",
        ("data.dataset_param.dataset_type=qwen3_asr", *rewarded("jpeg_size")),
        "does not judge texts",
        "posttrain.rewards",
        base="answers",
    ),
    Refusal(
        "a server for a model without a folder",
        (
            *("posttrain.rollout.backend=vllm", "posttrain.rollout.base_url=http://127.0.0.1:9"),
            *("training.save={folder}/run", "model.model_name_or_path=null", "model.model_id=qwen3_vl"),
            f"{PREPROCESS}.model_name_or_path={{folder}}/model",
        ),
        "is not given, but posttrain.rollout.backend is vllm",
        "model.model_name_or_path",
        base="answers",
    ),
    Refusal(
        "a profile of steps behind the last rollout",
        ("tools.profile.enable=true", f"{STATIC}.start_step=40", f"{STATIC}.end_step=41"),
        "the run ends after step",
        f"{STATIC}.start_step",
        base="answers",
    ),
    Refusal(
        "no regular expression",
        ('posttrain.rewards=[{name: regex, settings: {pattern: "("}}]',),
        "is no regular expression",
        "posttrain.rewards",
        base="answers",
    ),
    Refusal("a reward of pictures", rewarded("jpeg_size"), "does not judge texts", "posttrain.rewards", base="answers"),
    Refusal(
        "prompts without a solution",
        rewarded("exact_match"),
        "has no solution, which the reward 'exact_match'",
        "solution",
        DATA,
        with_rows(without_the_answer),
        base="answers",
    ),
    Refusal(
        "fewer rows than a rollout takes",
        ("posttrain.grpo.steps_per_generation=25",),
        "the prompts of 25 steps",
        "posttrain.grpo.steps_per_generation",
        DATA,
        base="answers",
    ),
)
MORE_PAIRS = (
    Refusal(
        "a weight that unlearns",
        ("posttrain.dpo.loss_weights=[-1]",),
        "-1",
        "posttrain.dpo.loss_weights",
        base="pairs",
    ),
    Refusal(
        "weights of nothing",
        ("posttrain.dpo.loss_weights=[0]",),
        "are all 0",
        "posttrain.dpo.loss_weights",
        base="pairs",
    ),
    Refusal("pairs in a row", (f"{BASIC}.packing=true",), "each in a row of its own", f"{BASIC}.packing", base="pairs"),
    Refusal(
        "dropout of the model",
        (),
        "has a dropout of 0.1",
        "posttrain.method",
        spoil=with_config(attention_dropout=0.1),
        base="pairs",
    ),
    Refusal(
        "dropout of adapters",
        (*LORA, "training.lora.dropout=0.1"),
        "which dropout would change",
        "training.lora.dropout",
        base="pairs",
    ),
    Refusal(
        "a reference that adapters have moved",
        (*LORA, "training.lora.init_lora_weights=pissa", "posttrain.reference.kind=adapters_off"),
        "moves the base model",
        "posttrain.reference.kind",
        base="pairs",
    ),
    Refusal(
        "answers that are the same",
        (),
        "are the same",
        "rejected",
        DATA,
        with_rows(lambda row: row.update(rejected=row["chosen"])),
        by_data_check=True,
        base="pairs",
    ),
    Refusal(
        "pairs without a rejected answer",
        ("data.dataloader_param.shuffle=false",),
        "rejected",
        "rejected",
        DATA,
        with_first_row(rejected=None),
        by_data_check=True,
        base="pairs",
    ),
    Refusal(
        "pairs that nothing compares", ("posttrain.method=null",), "does not compare", f"{BASIC}.stage", base="pairs"
    ),
    Refusal(
        "pairs as prompts",
        ("posttrain.method=grpo", *rewarded("json")),
        "does not compare",
        f"{BASIC}.stage",
        base="pairs",
    ),
)
MORE_ANSWERS = (
    Refusal("an unknown reward", rewarded("jason"), "'jason' is not registered", "posttrain.rewards", base="answers"),
    Refusal("a reward without its setting", rewarded("length"), "max_tokens", "posttrain.rewards", base="answers"),
    Refusal(
        "a reward of no address",
        ("posttrain.rewards=[{name: json}, {name: http, settings: {url: localhost}}]",),
        "is not an http address",
        "posttrain.rewards[1].settings.url",
        base="answers",
    ),
    Refusal(
        "a server of a reward that is not there",
        ('posttrain.rewards=[{name: http, settings: {url: "http://127.0.0.1:9"}}]',),
        "the server of the reward 'http' cannot be reached",
        "posttrain.rewards[0].settings.url",
        ENVIRONMENT,
        base="answers",
    ),
    Refusal("no reward", ("posttrain.rewards=[]",), "learns from rewards", "posttrain.rewards", base="answers"),
    Refusal(
        "rewards without weight",
        ("posttrain.rewards=[{name: json, weight: 0}]",),
        "nothing is learnt",
        "posttrain.rewards",
        base="answers",
    ),
    Refusal(
        "one sample",
        ("posttrain.grpo.num_generations=1",),
        "compared with each other",
        "posttrain.grpo.num_generations",
        base="answers",
    ),
    Refusal(
        "half a group",
        ("posttrain.grpo.num_generations=3",),
        "do not fit the 2 samples",
        "posttrain.grpo.num_generations",
        base="answers",
    ),
    Refusal(
        "samples that do not differ",
        ("posttrain.rollout.temperature=0",),
        "nothing is learnt",
        "posttrain.rollout.temperature",
        base="answers",
    ),
    Refusal(
        "no room for an answer",
        ("posttrain.rollout.max_completion_length=100000",),
        "and the model takes",
        "posttrain.rollout.max_completion_length",
        DATA,
        base="answers",
    ),
    Refusal(
        "a server without an address",
        ("posttrain.rollout.backend=vllm", "posttrain.rollout.base_url=host:8000", "training.save={folder}/run"),
        "is no http address",
        "posttrain.rollout.base_url",
        base="answers",
    ),
    Refusal(
        "a server that samples ahead",
        ("posttrain.rollout.ahead=1",),
        "the model that trains also samples",
        "posttrain.rollout.ahead",
        base="answers",
    ),
    Refusal(
        "weights that are sent",
        ("posttrain.rollout.weight_sync=nccl",),
        "does not have",
        "posttrain.rollout.weight_sync",
        base="answers",
    ),
    Refusal(
        "answers in a row", (f"{BASIC}.packing=true",), "each in a row of its own", f"{BASIC}.packing", base="answers"
    ),
    Refusal(
        "a reference for a divergence that is not there",
        ("posttrain.grpo.beta=0.1", *ITS_OWN),
        "other'",
        REFERENCE,
        DATA,
        base="answers",
    ),
)
