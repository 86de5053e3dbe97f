"""Which trainer a file or a command belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.params.other_tools import TOOLS, PeerTool, words_of
from mindspeed_mm.tasks.importing.given import Given

_MUSUBI = re.compile(
    r"(hv|hv_1_5|wan|fpack|flux_kontext|flux_2|qwen_image|zimage|kandinsky5|hidream_o1|ideogram4|krea2)_train\w*\.py"
)
_KOHYA = re.compile(
    r"((sdxl|sd3|flux|lumina|hunyuan_image|anima)_)?train(_network|_control_?net(_lllite)?(_old)?|_textual_inversion"
    r"(_XTI)?)?\.py|(fine_tune|train_db)\.py"
)
_DIFFUSERS = re.compile(
    r"train_(dreambooth|text_to_image|cogvideox|control|controlnet|instruct|lcm|unconditional|custom)\w*\.py"
)
_PROGRAMS: dict[str, str] = {
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "axolotl": "axolotl",
    "axolotl.cli.train": "axolotl",
    "trl": "trl",
}
_DO_NOT_TRAIN = {
    "infer": "mm infer answers",
    "chat": "mm chat answers",
    "api": "mm serve answers",
    "webchat": "mm serve answers",
    "deploy": "mm serve answers",
    "rollout": "posttrain.rollout draws samples while training",
    "vllm-serve": "posttrain.rollout.base_url names a server",
    "export": "mm export writes a folder, mm merge merges adapters",
    "eval": "mm evaluate scores a run",
    "sample": "mm infer answers",
    "merge-lora": "mm merge merges adapters",
    "merge-sharded-fsdp-weights": "mm export writes a folder",
    "inference": "mm infer answers",
    "preprocess": "rows are prepared while training",
    "evaluate": "mm evaluate scores a run",
    "app": "mm serve answers",
    "env": "mm doctor looks at the machine",
    "convert": "mm-convert converts checkpoints",
}
"""Verb of a tool's program that does not train → what does the same here."""
_SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ai-toolkit": (("job",), ("config.process[].type", "config.process[].model.name_or_path")),
    "axolotl": (("base_model",), ("sequence_len", "datasets[].path", "datasets[].type", "adapter")),
    "musubi": (
        (
            "dit",
            "datasets[].image_directory",
            "datasets[].video_directory",
            "datasets[].image_jsonl_file",
            "datasets[].video_jsonl_file",
        ),
    ),
    "kohya": (
        ("datasets[].subsets[].image_dir", "network_module", "network_dim", "optimizer_type", "dataset_config"),
        ("datasets[].subsets[].image_dir", "pretrained_model_name_or_path"),
    ),
    "llamafactory": (
        ("finetuning_type", "cutoff_len", "pref_beta", "lora_target", "train_dataset", "dist_config.name"),
        ("model_name_or_path", "model"),
    ),
    "ms-swift": (
        ("model",),
        ("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "attn_impl", "lora_rank"),
    ),
    "diffusers": (("pretrained_model_name_or_path",), ("instance_data_dir", "train_data_dir", "dataset_name")),
    "trl": (
        ("per_device_train_batch_size", "num_train_epochs", "use_peft", "dataset_name", "datasets[].path"),
        ("model_name_or_path", "model", "output_dir", "learning_rate", "per_device_train_batch_size"),
    ),
    "diffsynth": (("dataset_base_path",), ("model_paths", "model_id_with_origin_paths")),
}
"""Tool → groups of settings; a file of its has one of each group, and other tools' files do not. In this order."""
_LAUNCH_FILE = {"compute_environment", "distributed_type"}


def tool_of_program(program: tuple[str, ...]) -> PeerTool | None:
    """The tool of a command by its program; None where it is not known."""
    if not program:
        return None
    path = Path(program[0])
    if path.name in _PROGRAMS:
        return TOOLS[_PROGRAMS[path.name]]
    if path.suffix != ".py":
        return None
    parts = path.as_posix()
    if re.search(r"(^|/)src/train(_bash)?\.py$", parts):
        return TOOLS["llamafactory"]
    if "swift/" in parts:
        return TOOLS["ms-swift"]
    if "musubi" in parts or _MUSUBI.fullmatch(path.name):
        return TOOLS["musubi"]
    if "model_training/train" in parts:
        return TOOLS["diffsynth"]
    if _DIFFUSERS.fullmatch(path.name):
        return TOOLS["diffusers"]
    if _KOHYA.fullmatch(path.name) and "src/" not in parts and path.name != "train.py":
        return TOOLS["kohya"]
    if re.search(r"(^|/)(trl|examples/scripts)/", parts) or path.name in ("sft.py", "dpo.py", "grpo.py", "kto.py"):
        return TOOLS["trl"]
    return None


def recognise(given: Given) -> PeerTool:
    """The tool of what is given.

    Raises:
        UsageError: It is none of the known tools', or a command that does not train.
    """
    tool = tool_of_program(given.program)
    keys = {setting.key for setting in given.settings}
    if tool is not None:
        verbs = [word for word in given.program[1:2] if word in _DO_NOT_TRAIN]
        if verbs:
            what = f"'{given.program[0]} {verbs[0]}' does not train"
            raise UsageError(what, where=given.source, way_out=f"{_DO_NOT_TRAIN[verbs[0]]}.")
        return tool
    if keys >= _LAUNCH_FILE:
        what = "a launch file of accelerate, which names no training"
        raise UsageError(what, where=given.source, way_out="mm train --nproc N starts the processes.")
    for name, groups in _SIGNS.items():
        if all(keys & set(group) for group in groups):
            return TOOLS[name]
    if tool := _by_most_words(keys):
        return tool
    titles = ", ".join(tool.title for tool in TOOLS.values())
    what = "no setup of a trainer that is known"
    raise UsageError(what, where=given.source, key="--from", way_out=f"Known are {titles}.")


def _by_most_words(keys: Collection[str]) -> PeerTool | None:
    """The tool that knows at least four settings, and most of all that are given."""
    counts = {name: sum(key in words_of(name) for key in keys) for name in TOOLS}
    best = max(counts, key=lambda name: counts[name])
    if counts[best] >= max(4, 0.6 * len(keys)):
        return TOOLS[best]
    return None
