"""The README.md of an exported model: what it was trained from, on what, how, and how it scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.choice import best_of
from mindspeed_mm.checkpoint.original.lora_names import UNREAD_BY_DIFFUSERS
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.core.artifacts import RunFolder, read_jsonl
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.json_file import parse_json, read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR_INDEX, kind_of_folder
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.data.data_utils.training_view import read_view
from mindspeed_mm.fsdp.models.added_tokens import rows_for, rows_of_folder
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_PREFIX, DIFFUSERS_WEIGHTS, AdapterFile
from mindspeed_mm.fsdp.params.cards import has_own_class
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain
from mindspeed_mm.tasks.export.contents import ContentKind

_SETTINGS = {
    "training.lr": "learning rate",
    "training.lr_decay_style": "schedule",
    "training.lr_warmup_ratio": "warm-up share",
    "training.weight_decay": "weight decay",
    "training.clip_grad": "gradient clipping",
    "training.seed": "seed",
    "parallel.fsdp_plan.param_dtype": "computed in",
    "model.freeze": "frozen",
}
_TEXT_SETTINGS = {"data.dataset_param.basic_parameters.cutoff_len": "longest sample, tokens"}
_LORA_SETTINGS = {
    "training.lora.rank": "rank of the adapters",
    "training.lora.alpha": "alpha of the adapters",
    "training.lora.dropout": "dropout before the adapters",
}

Values = Mapping[str, Any]
"""What a run's files tell, by name."""


def write_model_card(
    folder: Path,
    run: RunFolder | None,
    step: int | None,
    model_folder: Path,
    *,
    title: str,
    kind: ContentKind = "model",
) -> None:
    """Write `README.md` into `folder` from what the run folder tells.

    Args:
        folder: Where to.
        run: None when only a checkpoint is known; the card then says no more than its origin.
        step: Of the checkpoint.
        model_folder: What the run started from; only its name is told.
        title: Headline.
        kind: What the folder holds.
    """
    use = usage_of(kind, folder, model_folder)
    config = _flat_config(run)
    record = _json_object(run.run_json) if run else {}
    sections = [
        _front_matter(use, model_folder, is_adapter=kind == "adapters"),
        f"# {title}",
        _origin_words(config, step, model_folder),
        "\n".join(["```python", *use.code, "```"]),
        _view(folder),
        _data_section(config, record),
        _settings(config, record, step, has_tokens=kind_of_folder(model_folder).has_tokens),
        _numbers(run, step),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in sections if part) + "\n", encoding="utf-8")


def _front_matter(use: Usage, model_folder: Path, *, is_adapter: bool) -> str:
    lines = [
        "---",
        f"library_name: {use.library}",
        f"pipeline_tag: {use.tag}",
        f"base_model: {model_folder.name}",
        "tags:",
        "- mindspeed-mm",
    ]
    if is_adapter:
        lines.append("- lora")
    return "\n".join([*lines, "---"])


def _origin_words(config: Values, step: int | None, model_folder: Path) -> str:
    how = "Trained from scratch in the shape of" if config.get("model.train_from_scratch") else "Fine-tuned from"
    after = f", {step:,} steps" if step is not None else ""
    return f"{how} `{model_folder.name}`{after}, with mindspeed-mm {__version__}."


def _data_section(config: Values, record: Values) -> str:
    files = config.get("data.dataset_param.basic_parameters.dataset")
    if not files:
        return ""
    paths = files if isinstance(files, list) else str(files).split(",")
    parts = [f"`{Path(str(path).strip()).name}`" for path in paths]
    rows = (record.get("dataset") or {}).get("rows")
    if isinstance(rows, int):
        parts.append(f"{rows:,} rows")
    return f"## Data\n\n{', '.join(parts)}."


def _settings(config: Values, record: Values, step: int | None, *, has_tokens: bool) -> str:
    if not config:
        return ""
    labels = dict(_SETTINGS)
    if has_tokens:
        labels |= _TEXT_SETTINGS
    if config.get("training.lora.enable"):
        labels |= _LORA_SETTINGS
    values = {"steps": step, "samples a step": record.get("global_batch"), "ranks": record.get("world_size")}
    for key, label in labels.items():
        values[label] = config.get(key)
    rows = []
    for label, value in values.items():
        if value not in (None, [], ""):
            rows.append((label, _plain(value)))
    return _table("Training", ("setting", "value"), rows)


