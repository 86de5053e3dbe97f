"""Files of MindSpeed-MM's FSDP2 trainer for CosyVoice3 and Fun-ASR.

They describe the parts of a model and the steps of its data set, which the model's folder decides here. A key that
changes what is trained is brought to the key that does the same here, or is refused; the others are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.suggest import did_you_mean, nearest
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.key_renames import Notes, rename_key
from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, Node, find, plain, put, take, text_at, value_at_key
from mindspeed_mm.fsdp.params.yaml.unknown_keys import DATASETS, has_outside_plugin

_LOADER = "data.dataloader_param"
_MICRO_BATCH = "training.micro_batch_size"


def settle_speech_files(root: Node, notes: Notes) -> None:
    """Bring the keys of both families to those that they have here; changes the tree in place."""
    for dataset in DATASETS:
        # A plugin may have registered the id in capitals (`FunASR`); otherwise it is the built-in one.
        key = f"{dataset}.dataset_type"
        name = text_at(root, key) or ""
        if name not in dataset_cards() and name.lower() in dataset_cards() and not has_outside_plugin(root):
            find(root, key).node.value = name.lower()  # type: ignore[union-attr]
        settle_rows = _ROWS.get(text_at(root, f"{dataset}.dataset_type") or "")
        if settle_rows is not None:
            settle_rows(root, dataset, notes)
    settle_model = _MODELS.get(text_at(root, "model.model_id") or "")
    if settle_model is not None:
        settle_model(root, notes)


def _report(notes: Notes, place: str, names: Iterable[str], way_out: str) -> None:
    """Report keys that were given and have no effect, in one line."""
    if given := list(names):
        what = f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect"
        notes.warnings.append(Problem(what, key=place, way_out=way_out))


def _refuse(notes: Notes, key: str, entry: MappingEntry, what: str, way_out: str) -> None:
    notes.problems.append(Problem(f"{show(plain(entry.node))} {what}", str(entry.node.place), key, way_out))


def _is_on(value: object) -> bool:
    return str(value).lower() in ("true", "yes", "on")


def _taken(root: Node, section: str, names: Iterable[str]) -> list[str]:
    """Those of the keys that a section has, which loses them."""
    return [name for name in names if take(root, f"{section}.{name}") is not None]


# --- CosyVoice3 -------------------------------------------------------------------------------------------------------


_WIDTH = "llm_config.hidden_size"
_SIZES = {"llm_input_size": _WIDTH, "llm_output_size": _WIDTH, "speech_token_size": "speech_token_size"}
"""Size in the file → where the folder's config.json has it."""
_ONLY: dict[str, tuple[object, str]] = {
    "train_moudule": ("llm", "is not trained here: only the language model is"),
    "length_normalized_loss": (True, "is not done: the loss is the mean over label tokens"),
    "lsm_weight": (0, "is not done: labels are not smoothed"),
}  # the spelling of the first is MindSpeed-MM's
"""Key → the value that stands for what is done here, and what is said of another one."""
_OF_SOUND = "Text and speech tokens are read of a row, not its sound."
_STEPS: dict[str, tuple[tuple[str, ...], str]] = {
    "tokenize": (("token_path", "skip_special_tokens", "allowed_special"), "The model's folder has the tokenizer."),
    "filter": (
        ("max_length", "min_length", "token_max_length", "token_min_length", "min_output_input_ratio",
         "max_output_input_ratio"),
        "Rows are not filtered; basic_parameters.cutoff_len leaves out longer ones.",
    ),
    "resample": (("resample_rate", "min_sample_rate"), _OF_SOUND),
    "compute_fbank": (
        ("token_mel_ratio", "mel_n_fft", "mel_num_mels", "mel_sampling_rate", "mel_hop_size", "mel_win_size",
         "mel_fmin", "mel_fmax", "mel_center"),
        _OF_SOUND,
    ),
    "parse_embedding": (("normalize",), _OF_SOUND),
    "shuffle": (("shuffle_size",), f"{_LOADER}.shuffle draws a new order of all rows for each epoch."),
    "sort": (("sort_size",), ""),
    "batch": (("batch_type", "batch_size", "max_frames_in_batch"), ""),
    "padding": (("use_spk_embedding", "gan", "dpo"), _OF_SOUND),
}  # fmt: skip
"""Step of `processor` → its settings, and what decides instead; empty: the step is brought to other keys."""


def _settle_cosyvoice(root: Node, notes: Notes) -> None:
    for name, (done, what) in _ONLY.items():
        entry = take(root, f"model.{name}")
        if entry is None or entry.node.value is None:
            continue
        value = plain(entry.node)
        if value != done and not (done is True and _is_on(value)):
            _refuse(notes, f"model.{name}", entry, what, f"Set it to {show(done)}, or leave it out.")
    encoder = _taken(root, "model", ("llm_encoder", "audio_encoder_conf"))
    _report(notes, "model", encoder, "The model's folder has the sizes and weights of all its parts.")
    _report(notes, "model", _taken(root, "model", ("sampling",)), "No speech is generated while training.")


