"""The rule for the flags of training on preference pairs."""

from __future__ import annotations

from pathlib import PurePosixPath

from mindspeed_mm.provider.reading import Reading

_DATA = "data.dataset_param"
_KEYS = {
    "dpo_beta": "posttrain.dpo.beta",
    "dpo_loss_type": "posttrain.dpo.loss_type",
    "dpo_label_smoothing": "posttrain.dpo.label_smoothing",
    "pref_ftx": "posttrain.dpo.pref_ftx",
}
"""Flag → the key that takes its value."""


def preferences(reading: Reading) -> None:
    """`--posttrain-method dpo`, which the entries of preference pairs are as good as given, and what comes with it."""
    method, draft = reading.value("posttrain_method"), reading.draft
    if method is None:
        for name in (*_KEYS, "ref_model"):
            if reading.has(name):
                draft.problem(
                    "is for preference pairs, and this entry trains without them",
                    reading.place(name),
                    "Start posttrain_qwen2vl_dpo.py, or add --posttrain-method dpo.",
                )
        return
    if method != "dpo":
        draft.problem(
            f"'{method}' is not built",
            reading.place("posttrain_method"),
            "There is dpo; leave it out to train on single answers.",
        )
        return
    draft.put("posttrain.method", method, reading.place("posttrain_method"))
    for name, key in _KEYS.items():
        if reading.has(name):
            draft.put(key, reading.value(name), reading.place(name))
    if not reading.is_generator:
        draft.fill(f"{_DATA}.basic_parameters.stage", "rm", "preference pairs of --posttrain-method dpo")
        draft.fill(f"{_DATA}.attr.ranking", True, "preference pairs of --posttrain-method dpo")
    _reference(reading)


def _reference(reading: Reading) -> None:
    """`--ref-model`: a folder of weights, or what training starts from, which is what the reference is anyway."""
    path = reading.value("ref_model")
    if path is None:
        return
    own = [reading.draft.value(key) for key in ("model.model_name_or_path", "training.load")]
    own += [reading.value("load"), reading.folder_of_weights or None]
    if PurePosixPath(path) not in [PurePosixPath(each) for each in own if each]:
        reading.draft.put("posttrain.reference.model_name_or_path", path, reading.place("ref_model"))