def _numbers(run: RunFolder | None, step: int | None) -> str:
    if run is None:
        return ""
    rows = [(name, f"{value:.4f}", f"step {at:,}") for name, (value, at) in _losses(run, step).items()]
    results: Values = {}
    if _is_evaluated(run, step):
        results = _json_object(run.evaluation / "results.json")
    measure = results.get("measure", "accuracy")
    for name, score in (results.get("tasks") or {}).items():
        interval = f"95 % interval {100 * score['low']:.1f} to {100 * score['high']:.1f} %"
        share = score["rate"] if "rate" in score else score["accuracy"]
        rows.append((f"{measure}, {name}", f"{100 * share:.1f} %", f"n={score['n']:,}, {interval}"))
    if not rows:
        return ""
    return _table("Numbers", ("what", "value", "where"), rows)


def _losses(run: RunFolder, step: int | None) -> dict[str, tuple[float, int]]:
    """The last training and validation loss up to `step`: name → (value, step)."""
    names = {"loss": "training loss", "val_loss": "validation loss"}
    found: dict[str, tuple[float, int]] = {}
    for record in read_jsonl(run.metrics):
        at = record.get("step")
        if not isinstance(at, int) or (step is not None and at > step):
            continue
        for key, name in names.items():
            if isinstance(record.get(key), int | float):
                found[name] = (float(record[key]), at)
    return found


def _is_evaluated(run: RunFolder, step: int | None) -> bool:
    """Whether scores in the run folder, which are those of its best checkpoint, else of its newest, are those of
    `step`."""
    best = best_of(run.path)
    if best is not None:
        return step == best[0]
    newest = 0
    for record in read_jsonl(run.metrics):
        if isinstance(record.get("step"), int):
            newest = max(newest, record["step"])
    return step is not None and step >= newest


_VIEW_WORDS = {
    "image_max_pixels": "shrink larger images to this many pixels (Pillow, bicubic)",
    "image_min_pixels": "enlarge smaller images to this many pixels (Pillow, bicubic)",
    "video_max_pixels": "shrink larger frames to this many pixels (Pillow, bicubic)",
    "video_min_pixels": "enlarge smaller frames to this many pixels (Pillow, bicubic)",
    "video_fps": "take this many frames per second, spread evenly from first to last, and pass do_sample_frames=False",
    "video_maxlen": "take at most this many frames",
    "image_do_pan_and_scan": "pass images_kwargs={'do_pan_and_scan': ...}",
    "use_audio_in_video": "pass load_audio_from_video",
    "audio_sampling_rate": "resample audio to this rate",
}


def _view(folder: Path) -> str:
    """What a script of somebody's own has to do before it calls the processor; nothing where that does it all."""
    view = read_view(folder)
    given = view.get("preprocess_parameters", {})
    steps = []
    for key, words in _VIEW_WORDS.items():
        if key in given:
            steps.append(f"- {key} {given[key]}: {words}")
    if not steps:
        return ""
    head = "Training prepared media like this. Where the processor has no setting for a step, do it before the call:"
    return "\n".join(["## Media", "", head, "", *steps])


def _flat_config(run: RunFolder | None) -> dict[str, object]:
    """The run's resolved configuration by dotted key; empty when it is not there or damaged."""
    if run is None or not run.resolved.exists():
        return {}
    try:
        content = plain(parse_yaml(read_config_text(run.resolved), str(run.resolved)).root)
    except ConfigError:
        return {}
    if isinstance(content, dict):
        return _flat(content)
    return {}


def _flat(values: Values, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"## {title}", "", *lines])


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number:
        return f"{value:,}"
    return str(value)


def _json_object(path: Path) -> dict[str, object]:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


# --- use --------------------------------------------------------------------------------------------------------------
# How an exported folder is used: what its card says to the hub and to whoever writes the first line of Python.

_HERE = "path/to/this/folder"
_TAGS = {"Image": "text-to-image", "Video": "text-to-video", "ImageToVideo": "image-to-video"}


@dataclass(frozen=True)
class Usage:
    """The part of a model card that depends on what the folder holds."""

    library: str
    """`library_name` of the hub."""
    tag: str
    """`pipeline_tag` of the hub."""
    code: tuple[str, ...]
    """Lines of Python that load it."""


def usage_of(kind: ContentKind, folder: Path, model_folder: Path) -> Usage:
    """How to use what was written.

    Args:
        kind: Of content.
        folder: What was written.
        model_folder: What the run started from.
    """
    if kind_of_folder(model_folder).library == "diffusers":
        return _of_generator(kind, folder, model_folder)
    whole = _of_model(folder if kind == "model" else model_folder)
    if kind == "model":
        return whole
    base = f"path/to/{model_folder.name}"
    code = [line.replace(_HERE, base) for line in whole.code]
    adapted = [*_rows_of_tokens(folder, model_folder), f'model = PeftModel.from_pretrained(model, "{_HERE}")']
    return Usage("peft", whole.tag, ("from peft import PeftModel", *code[:-1], *adapted, code[-1]))


