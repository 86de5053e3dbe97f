"""Refusals of rows, of how they are sampled, mixed and streamed, and of chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers.refusal import BASIC, DATA, LOADER, PREPROCESS, Refusal, with_file, with_first_row, without_file

IN_ORDER = f"{LOADER}.shuffle=false"
STREAMED = f"{BASIC}.streaming=true"
TWO_FILES = f"{BASIC}.dataset=['{{folder}}/rows.jsonl','{{folder}}/more.jsonl']"
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'


def with_more_rows(folder: Path) -> None:
    """A second file."""
    shutil.copy(folder / "rows.jsonl", folder / "more.jsonl")


def with_turns(*messages: dict[str, object], **others: object):
    """A first row of text."""
    return with_first_row(messages=list(messages), images=[], **others)


def without_ends(folder: Path) -> None:
    """A chat template without end marks, and a tokenizer without end token."""
    written = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(written)
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


def with_index(**changes: object):
    """Another model_index.json."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / "model_index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


ORDERS = (
    Refusal(
        "shares of another data set",
        (TWO_FILES, f"{BASIC}.mix={{weights: {{rows: 1}}}}"),
        "'rows' is not an entry of dataset",
        f"{BASIC}.mix.weights.rows",
        spoil=with_more_rows,
    ),
    Refusal(
        "a file named twice",
        (f"{BASIC}.dataset=['{{folder}}/rows.jsonl','{{folder}}/rows.jsonl']",),
        "is named twice",
        f"{BASIC}.dataset",
    ),
    Refusal(
        "epochs of a stream", (STREAMED, "training.train_epochs=1"), "epochs cannot be counted", "training.train_epochs"
    ),
    Refusal(
        "a stream without a length",
        (STREAMED, "training.train_iters=null"),
        "say how long the run is",
        "training.train_iters",
    ),
    Refusal(
        "a stream encoded up front",
        (STREAMED, f"{BASIC}.preprocess_on_fly=false"),
        "are not known before they are read",
        f"{BASIC}.preprocess_on_fly",
    ),
    Refusal(
        "a share of a stream",
        (STREAMED, f"{BASIC}.val_rate=0.2", "training.val_interval=2"),
        "streamed rows cannot be held out",
        f"{BASIC}.val_rate",
    ),
    Refusal(
        "two sources of validation",
        (f"{BASIC}.val_rate=0.2", f"{BASIC}.val_dataset={{folder}}/rows.jsonl"),
        "is given together with",
        f"{BASIC}.val_dataset",
    ),
    Refusal(
        "prompts beside the last answer only",
        (f"{BASIC}.train_on_prompt=true", f"{BASIC}.mask_history=true"),
        "mask_history trains on the last answer only",
        f"{BASIC}.train_on_prompt",
    ),
    Refusal(
        "patches without a limit",
        (f"{LOADER}.max_patches_per_batch=64",),
        "whatever they hold, keep no limit",
        f"{LOADER}.max_patches_per_batch",
    ),
    Refusal("pairs", ("data.dataset_param.attr.ranking=true",), "rows are preference pairs", f"{BASIC}.stage"),
    Refusal("pairs that nobody compares", (f"{BASIC}.stage=rm",), "does not compare them", f"{BASIC}.stage"),
    Refusal("no pairs to compare", ("posttrain.method=dpo",), "dpo compares two", f"{BASIC}.stage"),
    Refusal(
        "a cache in a file",
        (f"{BASIC}.preprocess_on_fly=false", f"{BASIC}.cache_dir={{folder}}/rows.jsonl"),
        "is a file, not a folder",
        f"{BASIC}.cache_dir",
    ),
)

FILES = (
    Refusal("an empty file", (), "the file is empty", "", DATA, with_file("rows.jsonl", "")),
    Refusal("no rows named", (f"{BASIC}.dataset=null",), "no data set is named", f"{BASIC}.dataset"),
    Refusal("rows of broken JSON", (), "broken JSON", "", DATA, with_file("rows.jsonl", '{"a": \n')),
    Refusal(
        "rows that are numbers", (), "the row is a number, not an object", "", DATA, with_file("rows.jsonl", "3\n")
    ),
    Refusal(
        "a file that nobody reads",
        (f"{BASIC}.dataset={{folder}}/rows.txt",),
        "'.txt' files are not read",
        "",
        DATA,
        with_file("rows.txt", "x"),
    ),
    Refusal(
        "a folder without rows",
        (f"{BASIC}.dataset={{folder}}/images",),
        "the folder holds no",
        f"{BASIC}.dataset",
        DATA,
    ),
    Refusal(
        "another column of turns", ("data.dataset_param.attr.messages=turns",), "the field is missing", "turns", DATA
    ),
    Refusal(
        "another template that does not exist",
        (f"{BASIC}.chat_template={{folder}}/none.jinja",),
        "does not exist",
        f"{BASIC}.chat_template",
        DATA,
    ),
    Refusal(
        "another template that is not Jinja",
        (f"{BASIC}.chat_template={{folder}}/x.jinja",),
        "is not valid jinja",
        "",
        DATA,
        with_file("x.jinja", "{% if %}"),
    ),
    Refusal(
        "no template",
        (),
        "has no chat template",
        f"{BASIC}.template",
        DATA,
        without_file("model/chat_template.jinja"),
        base="text",
    ),
    Refusal("turns without an end", (), "no end token", "eos_token", DATA, without_ends, base="text"),
    Refusal(
        "no tokenizer",
        (),
        "the tokenizer has no vocabulary",
        "",
        DATA,
        without_file("model/tokenizer.json"),
        base="text",
    ),
)

