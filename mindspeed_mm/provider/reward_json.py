"""model.json and data.json of `pretrain_videoalign.py`: a reward model on Qwen2-VL, and its pairs of videos."""

from __future__ import annotations

from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at, value_at_key
from mindspeed_mm.provider.json_tree import place_at
from mindspeed_mm.provider.reading import Reading

ID = "videoalign"
_DATASET = "data.dataset_param"
_BASIC, _PREPROCESS = f"{_DATASET}.basic_parameters", f"{_DATASET}.preprocess_parameters"
_THEIRS = {"basic_parameters": "dataset_param.basic_parameters",
           "preprocess_parameters": "dataset_param.preprocess_parameters"}  # fmt: skip
_KEYS = {
    "basic_parameters": {"data_path": "dataset", "data_folder": "dataset_dir", "max_samples": "max_samples"},
    "preprocess_parameters": {
        "model_name_or_path": "model_name_or_path",
        "fps": "video_fps",
        "video_max_pixels": "video_max_pixels",
        "video_min_pixels": "video_min_pixels",
        "use_tied_data": "use_tied_data",
    },
}
"""Section → key of MindSpeed-MM's rows → here."""
_ONLY = {
    "eval_dim": ["VQ", "MQ", "TA"],
    "prompt_template_type": "detailed_special",
    "sample_type": "uniform",
    "split_special_tokens": True,
    "sample_nframe": None,
}
"""Settings of the questions → the only value that is built, which the released model was trained with."""
_LONGEST = 65536
"""Tokens of a question: nothing cuts questions there, whatever --seq-length says."""


def is_of_rewards(root: Node) -> bool:
    """Whether a model.json describes a reward model."""
    return find(root, "reward_token") is not None


def folder_of_rewards(reading: Reading, folder: str | None) -> str | None:
    """The folder that the model is built of: what `VideoAlignConverter hf_to_mm` wrote, which --load names, with an
    embedding of its own size; where it names the run, or nothing, the one that data.json names."""
    load = reading.value("load")
    if load and load != reading.draft.value("training.save"):
        return load
    return folder


def put_rewards(reading: Reading, root: Node) -> None:
    """Put what a reward model has beside a vision-language model: its head, its loss, and what adapters leave whole."""
    draft = reading.draft
    draft.replace("model.model_id", ID, place_at(root, "model_id"))
    token = text_at(root, "reward_token")
    if token != "special":
        draft.problem(f"reward_token is '{token}'", place_at(root, "reward_token"), 'Write "special".')
    for theirs, ours in (("output_dim", "output_dim"), ("loss_type", "reward_loss")):
        entry = find(root, theirs)
        if entry is not None and plain(entry.node) is not None:
            draft.put(f"model.{ours}", plain(entry.node), entry.node.place)
    if reading.value("lora_target_modules"):
        whole = ["rm_head"]
        if value_at_key(root, "lora_mixed_training") is True:
            whole += [] if value_at_key(root, "image_encoder.vision_encoder.freeze") else ["model.visual"]
        draft.put("training.lora.modules_to_save", whole, place_at(root, "lora_mixed_training"))
        if value_at_key(root, "text_decoder.word_embeddings_training") is True:
            draft.note(
                f"{place_at(root, 'text_decoder.word_embeddings_training')}: word_embeddings_training has no effect "
                "with adapters: the embedding stays as it is, as in the published training."
            )


def put_pairs_of_videos(reading: Reading, root: Node) -> list[str]:
    """Put the rows of a file.

    Returns:
        Dotted names inside `dataset_param` of the settings that are taken.
    """
    draft, taken = reading.draft, []
    draft.put(f"{_DATASET}.dataset_type", "rewardvideo", place_at(root, "dataset_param.dataset_type"))
    for section, keys in _KEYS.items():
        for theirs, ours in keys.items():
            entry = find(root, f"{_THEIRS[section]}.{theirs}")
            if entry is not None:
                taken.append(f"{section}.{theirs}")
                if plain(entry.node) is not None:
                    draft.put(f"{_DATASET}.{section}.{ours}", plain(entry.node), entry.node.place)
    for name, value in _ONLY.items():
        entry = find(root, f"{_THEIRS['preprocess_parameters']}.{name}")
        if entry is None:
            continue
        taken.append(f"preprocess_parameters.{name}")
        if plain(entry.node) != value:
            what = f"{name} is {plain(entry.node)!r}, and the reward model is asked with {value!r}"
            draft.problem(what, entry.node.place, "Write that.")
    draft.fill(f"{_BASIC}.cutoff_len", _LONGEST, "no question is cut")
    reading.settled.add("seq_length")
    return [*taken, "inference_param"]  # inference_videoalign.py reads that itself