def check_speech_sizes(root: Node) -> list[Problem]:
    """Find sizes of CosyVoice3 that are not those of the model's folder, which decides.

    Raises:
        ConfigError: The folder's config.json cannot be read.
    """
    path = Path(text_at(root, "model.model_name_or_path") or "") / "config.json"
    given = {name: find(root, f"model.{name}") for name in _SIZES}
    if text_at(root, "model.model_id") != "cosyvoice3_lm" or not any(given.values()) or not path.is_file():
        return []
    config = read_json_object(path, ConfigError, key="model.model_name_or_path")
    llm = config.get("llm_config")
    sizes = config | {_WIDTH: llm.get("hidden_size") if isinstance(llm, dict) else None}
    problems = []
    for name, entry in given.items():
        size = sizes.get(_SIZES[name])
        if entry is not None and size is not None and entry.node.value not in (None, size):
            what = f"{show(plain(entry.node))}, but {path} has {size} ({_SIZES[name]})"
            way_out = "Leave it out: sizes are those of the folder."
            problems.append(Problem(what, str(entry.node.place), f"model.{name}", way_out))
    return problems


def _settle_cosyvoice_rows(root: Node, dataset: str, notes: Notes) -> None:
    reported: dict[str, list[str]] = {}
    if take(root, f"{dataset}.shuffle") is not None:
        reported[_STEPS["shuffle"][1]] = ["shuffle"]
    partition = take(root, f"{dataset}.partition")
    if partition is not None and partition.node.value is not None and not _is_on(partition.node.value):
        reported["Every rank reads its own share of the rows."] = ["partition"]
    is_for_training = dataset == DATASETS[0]
    steps = _entries(f"{dataset}.processor", take(root, f"{dataset}.processor"), notes)
    for name, step in steps.items():
        key = f"{dataset}.processor.{name}"
        if name not in _STEPS:
            notes.problems.append(_unknown(key, step, _STEPS))
            continue
        settings, way_out = _STEPS[name]
        for setting, entry in _entries(key, step, notes).items():
            if setting not in settings:
                notes.problems.append(_unknown(f"{key}.{setting}", entry, settings))
        if not way_out and not is_for_training:
            way_out = "training.val_micro_batch_size is the number of rows in a micro-batch."
        if way_out:
            reported.setdefault(way_out, []).append(f"processor.{name}")
    for way_out, names in reported.items():
        _report(notes, dataset, names, way_out)
    if is_for_training:
        if "batch" in steps:
            _settle_batches(root, steps["batch"].node, f"{dataset}.processor.batch", notes)
        _settle_loader(root, sorts="sort" in steps)


def _entries(key: str, entry: MappingEntry | None, notes: Notes) -> Mapping[str, MappingEntry]:
    """The keys of a section that may be absent or empty; what is no section is refused."""
    if entry is None or entry.node.value is None:
        return {}
    if not isinstance(entry.node.value, dict):
        _refuse(notes, key, entry, "is not a section", "Give it keys, or leave it out.")
        return {}
    return entry.node.value


def _unknown(key: str, entry: MappingEntry, known: Iterable[str]) -> Problem:
    known = list(known)
    way_out = did_you_mean(key.rpartition(".")[2], known).strip() or f"Keys here: {', '.join(known)}."
    return Problem("unknown key", str(entry.key), key, way_out)


def _settle_batches(root: Node, batch: Node, key: str, notes: Notes) -> None:
    """`processor.batch` sets how many samples share a micro-batch there."""
    kind, size = find(batch, "batch_type"), find(batch, "batch_size")
    if kind is not None and kind.node.value not in (None, "static"):
        way_out = (
            f"Set it to static, or fill batches by tokens: {_LOADER}.max_tokens_per_batch with TokenBudgetSampler."
        )
        _refuse(notes, f"{key}.batch_type", kind, "counts frames of sound, which is not read", way_out)
    elif size is not None and size.node.value is not None:
        put(root, _MICRO_BATCH, plain(size.node), size.node.place)
        held = value_at_key(root, _MICRO_BATCH)
        if held != plain(size.node):
            what = f"here, but {_MICRO_BATCH} is {show(held)}"
            _refuse(notes, f"{key}.batch_size", size, what, "They are the same setting: keep one of them.")


def _settle_loader(root: Node, *, sorts: bool) -> None:
    """The data set's own loader (`custom`) is the suite's; rows that are sorted there share batches by length here."""
    own = {
        "dataloader_mode": "sampler",
        "sampler_type": "LengthGroupedSampler" if sorts else "BaseRandomBatchSampler",
        "collate_param.model_name": None,
    }
    for name, value in own.items():
        entry = find(root, f"{_LOADER}.{name}")
        if entry is not None and entry.node.value == "custom":
            entry.node.value = value


