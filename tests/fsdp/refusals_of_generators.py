"""Refusals of image and video generators: their folders, rows, sizes, features, samples and plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from tests.helpers.refusal import BASIC, DATA, LOADER, LORA, PREPROCESS, Refusal, with_file, with_first_row
from tests.helpers.tiny_generators import TEXT_WIDTH

SAMPLING = "training.sampling"
SAMPLES = (f"{SAMPLING}.interval=2", "training.save={folder}/run")


def without_folder(name: str):
    """A part of the model that is listed and not there."""
    return lambda folder: shutil.rmtree(folder / name)


def with_transformer(**changes: object):
    """Other settings of the transformer than its weights have."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / "transformer" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def with_older_features(folder: Path) -> None:
    """Features of the layout that has no empty caption."""
    (folder / "older").mkdir()
    lines = []
    for number in range(4):
        name = f"{number}.pt"
        text = {"prompt_ids": torch.zeros(1, 3, TEXT_WIDTH), "prompt_mask": torch.ones(1, 3)}
        torch.save({"video": torch.zeros(16, 2, 2, 2), **text}, folder / "older" / name)
        lines.append(json.dumps({"file": name, "cap": "a box"}) + "\n")
    (folder / "older" / "data.jsonl").write_text("".join(lines))


def with_prompts(folder: Path) -> None:
    """Prompts instead of clips, of which no frames are taken."""
    with_file("prompts.txt", "a box\n")(folder)
    yaml = folder / "run.yaml"
    yaml.write_text(yaml.read_text().replace("frame_interval: 1", ""))


GENERATORS = (
    Refusal(
        "rewards of a model that goes on from pictures",
        (
            "posttrain.method=grpo",
            "posttrain.rewards=[{name: jpeg_size}]",
            "training.gradient_accumulation_steps=8",
            "data.dataset_param.dataset_type=generation_prompts",
            f"{BASIC}.dataset={{folder}}/prompts.txt",
        ),
        "'i2v' goes on from media",
        "model.task",
        spoil=with_prompts,
        base="i2v",
    ),
    Refusal(
        "no index",
        (),
        "model_index.json",
        "model.model_name_or_path",
        DATA,
        lambda f: (f / "model" / "model_index.json").unlink(),
        base="flux",
    ),
    Refusal("an id of another kind", ("model.model_id=qwen3_vl",), "is not a generator", "model.model_id", base="flux"),
    Refusal(
        "a transformer that no family has",
        (),
        "which no family here has",
        "transformer",
        DATA,
        lambda f: (f / "model" / "model_index.json").write_text(
            json.dumps(
                json.loads((f / "model" / "model_index.json").read_text())
                | {"transformer": ["diffusers", "NoTransformer"]}
            )
        ),
        base="flux",
    ),
    Refusal(
        "an encoder that does not exist",
        (),
        "text_encoder",
        "",
        DATA,
        without_folder("model/text_encoder"),
        base="flux",
    ),
    Refusal("no VAE", (), "vae", "", DATA, without_folder("model/vae"), base="flux"),
    Refusal(
        "a setting that the transformer lacks",
        ("model.transformer={colour: 2}",),
        "has no such setting",
        "model.transformer.colour",
        base="flux",
    ),
    Refusal(
        "a stored setting that the transformer lacks",
        (),
        "knows no such setting",
        "colour",
        DATA,
        with_transformer(colour=2),
        base="flux",
    ),
    Refusal(
        "a transformer that does not fit its encoders",
        ("model.transformer={in_channels: 20}", "model.train_from_scratch=true"),
        "asks for",
        "",
        DATA,
        base="flux",
    ),
    Refusal(
        "weights of another depth", (), "missing in the folder", "", DATA, with_transformer(num_layers=3), base="flux"
    ),
    Refusal(
        "a loss of language models",
        ("features.loss_cfg.loss_type=token_mean",),
        "token_mean",
        "features.loss_cfg.loss_type",
        base="flux",
    ),
    Refusal(
        "a loss that generators have none of",
        ("features.loss_cfg.loss_type=per_token_loss",),
        "is a loss of language models",
        "features.loss_cfg.loss_type",
        base="flux",
    ),
    Refusal(
        "further tokens of a generator",
        ("model.mtp_num_layers=1",),
        "a generator predicts no tokens",
        "model.mtp_num_layers",
        base="flux",
    ),
    Refusal(
        "adapters and whole layers",
        (*LORA, "training.lora.target_modules=[to_q]", "training.lora.modules_to_save=[proj_out]"),
        "load adapters only",
        "training.lora.modules_to_save",
        base="flux",
    ),
    Refusal(
        "slices of a head that does not exist",
        ("features.enable_chunk_loss=true",),
        "head",
        "features.enable_chunk_loss",
        base="flux",
    ),
    Refusal("packing of pictures", (f"{BASIC}.packing=true",), "packing", f"{BASIC}.packing", base="flux"),
    Refusal("pictures for a model of language", ("data.dataset_param.dataset_type=generation",), "", "", DATA),
)

