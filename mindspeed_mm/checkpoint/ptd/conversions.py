"""Hugging Face folder ↔ Megatron-style checkpoint, and from one division of it to another: what each of them reads and
writes. The runner (`conversion/run.py`) keeps what is promised of the output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.conversion.files import PtFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.dequantized import refuse_quantized
from mindspeed_mm.checkpoint.hf_folder import asset_files, model_config, safetensors_files
from mindspeed_mm.checkpoint.keymap import made_by
from mindspeed_mm.checkpoint.layout import RELEASE, TRACKER
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, stored_keys
from mindspeed_mm.checkpoint.megatron.adapters import MODULE_NAMES, adapter_model
from mindspeed_mm.checkpoint.megatron.expected import check_whole, expected_shapes
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily, MegatronModel
from mindspeed_mm.checkpoint.megatron.folder import (
    CHECKPOINT_VERSION,
    DividedWeights,
    divided_files,
    find_step,
    megatron_tensors,
    rank_files,
    read_layout,
    read_shards,
    read_weights,
    refuse_contradiction,
    renamed_to_hub,
    without_a_name,
)
from mindspeed_mm.checkpoint.megatron.layout import LAYOUT_FILE, MegatronLayout
from mindspeed_mm.checkpoint.megatron.sharding import divide, times_written
from mindspeed_mm.checkpoint.ptd.config import AdapterModelConfig
from mindspeed_mm.checkpoint.ptd.division import check_facts, depths_of, layout_of
from mindspeed_mm.checkpoint.ptd.other_text import renamed_text, text_keys
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, check_same_tensors, open_weights
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, UsageError

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ADAPTERS = "adapters alone compute nothing"
_VISION_ALONE = "only the vision tower is written"
_OTHER_TEXT = "the language model is that of another folder"


def hf_to_megatron(
    family: MegatronFamily,
    hf_dir: Path,
    mm_dir: Path,
    said: ParallelConfig,
    *,
    facts: CommonModelConfig,
    vision_only: bool = False,
    text_dir: Path | None = None,
    u_shape: bool = False,
    writing: Writing,
) -> Converted:
    """Divide a Hugging Face folder among ranks.

    Args:
        family: Of the model.
        hf_dir: The folder.
        mm_dir: Where the checkpoint is written: `release/`, the tracker, and the model's configuration and tokenizer.
        said: The division.
        facts: What was said of the model.
        vision_only: Leave the language model out.
        text_dir: Folder of another language model, which takes the place of the folder's own.
        u_shape: As `layout_of` has it.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or the division does not fit the model.
    """
    config = model_config(hf_dir)
    refuse_quantized(config, str(hf_dir / "config.json"))
    canonical = facts.enable_canonical_hf_struct
    model = family.model(config, canonical=canonical)
    check_facts(facts, model, config, hf_dir)
    layout = layout_of(said, model.depths, canonical=canonical, u_shape=u_shape)
    layout.check(model.depths, model.experts)
    with open_weights(hf_dir, MAPPED_BYTES) as stored, _opened(text_dir) as of_text:
        ledger = SourceLedger(stored, hf_dir)
        ledgers, sources = [ledger], [hf_dir]
        left_out = {key: "is not part of this layout" for key in stored if key.startswith(model.not_carried)}
        left_out |= _without_a_place(ledger.tensors, model, hf_dir, writing)
        tensors: dict[str, LazyTensor] = {key: value for key, value in ledger.tensors.items() if key not in left_out}
        incomparable = ""
        if text_dir is not None:
            for key in text_keys(tensors, model):
                left_out[key] = f"comes from {text_dir}"
                del tensors[key]
            text_ledger, text = _counted_text(of_text, text_dir)
            ledgers.append(text_ledger)
            sources.append(text_dir)
            tensors |= renamed_text(text, model, text_dir)
            incomparable = _OTHER_TEXT
        whole = megatron_tensors(tensors, model)
        # weights=False: the folder's weights are what is checked, and would agree with themselves.
        shapes = expected_shapes(hf_dir, family, config, canonical=canonical, weights=False)
        check_whole(whole, shapes, model, text_dir or hf_dir, hf_dir)
        if vision_only:
            whole, model, layout = _vision_alone(whole, model, layout)
            kept = made_by(model.key_map.inverse.steps(whole))
            left_out |= {key: _VISION_ALONE for key in stored if key not in kept}
            incomparable = _VISION_ALONE
        conversion = Conversion(
            sources=sources,
            ledgers=ledgers,
            **megatron_output(divided_files(whole, model, layout), layout),
            times=times_written(whole, model, layout),
            left_out=left_out,
            incomparable=incomparable,
            copies=asset_files(hf_dir),
        )
        return convert(conversion, mm_dir, writing, stream=sys.stderr)


def _without_a_place(
    tensors: Mapping[str, LazyTensor], model: MegatronModel, hf_dir: Path, writing: Writing
) -> dict[str, str]:
    """Keys of a folder that are no part of the model, with the reasons to leave them out; raises where it has none."""
    carried = {key: tensor for key, tensor in tensors.items() if not key.startswith(model.not_carried)}
    taken = {key for step in model.key_map.steps(carried) for key in step.sources}
    # The usual case: all has a place, and the model's class, which takes seconds, is not asked.
    if carried.keys() <= taken and not writing.allow_unused:
        return {}
    outline = TransformersOutline.of(hf_dir)
    surplus = outline.own_tensors(tensors)[1] if outline is not None else []
    if outline is None or not surplus:
        return {}
    return outline.unused([key for key in surplus if key in carried], where=hf_dir, allowed=writing.allow_unused)


def _counted_text(stored: Mapping[str, LazyTensor], folder: Path) -> tuple[SourceLedger, dict[str, LazyTensor]]:
    """The ledger of another language model, and what it counts by the folder's own keys.

    Both folders of a conversion may have the same keys: these are counted under their folder's name.
    """
    ledger = SourceLedger({f"{folder}/{key}": tensor for key, tensor in stored.items()}, folder)
    return ledger, {key: ledger.tensors[f"{folder}/{key}"] for key in stored}


def megatron_to_hf(
    family: MegatronFamily,
    mm_dir: Path,
    hf_dir: Path,
    save_hf_dir: Path,
    said: ParallelConfig | None,
    *,
    facts: CommonModelConfig,
    writing: Writing,
) -> Converted:
    """Join a Megatron-style checkpoint.

    Args:
        family: Of the model.
        mm_dir: The checkpoint, or a step of it.
        hf_dir: The model's own folder: configuration, tokenizer, and the tensors that this layout does not carry.
        save_hf_dir: The folder to write.
        said: The division; None: as the checkpoint itself says.
        facts: What was said of the model.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or files are missing, damaged, or divided otherwise than was said.
    """
    with _joined(family, mm_dir, hf_dir, said, facts) as joined:
        tensors = dict(joined.tensors)
        times: dict[str, int | None] = {}
        for key, embedding in _copy_of_tied_head(joined).items():
            tensors[key] = embedding
            # Written as the embedding and as the head.
            times |= dict.fromkeys(stored_keys(embedding), 2)
        if joined.own:
            check_same_tensors(tensors, mm_dir, hf_dir)
        files, texts = safetensors_files(tensors)
        conversion = Conversion(
            sources=[mm_dir, hf_dir],
            ledgers=[joined.ledger],
            files=files,
            layout={"kind": "hf"},
            times=times,
            dropped=joined.dropped,
            copies=asset_files(hf_dir),
            texts=texts,
        )
        return convert(conversion, save_hf_dir, writing, stream=sys.stderr)


def megatron_to_dcp(
    family: MegatronFamily, mm_dir: Path, hf_dir: Path, dcp_dir: Path, *, writing: Writing
) -> Converted:
    """Join a checkpoint of Megatron's to a distributed checkpoint under the names of transformers' module.

    Args:
        family: Of the model.
        mm_dir: The checkpoint, or a step of it.
        hf_dir: The model's own folder: configuration, and the tensors that this layout does not carry.
        dcp_dir: The folder to write.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or files are missing or damaged, or transformers has no class of this model.
    """
    outline = TransformersOutline.of(hf_dir)
    if outline is None:
        raise UsageError(
            "names no class of transformers, under whose names a distributed checkpoint is written",
            where=str(hf_dir / "config.json"),
            key="architectures",
            way_out="Convert to a Hugging Face folder: --to hf.",
        )
    with _joined(family, mm_dir, hf_dir, None, CommonModelConfig()) as joined:
        tensors, surplus = outline.own_tensors(joined.tensors)
        if surplus:
            raise CheckpointError("has no place in the model", where=str(mm_dir), key=surplus[0])
        conversion = Conversion(
            sources=[mm_dir, hf_dir],
            ledgers=[joined.ledger],
            files={RELEASE: DcpFolder(tensors)},
            layout={"kind": "dcp", "names": "transformers"},
            dropped=joined.dropped,
            texts={TRACKER: f"{RELEASE}\n"},
        )
        return convert(conversion, dcp_dir, writing, stream=sys.stderr)


@dataclass(frozen=True)
class _Joined:
    """A checkpoint of Megatron's under the hub's names."""

    model: MegatronModel
    ledger: SourceLedger
    tensors: Mapping[str, LazyTensor]
    own: Mapping[str, LazyTensor]
    """What the model's own folder holds."""
    dropped: Sequence[LazyTensor]


