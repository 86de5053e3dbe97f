"""How an exported folder is used: what its card says to the hub and to whoever writes the first line of Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.checkpoint.original.lora_names import UNREAD_BY_DIFFUSERS
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR_INDEX, kind_of_folder
from mindspeed_mm.fsdp.models.added_tokens import rows_for, rows_of_folder
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_PREFIX, DIFFUSERS_WEIGHTS, AdapterFile
from mindspeed_mm.fsdp.params.cards import has_own_class
from mindspeed_mm.tasks.export.contents import ContentKind

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
