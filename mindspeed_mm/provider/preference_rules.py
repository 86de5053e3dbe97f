"""The rule for the flags of training on preference pairs."""

from __future__ import annotations

from pathlib import PurePosixPath

from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain
from mindspeed_mm.provider.json_tree import entries_at, place_at
from mindspeed_mm.provider.reading import Reading, derived

_DATA = "data.dataset_param"
_KEYS = {
    "dpo_beta": "posttrain.dpo.beta",
    "dpo_loss_type": "posttrain.dpo.loss_type",
    "dpo_label_smoothing": "posttrain.dpo.label_smoothing",
    "pref_ftx": "posttrain.dpo.pref_ftx",
}
"""Flag → the key that takes its value."""
_WEIGHING = ("weight_alpha", "weight_beta", "histogram_path")
"""Keys of `dpo` of model.json that weigh pairs."""
_LOSS_BETA = 2000.0
"""`dpo.loss_beta` of model.json where it is not given."""
_DPO_BETA = 0.1
"""--dpo-beta where it is not given. `timestep_weight: sigma` holds it: 0.2 · β is twice 0.1 · loss_beta."""


def put_media_pairs(reading: Reading, root: Node) -> None:
    """`dpo` of a generator's model.json: how pairs are weighed, and how strong the tie to the reference is."""
    section = find(root, "dpo")
    if reading.value("posttrain_method") != "dpo":
        if section is not None:
            reading.draft.note(f"{section.node.place}: dpo has no effect: this entry trains without pairs.")
        return
    unknown = [name for name in entries_at(root, "dpo") if name not in (*_WEIGHING, "loss_beta")]
    if section is not None and unknown:
        draft = reading.draft
        draft.note(f"{section.node.place}: {', '.join(unknown)} of dpo: no such setting of pairs, so it has no effect.")
    values = {}
    for name in _WEIGHING:
        entry = find(root, f"dpo.{name}")
        if entry is not None:
            values[name] = plain(entry.node)
    if not values.get("weight_alpha"):
        if values.get("histogram_path"):
            place = place_at(root, "dpo.histogram_path")
            reading.draft.note(f"{place}: histogram_path has no effect: weight_alpha is 0, so all pairs count alike.")
        values = {}
    for name, value in values.items():
        if value is not None:
            reading.draft.put(f"posttrain.dpo.{name}", value, place_at(root, f"dpo.{name}"))
    _put_strength(reading, root)
    _share_sequences(reading)


def _share_sequences(reading: Reading) -> None:
    """A generator's pairs need a second pass through the reference, which stages cannot make: the ranks that would hold
    stages share each sequence, and the batch stays what it is."""
    stages = reading.size("pipeline_parallel_size")
    if stages == 1:
        return
    place = reading.draft.place("parallel.pipeline_parallel_size")
    reading.sharing_stages = stages
    reading.draft.replace("parallel.pipeline_parallel_size", 1, place)
    reading.draft.note(
        f"{place} {stages}: pairs of a generator are not trained in pipeline stages; these ranks share each sequence "
        "instead (ulysses_parallel_size). The samples of a step stay the same."
    )


def _put_strength(reading: Reading, root: Node) -> None:
    """β of a noise level: twice --dpo-beta × loss_beta × the number of the step, 1000 σ."""
    entry = find(root, "dpo.loss_beta")
    strength = None
    if entry is not None:
        strength = plain(entry.node)
    if strength is None:
        strength = _LOSS_BETA
    if isinstance(strength, bool) or not isinstance(strength, int | float):
        place = place_at(root, "dpo.loss_beta")
        reading.draft.problem(f"{strength!r} is not a number", place, "Give one, e.g. 2000.")
        return
    words = f"dpo.loss_beta {strength:g}"
    if reading.has("dpo_beta"):
        strength *= reading.value("dpo_beta") / _DPO_BETA
        words += f" × --dpo-beta {reading.value('dpo_beta'):g} / {_DPO_BETA}"
    reading.draft.put("posttrain.dpo.beta", strength, derived(words))
    reading.draft.put("posttrain.dpo.timestep_weight", "sigma", derived("pairs of posttrain_sora_dpo.py"))


def preferences(reading: Reading) -> None:
    """`--posttrain-method dpo`, which the entries of preference pairs are as good as given, and what comes with it."""
    method, draft = reading.value("posttrain_method"), reading.draft
    if method is None:
        for name in (*_KEYS, "ref_model"):
            if reading.has(name):
                draft.problem(
                    "is for preference pairs, and this entry trains without them",
                    reading.place(name),
                    "Start posttrain_qwen2vl_dpo.py or posttrain_sora_dpo.py, or add --posttrain-method dpo.",
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
        if reading.has(name) and not (name == "dpo_beta" and reading.is_generator):  # see put_media_pairs
            draft.put(key, reading.value(name), reading.place(name))
    if (
        reading.value("pref_ftx") and not reading.is_generator
    ):  # `losses += pref_ftx * sft_loss` in their dpo_trainer.py
        draft.put("posttrain.dpo.pref_ftx_by", "pair", derived("--pref-ftx: the mean of each chosen answer's own mean"))
    draft.fill(f"{_DATA}.basic_parameters.stage", "rm", "preference pairs of --posttrain-method dpo")
    if not reading.is_generator:
        draft.fill(f"{_DATA}.attr.ranking", True, "preference pairs of --posttrain-method dpo")
    elif reading.value("pref_ftx"):
        draft.note(
            "--pref-ftx weighs the errors of the chosen sides, which are not multiplied by loss_beta and the step."
        )
    _reference(reading)


def _reference(reading: Reading) -> None:
    """`--ref-model`: a folder of weights, or what training starts from, which is what the reference is anyway."""
    path = reading.value("ref_model")
    if path is None:
        return
    draft = reading.draft
    own = [
        draft.value("model.model_name_or_path"),
        draft.value("training.load"),
        reading.value("load"),
        reading.folder_of_weights,
    ]
    # a reference that is what training starts from needs no second folder
    if PurePosixPath(path) not in [PurePosixPath(each) for each in own if each]:
        reading.draft.put("posttrain.reference.model_name_or_path", path, reading.place("ref_model"))