@contextmanager
def _joined(
    family: MegatronFamily, mm_dir: Path, hf_dir: Path, said: ParallelConfig | None, facts: CommonModelConfig
) -> Iterator[_Joined]:
    config = model_config(hf_dir)
    model = family.model(config, canonical=facts.enable_canonical_hf_struct)
    check_facts(facts, model, config, hf_dir)
    canonical = _is_canonical(mm_dir, facts.enable_canonical_hf_struct)
    wanted = None
    if said is not None:
        wanted = layout_of(said, model.depths, canonical=canonical)
    found = read_weights(mm_dir, family, config, wanted, canonical=canonical)
    ledger = SourceLedger(found.stored, found.step, found.beside)
    whole = found.whole(ledger.tensors)
    check_whole(whole, expected_shapes(hf_dir, family, config, canonical=found.canonical), found.model, mm_dir, hf_dir)
    tensors = renamed_to_hub(whole, found.model)
    dropped = [*found.padding(ledger.tensors), *without_a_name(whole, found.model)]
    weights = hf_dir if any(hf_dir.glob("*.safetensors")) else None
    with _opened(weights) as own:
        for key, tensor in own.items():
            # The talker of an omni model, say: from the model's own folder, since the checkpoint has none.
            if key.startswith(model.not_carried):
                tensors[key] = tensor
        yield _Joined(model, ledger, tensors, own, dropped)


