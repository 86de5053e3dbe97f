"""Refusals of tokens that are added to a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.refusal import DATA, LORA, PREPROCESS, Refusal
from tests.helpers.tiny_models import SPECIAL_TOKENS, build_tokenizer

KEY, SPECIAL = "model.add_tokens", "model.add_special_tokens"
ADDED = f"{KEY}=[<think>]"


def with_other_tokenizer(folder: Path) -> None:
    """A processor of another folder, whose tokenizer has one token more."""
    tokenizer = build_tokenizer(SPECIAL_TOKENS)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(folder / "other")


def without_fast_tokenizer(folder: Path) -> None:
    """A tokenizer that has no class of the tokenizers library: characters, by Python."""
    model = folder / "model"
    (model / "tokenizer.json").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in config.items() if name in ("eos_token", "pad_token", "model_max_length")}
    (model / "tokenizer_config.json").write_text(json.dumps({**kept, "tokenizer_class": "ByT5Tokenizer"}))


TOKENS = (
    Refusal(
        "tokens of a generator",
        (ADDED,),
        "a generator is trained on the embeddings of its frozen text encoders",
        KEY,
        base="flux",
    ),
    Refusal(
        "a frozen embedding",
        (ADDED, "model.freeze=[model.embed_tokens]"),
        "the rows of new tokens in it",
        "model.freeze",
        base="text",
    ),
)
MORE_TOKENS = (
    Refusal("a token twice", (f"{KEY}=[a, a]",), "'a' is listed 2 times", KEY),
    Refusal("a token of nothing", (f"{KEY}=[' ']",), "is empty", KEY),
    Refusal("a number for a token", (f"{KEY}=[1]",), "1 is not a text", KEY),
    Refusal("a file of tokens that is not there", (f"{KEY}=none.txt",), "'none.txt'", KEY),
    Refusal("a token under both keys", (ADDED, f"{SPECIAL}=[<think>]"), "also listed in model.add_tokens", SPECIAL),
    Refusal(
        "an adapter on the head",
        (*LORA, ADDED, "training.lora.target_modules=[q_proj, lm_head]"),
        "its rows of new tokens",
        "training.lora.target_modules",
        base="text",
    ),
    Refusal(
        "another tokenizer",
        (ADDED, f"{PREPROCESS}.model_name_or_path={{folder}}/other"),
        "gives '<think>' the number 321",
        KEY,
        DATA,
        with_other_tokenizer,
        base="text",
    ),
    Refusal(
        "a tokenizer without a file for them",
        (ADDED,),
        "has no tokenizer.json",
        KEY,
        DATA,
        without_fast_tokenizer,
        base="text",
    ),
    Refusal("heads for further tokens", (ADDED, "model.mtp_num_layers=1"), "number of rows", "model.mtp_num_layers"),
    Refusal(
        "a server without the rows",
        (
            ADDED,
            "posttrain.rollout.backend=vllm",
            "posttrain.rollout.base_url=http://localhost:1",
            "training.save={folder}/save",
        ),
        "the server's model has no rows for new tokens",
        "posttrain.rollout.base_url",
        base="answers",
    ),
)