def _rows_of_tokens(folder: Path, model_folder: Path) -> list[str]:
    """What makes room in the base for tokens that were added to it."""
    tokens = AdapterFile.find(folder).adapter().tokens
    ids = sorted({row for each in tokens.values() for row in each.rows})
    before = rows_of_folder(model_folder) if ids else None
    if before is None or (rows := rows_for(before, ids)) == before:
        return []
    return [f"model.resize_token_embeddings({rows})  # tokens were added; their tokenizer is in this folder"]


def _of_model(folder: Path) -> Usage:
    is_multimodal = any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json"))
    if is_multimodal:
        tag, classes = "image-text-to-text", ("AutoModelForImageTextToText", "AutoProcessor", "processor")
    else:
        tag, classes = "text-generation", ("AutoModelForCausalLM", "AutoTokenizer", "tokenizer")
    model_class, processor_class, name = classes
    code = (
        f"from transformers import {model_class}, {processor_class}",
        "",
        f'model = {model_class}.from_pretrained("{_HERE}")',
        f'{name} = {processor_class}.from_pretrained("{_HERE}")',
    )
    return Usage("transformers", tag, code)


def _of_generator(kind: ContentKind, folder: Path, model_folder: Path) -> Usage:
    index = read_json_object(model_folder / GENERATOR_INDEX, ModelFolderError)
    name, transformer = str(index.get("_class_name", "")), str((index.get("transformer") or ["", ""])[1])
    is_video, from_image = "Video" in name or "3D" in transformer, "ImageToVideo" in name
    made_kind = "Image"
    if is_video:
        made_kind = "ImageToVideo" if from_image else "Video"
    tag = _TAGS[made_kind]
    if has_own_class(transformer):
        return _of_own_generator(kind, tag, model_folder.name)
    base = f'DiffusionPipeline.from_pretrained("path/to/{model_folder.name}"'
    first = "from diffusers import DiffusionPipeline"
    is_pair = (index.get(EXPERT_PARTS[1]) or [None])[0] is not None
    parts = EXPERT_PARTS if is_pair else EXPERT_PARTS[:1]
    if kind == "transformer":
        made = [f'{part} = {transformer}.from_pretrained("{_HERE}/{part}")' for part in parts]
        given = ", ".join(f"{part}={part}" for part in parts)
        return Usage("diffusers", tag, (f"{first}, {transformer}", "", *made, f"pipeline = {base}, {given})"))
    if kind == "single_file":
        arguments = f'"{_HERE}/{{}}", config="path/to/{model_folder.name}", subfolder="transformer"'
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        lines = [f"transformer = {transformer}.from_single_file({arguments.format(file)})" for file in files]
        return Usage("diffusers", tag, (f"from diffusers import {transformer}", "", *lines))
    if kind == "adapters" and transformer in UNREAD_BY_DIFFUSERS and not _has_own_names(folder):
        return Usage("diffusers", tag, ("# ComfyUI loads this file; diffusers does not read its names.",))
    if kind == "adapters":
        loads = [f'pipeline.load_lora_weights("{_HERE}")']
        if not hasattr(diffusers_class(name), "load_lora_weights"):
            given = f'"{_HERE}", weight_name="{DIFFUSERS_WEIGHTS}", prefix="transformer"'
            loads = [f"pipeline.transformer.load_lora_adapter({given})"]
        if len(parts) > 1:
            loads = [
                f'pipeline.load_lora_weights("{_HERE}/transformer")',
                f'pipeline.load_lora_weights("{_HERE}/transformer_2", load_into_transformer_2=True)',
            ]
        return Usage("diffusers", tag, (first, "", f"pipeline = {base})", *loads))
    result = "frames" if is_video else "images"
    whole = f'pipeline = DiffusionPipeline.from_pretrained("{_HERE}")'
    image = "image, " if from_image else ""
    return Usage("diffusers", tag, (first, "", whole, f'result = pipeline({image}prompt="a caption").{result}[0]'))


def _of_own_generator(kind: ContentKind, tag: str, base: str) -> Usage:
    """Of a family that is written here."""
    first = "import mindspeed_mm as mm"
    if kind == "generator":
        return Usage("mindspeed-mm", tag, (first, "", f'mm.infer("{_HERE}", "a caption", out="samples")'))
    if kind == "adapters":
        call = f'mm.infer("path/to/{base}", "a caption", lora="{_HERE}", out="samples")'
        return Usage("mindspeed-mm", tag, (first, "", call))
    return Usage("mindspeed-mm", tag, (f"# These weights stand in transformer/ of path/to/{base}.",))


def _has_own_names(folder: Path) -> bool:
    """Whether adapters bear the names of diffusers."""
    return any(name.startswith(DIFFUSERS_PREFIX) for name in read_header(folder / DIFFUSERS_WEIGHTS))