def divide_anew(
    family: MegatronFamily,
    source_dir: Path,
    target_dir: Path,
    hf_dir: Path | None,
    said: ParallelConfig | None,
    target: ParallelConfig,
    *,
    writing: Writing,
) -> Converted:
    """Write a Megatron-style checkpoint in another division.

    Args:
        family: Of the model.
        source_dir: The checkpoint, or a step of it.
        target_dir: The folder to write.
        hf_dir: Where the model's config.json is; None: in the checkpoint.
        said: How the source is divided; None: as it itself says.
        target: The new division.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or a division does not fit the model, or no config.json is there.
    """
    home = hf_dir or _home_of_config(source_dir)
    config = model_config(home)
    depths = family.model(config).depths
    wanted = None
    if said is not None:
        wanted = layout_of(said, depths, canonical=_is_canonical(source_dir, False))
    found = read_weights(source_dir, family, config, wanted)
    ledger = SourceLedger(found.stored, found.step, found.beside)
    model, canonical = found.model, found.canonical
    whole = found.whole(ledger.tensors)
    check_whole(whole, expected_shapes(home, family, config, canonical=canonical), model, source_dir, home)
    layout = layout_of(target, model.depths, canonical=canonical)
    conversion = Conversion(
        sources=[source_dir],
        ledgers=[ledger],
        **megatron_output(divided_files(whole, model, layout), layout),
        times=times_written(whole, model, layout),
        dropped=found.padding(ledger.tensors),
        copies=asset_files(home),
    )
    return convert(conversion, target_dir, writing, stream=sys.stderr)