# --- Fun-ASR ----------------------------------------------------------------------------------------------------------


_PARTS = {
    "audio_encoder_conf": ("model.audio_tower",),
    "audio_adaptor_conf": ("model.multi_modal_projector",),
    "llm_conf": ("model.language_model", "lm_head"),
    "ctc_decoder_conf": (),
}
"""Part of FunASR's model → the modules that it is here; transformers' model has no CTC decoder."""
_FROM_FOLDER = ("frontend_conf", "ctc_conf", "ctc_weight", "detach_ctc_decoder", "length_normalized_loss", "lsm_weight")
"""MindSpeed-MM does not hand these to the model either: the folder of its weights has them."""
_ROW_SETTINGS: dict[str, tuple[str, ...]] = {
    f"{_MICRO_BATCH} is the number of rows in a micro-batch; {_LOADER}.sampler_type TokenBudgetSampler fills it up to "
    "max_tokens_per_batch.": (
        "batch_sampler", "batch_size", "batch_type", "batch_size_scale_ratio_max", "batch_size_scale_threshold",
        "batch_size_sample_max", "batch_size_token_max", "sort_size",
    ),
    "Rows longer than basic_parameters.cutoff_len are left out; lengths are measured.": (
        "min_source_length", "max_source_length", "max_target_length", "max_token_length",
    ),
    "A row's own prompt is used; hot words are not added.": ("prompt_classes", "prompt_conf"),
    "The model's folder and its processor decide.": (
        "index_ds", "dataloader", "audio_adaptor_downsample_rate", "audio_encoder_downsample_rate",
        "use_dynamic_output_ratio",
    ),
    "All rows are indexed before the first step, and on_bad_sample decides about bad ones.": (
        "data_split_num", "retry",
    ),
}  # fmt: skip
"""What decides instead → settings of `dataset_conf`."""
_ROW_MOVES = {"num_workers": f"{_LOADER}.num_workers", "shuffle": f"{_LOADER}.shuffle"}


def _settle_funasr(root: Node, notes: Notes) -> None:
    reported = []
    for part, modules in _PARTS.items():
        entry = take(root, f"model.{part}")
        settings = _entries(f"model.{part}", entry, notes)
        for name, setting in settings.items():
            key = f"model.{part}.{name}"
            if name == "freeze" and _is_on(setting.node.value):
                _freeze(root, modules, setting)
            elif name == "use_lora" and _is_on(setting.node.value):
                _refuse(notes, key, setting, "adds no adapters here", "Set training.lora.enable: true instead.")
            elif name != "freeze" and nearest(name, ("freeze",), likeness=0.8):
                notes.problems.append(_unknown(key, setting, ("freeze",)))
        if not modules and entry is not None:
            reported.append(part)
        elif settings.keys() - {"freeze", "use_lora"}:
            reported.append(f"{part} (all but freeze)")
    _report(notes, "model", reported, "The model's folder has the sizes of all its parts, and no CTC decoder.")
    way_out = "The loss is the mean cross-entropy of the transcript, and the folder's processor reads sounds."
    _report(notes, "model", _taken(root, "model", _FROM_FOLDER), way_out)


def _freeze(root: Node, modules: Iterable[str], setting: MappingEntry) -> None:
    """Add modules to `model.freeze`, which may have some."""
    held = find(root, "model.freeze")
    if held is None or held.node.value is None:
        put(root, "model.freeze", [], setting.node.place)
        held = find(root, "model.freeze")
    elif isinstance(held.node.value, str):
        held.node.value = [Node(held.node.value, held.node.place)]
    if held is not None and isinstance(held.node.value, list):
        held.node.value += [Node(name, setting.node.place) for name in modules]


def _settle_funasr_rows(root: Node, dataset: str, notes: Notes) -> None:
    training = take(root, f"{dataset}.is_training")
    if training is not None and not _is_on(training.node.value):
        _report(notes, dataset, ["is_training"], "data.val_dataset_param describes rows for validation.")
    settings = f"{dataset}.dataset_conf"
    for name, ours in _ROW_MOVES.items():
        rename_key(root, f"{settings}.{name}", ours, notes)
    for way_out, names in _ROW_SETTINGS.items():
        _report(notes, settings, _taken(root, settings, names), way_out)
    known = [*_ROW_MOVES, *(name for names in _ROW_SETTINGS.values() for name in names)]
    for name, entry in _entries(settings, take(root, settings), notes).items():
        notes.problems.append(_unknown(f"{settings}.{name}", entry, known))


_MODELS: dict[str, Callable[[Node, Notes], None]] = {"cosyvoice3_lm": _settle_cosyvoice, "funasr": _settle_funasr}
_ROWS: dict[str, Callable[[Node, str, Notes], None]] = {
    "cosyvoice": _settle_cosyvoice_rows,
    "funasr": _settle_funasr_rows,
}