LARGER = (
    f"{LOADER}.max_tokens_per_batch=32",
    "training.val_interval=1",
    "data.val_dataset_param={dataset_type: generation, preprocess_parameters: {height: 32, width: 32}, "
    "basic_parameters: {dataset: '{folder}/rows.jsonl', dataset_dir: '{folder}'}}",
)
MEDIA = (
    Refusal(
        "captions that are dropped where features hold no empty one",
        (f"{BASIC}.features_dir={{folder}}/older", f"{BASIC}.dataset=null"),
        "the features hold no empty caption",
        "training.diffusion.caption_dropout",
        spoil=with_older_features,
        base="t2v",
    ),
    Refusal(
        "held-out samples that are larger than a batch",
        LARGER,
        "has 64 tokens, more than 32",
        f"{LOADER}.max_tokens_per_batch",
        base="flux",
    ),
    Refusal(
        "one side of a size",
        (f"{PREPROCESS}.width=null",),
        "only one side is given",
        f"{PREPROCESS}.width",
        base="flux",
    ),
    Refusal(
        "no size",
        (f"{PREPROCESS}.width=null", f"{PREPROCESS}.height=null"),
        "there is no size",
        f"{PREPROCESS}.height",
        base="flux",
    ),
    Refusal(
        "sizes of two kinds",
        (f"{PREPROCESS}.max_pixels=256",),
        "is given beside",
        f"{PREPROCESS}.max_pixels",
        base="flux",
    ),
    Refusal(
        "sizes beside a size",
        (f"{PREPROCESS}.buckets=[16x16]",),
        "is given beside",
        f"{PREPROCESS}.buckets",
        base="flux",
    ),
    Refusal("a size that is none", (f"{PREPROCESS}.height=tall",), "tall", f"{PREPROCESS}.height", base="flux"),
    Refusal(
        "frames of two rates",
        (f"{PREPROCESS}.fps=4", f"{PREPROCESS}.frame_interval=2"),
        "is given beside fps",
        f"{PREPROCESS}.frame_interval",
        base="t2v",
    ),
    Refusal(
        "a picture that does not exist",
        (f"{LOADER}.shuffle=false",),
        "no.png",
        "",
        DATA,
        with_first_row(path="no.png"),
        base="flux",
        by_data_check=True,
    ),
    Refusal(
        "a row without a caption",
        (),
        "caption",
        "",
        DATA,
        with_file("rows.jsonl", '{"path": "pictures/0.png"}\n'),
        base="flux",
        by_data_check=True,
    ),
    Refusal(
        "a row without a medium",
        (),
        "medium",
        "",
        DATA,
        with_file("rows.jsonl", '{"cap": "a box"}\n'),
        base="flux",
        by_data_check=True,
    ),
    Refusal(
        "a column that does not exist",
        (f"{BASIC}.caption_column=words",),
        "words",
        "",
        DATA,
        base="flux",
        by_data_check=True,
    ),
    Refusal(
        "no rows of pictures",
        (f"{BASIC}.dataset={{folder}}/none.jsonl",),
        "none.jsonl",
        f"{BASIC}.dataset",
        DATA,
        base="flux",
    ),
    Refusal(
        "a folder of pictures that does not exist",
        (f"{BASIC}.dataset_dir={{folder}}/none",),
        "none",
        f"{BASIC}.dataset_dir",
        DATA,
        base="flux",
        by_data_check=True,
    ),
    Refusal(
        "an empty folder of features",
        (f"{BASIC}.features_dir={{folder}}/pictures",),
        "features",
        f"{BASIC}.features_dir",
        DATA,
        base="flux",
    ),
)