def adapters_to_megatron(
    family: MegatronFamily,
    hf_dir: Path,
    mm_dir: Path,
    said: ParallelConfig,
    *,
    naming: AdapterModelConfig,
    writing: Writing,
) -> Converted:
    """Divide PEFT's adapters among ranks.

    Args:
        family: Of the model that they are of.
        hf_dir: With adapter_model.safetensors.
        mm_dir: The folder to write.
        said: The model's division; layers of both towers.
        naming: How they are named.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or the model is not canonical, or the division does not fit.
    """
    layout = _adapter_layout(said, naming)
    model = _adapter_model(family, layout, naming)
    with open_weights(hf_dir, MAPPED_BYTES) as stored:
        ledger = SourceLedger(stored, hf_dir)
        whole = megatron_tensors(ledger.tensors, model)
        files = rank_files(divide(whole, model, layout), layout)
        conversion = Conversion(
            sources=[hf_dir],
            ledgers=[ledger],
            **megatron_output(files, layout),
            times=times_written(whole, model, layout),
            incomparable=_ADAPTERS,
            copies=_adapter_config(hf_dir),
        )
        return convert(conversion, mm_dir, writing, stream=sys.stderr)


def adapters_to_hf(
    family: MegatronFamily,
    mm_dir: Path,
    save_hf_dir: Path,
    said: ParallelConfig | None,
    *,
    naming: AdapterModelConfig,
    writing: Writing,
) -> Converted:
    """Join adapters to what PEFT reads.

    Args:
        family: Of the model that they are of.
        mm_dir: The adapters in Megatron's layout.
        save_hf_dir: The folder to write.
        said: The model's division; None: as layout.json says.
        naming: How they are to be named.
        writing: How the output is written.

    Raises:
        MMError: As `convert`; or files are missing, or nobody says how they are divided.
    """
    step = find_step(mm_dir)
    kept = read_layout(step)
    wanted = None
    if said:
        wanted = _adapter_layout(said, naming)
    layout = kept or wanted
    if layout is None:
        raise UsageError(
            f"has no {LAYOUT_FILE} that says how it is divided",
            where=str(step),
            way_out="Say it with --cfg.parallel_config.llm_pp_layers, .vit_pp_layers and .tp_size.",
        )
    if kept and wanted:
        refuse_contradiction(wanted, kept, step)
    model = _adapter_model(family, layout, naming)
    found = DividedWeights(step, read_shards(step, layout), model, layout)
    ledger = SourceLedger(found.stored, step, found.beside)
    tensors = renamed_to_hub(found.whole(ledger.tensors), model)
    # In one file, however large: PEFT reads no shards.
    files, texts = safetensors_files(tensors, float("inf"), ADAPTER_FILE.partition(".")[0])
    copies = _adapter_config(step.parent) or _adapter_config(step)
    conversion = Conversion(
        sources=[mm_dir],
        ledgers=[ledger],
        files=files,
        layout={"kind": "adapters"},
        incomparable=_ADAPTERS,
        copies=copies,
        texts=texts,
    )
    return convert(conversion, save_hf_dir, writing, stream=sys.stderr)


def _adapter_config(folder: Path) -> dict[str, Path]:
    """PEFT's configuration, by its name; nothing where the folder has none."""
    file = folder / ADAPTER_CONFIG
    return {ADAPTER_CONFIG: file} if file.is_file() else {}


class _MegatronOutput(TypedDict):
    files: dict[str, PtFile]
    layout: dict[str, object]
    texts: dict[str, str]