TURNS = (
    Refusal("no answer", (IN_ORDER,), "no trainable token", "messages", DATA, with_turns(ASKED)),
    Refusal(
        "an answer that counts nothing",
        (IN_ORDER,),
        "no trainable token",
        "labels",
        DATA,
        with_turns(ASKED, SAID | {"weight": 0}),
    ),
    Refusal(
        "fractions of the model's own loss",
        (IN_ORDER, "features.loss_cfg.loss_type=raw"),
        "the model's own loss takes none",
        "features.loss_cfg.loss_type",
        spoil=with_turns(ASKED, SAID | {"weight": 0.5}),
    ),
    Refusal(
        "a role that nobody has", (IN_ORDER,), "unknown role 'usr'", "", DATA, with_turns(ASKED | {"role": "usr"}, SAID)
    ),
    Refusal("answers alone", (IN_ORDER,), "no turn of the user", "messages", DATA, with_turns(SAID, SAID)),
    Refusal(
        "a result that nobody called for",
        (IN_ORDER,),
        "follows the turn of the user",
        "message 1",
        DATA,
        with_turns(ASKED, {"role": "tool", "content": "1"}, SAID),
    ),
    Refusal(
        "tools that the template does not write",
        (IN_ORDER, "data.dataset_param.attr.tools=tools"),
        "the chat template does not write any",
        f"{BASIC}.chat_template",
        DATA,
        with_turns(ASKED, SAID, tools=TOOLS),
    ),
    Refusal(
        "a picture that is none", (IN_ORDER,), "is not an image", "images", DATA, with_file("images/0_0.png", "no")
    ),
)

SIZES_OF_MEDIA = (
    Refusal(
        "a side that a VAE cannot encode",
        (f"{PREPROCESS}.height=15",),
        "cannot be encoded",
        f"{PREPROCESS}.height",
        base="flux",
    ),
    Refusal(
        "frames that a VAE cannot encode",
        (f"{PREPROCESS}.num_frames=4",),
        "cannot be encoded",
        f"{PREPROCESS}.num_frames",
        base="t2v",
    ),
    Refusal(
        "a bucket that a VAE cannot encode",
        (f"{PREPROCESS}.width=null", f"{PREPROCESS}.height=null", f"{PREPROCESS}.buckets=[15x16]"),
        "cannot be encoded",
        f"{PREPROCESS}.buckets",
        base="flux",
    ),
    Refusal(
        "one of Wan2.2's two transformers",
        (),
        "Wan2.2 A14B has two transformers",
        "transformer_2",
        DATA,
        with_index(boundary_ratio=0.9),
        base="t2v",
    ),
    Refusal(
        "a pipeline of another family",
        (),
        "is not a pipeline of",
        "_class_name",
        DATA,
        with_index(_class_name="WanPipeline"),
        base="flux",
    ),
    Refusal(
        "a budget without a number",
        (f"{LOADER}.sampler_type=TokenBudgetSampler",),
        "has no budget",
        f"{LOADER}.max_tokens_per_batch",
        base="flux",
    ),
    Refusal(
        "a budget below a sample",
        (f"{LOADER}.sampler_type=TokenBudgetSampler", f"{LOADER}.max_tokens_per_batch=2"),
        "a sample of 16×16 has 16 tokens, more than 2",
        f"{LOADER}.max_tokens_per_batch",
        base="flux",
    ),
    Refusal(
        "pictures enlarged beyond the limit",
        (f"{PREPROCESS}.max_enlargement=1", f"{PREPROCESS}.height=64", f"{PREPROCESS}.width=64"),
        "it would be enlarged 4 times",
        f"{PREPROCESS}.max_enlargement",
        DATA,
        base="flux",
    ),
    Refusal("a caption of null", (), "is null", "cap", DATA, with_first_row(cap=None), base="flux"),
)