def megatron_output(
    files: Mapping[str, Mapping[str, Mapping[str, LazyTensor]]], layout: MegatronLayout
) -> _MegatronOutput:
    """Files and texts of a step called `release`, as arguments of `Conversion`."""
    extras = {"checkpoint_version": CHECKPOINT_VERSION}
    return {
        "files": {f"{RELEASE}/{name}": PtFile(content, extras) for name, content in files.items()},
        "layout": {"kind": "megatron", **layout.to_json()},
        "texts": {TRACKER: RELEASE, f"{RELEASE}/{LAYOUT_FILE}": json.dumps(layout.to_json(), indent=1) + "\n"},
    }


def _vision_alone(
    whole: Mapping[str, LazyTensor], model: MegatronModel, layout: MegatronLayout
) -> tuple[dict[str, LazyTensor], MegatronModel, MegatronLayout]:
    (vision,) = [tower for tower in model.towers if tower.name == "vision"]
    rules = model.rules_of(vision)
    depths = {"vision": model.depths["vision"]}
    model = replace(model, towers=(vision,), depths=depths, rules=rules, tied_head=False, experts=0)
    layout = replace(layout, layers={"vision": layout.layers["vision"]}, ep=1)
    of_vision = {name: tensor for name, tensor in whole.items() if name.startswith(vision.prefix)}
    return of_vision, model, layout


@contextmanager
def _opened(folder: Path | None) -> Iterator[Mapping[str, LazyTensor]]:
    """A folder's tensors; none where there is no folder."""
    if folder is None:
        yield {}
        return
    with open_weights(folder, MAPPED_BYTES) as stored:
        yield stored


def _copy_of_tied_head(joined: _Joined) -> dict[str, LazyTensor]:
    """The head, where the model's folder stores it though it is the embedding."""
    model = joined.model
    names = model.hub_names
    embedding, head = names[model.embedding], names[model.head]
    if model.tied_head and head in joined.own and head not in joined.tensors:
        return {head: joined.tensors[embedding]}
    return {}


def _is_canonical(folder: Path, said: bool) -> bool:
    """What the checkpoint says, else what a person said."""
    kept = read_layout(find_step(folder))
    if kept is None:
        return said
    if said and not kept.canonical:
        raise UsageError(
            "true was given, and the checkpoint's projections are fused",
            where=str(folder),
            key="cfg.common_model_config.enable_canonical_hf_struct",
        )
    return kept.canonical


def _home_of_config(source_dir: Path) -> Path:
    step = find_step(source_dir)
    for folder in (source_dir, step, step.parent):
        if (folder / "config.json").is_file():
            return folder
    raise UsageError(
        "holds no config.json, and without it there is no telling what is cut where",
        where=str(source_dir),
        way_out="Name the model's folder with --cfg.hf_config.hf_dir.",
    )


def _adapter_layout(said: ParallelConfig, naming: AdapterModelConfig) -> MegatronLayout:
    if not naming.enable_canonical_hf_struct:
        raise UsageError(
            "adapters of fused projections are none of the hub's",
            key="cfg.common_model_config.enable_canonical_hf_struct",
            way_out="Train a canonical model, and say true here.",
        )
    if said.llm_pp_layers is None or said.vit_pp_layers is None:
        raise UsageError(
            "adapters do not say how many layers the model has",
            key="cfg.parallel_config",
            way_out="Say llm_pp_layers and vit_pp_layers.",
        )
    named = {"text": tuple(map(tuple, said.llm_pp_layers)), "vision": tuple(map(tuple, said.vit_pp_layers))}
    return layout_of(said, depths_of(named), canonical=True)


def _adapter_model(family: MegatronFamily, layout: MegatronLayout, naming: AdapterModelConfig) -> MegatronModel:
    depths = depths_of(layout.layers)
    layout.check(depths, 0)
    names = MODULE_NAMES if naming.new_transformers_weight_key else {}
    return adapter_model(family, depths, prefix=naming.model_prefix, module_names=names)
