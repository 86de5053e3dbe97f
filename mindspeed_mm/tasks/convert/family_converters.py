"""Converters of families that train here: what the generic one does, with adapters, and with experts one by one."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter, check_prefix, renamed
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, asset_files, model_config, safetensors_files
from mindspeed_mm.checkpoint.key_ops import Concat, Stack
from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule, in_natural_order, made_by
from mindspeed_mm.checkpoint.layout import MANIFEST
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, check_same_tensors, open_weights
from mindspeed_mm.checkpoint.stored_weights import UNDER_ADAPTERS
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.models.lora.files import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from mindspeed_mm.fsdp.models.lora.names import ADAPTER
from mindspeed_mm.tasks.export import export, merge
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest

_PEFT = "base_model.model."
_ADAPTER_CONFIG = "adapter_config.json"


class _FamilyConverter(GenericDCPConverter):
    """A generic converter that refuses folders of other families."""

    model_types: ClassVar[tuple[str, ...]] = ()

    def lora_hf_to_dcp(self, hf_dir: Path, dcp_dir: Path, overwrite: bool = False, verify: bool = True) -> Converted:
        """Write adapters of PEFT as a distributed checkpoint, under the names of a model with adapters.

        Args:
            hf_dir: The folder with adapter_config.json and adapter_model.safetensors.
            dcp_dir: The folder to write: release/ and latest_checkpointed_iteration.txt.
            overwrite: Replace what an earlier conversion wrote to dcp_dir.
            verify: Read everything back and compare.
        """
        check_folder_exists(hf_dir, ModelFolderError)
        if not (hf_dir / _ADAPTER_CONFIG).is_file():
            raise ModelFolderError(f"has no {_ADAPTER_CONFIG}", where=str(hf_dir), way_out="Name a folder of PEFT.")
        with open_weights(hf_dir, MAPPED_BYTES) as stored:
            ledger = SourceLedger(stored, hf_dir)
            tensors = {_name_in_model(key): tensor for key, tensor in ledger.tensors.items()}
            conversion = Conversion(
                sources=[hf_dir],
                ledgers=[ledger],
                files={layout.RELEASE: DcpFolder(tensors)},
                layout={"kind": "dcp", "names": "adapters"},
                copies={_ADAPTER_CONFIG: hf_dir / _ADAPTER_CONFIG},
                texts={layout.TRACKER: f"{layout.RELEASE}\n"},
            )
            return convert(conversion, dcp_dir, Writing(overwrite, verify), stream=sys.stderr)

    def merge_lora_to_base(
        self,
        base_hf_dir: Path,
        lora_dir: Path,
        save_merged_hf_dir: Path,
        scaling: float = 1.0,
        overwrite: bool = False,
    ) -> merge.Merged:
        """Add adapters to a model's weights and write the whole model.

        Args:
            base_hf_dir: The model that the adapters were trained on.
            lora_dir: Adapters as PEFT writes them.
            save_merged_hf_dir: The folder to write.
            scaling: How many times the adapters are added.
            overwrite: Replace what an earlier merge wrote there.
        """
        self._check_family(base_hf_dir)
        return merge.run(
            MergeRequest(base_hf_dir, (lora_dir,), out=save_merged_hf_dir, scales=(scaling,), overwrite=overwrite)
        )

    def merge_mm_lora_dcp_weight_to_base_hf(
        self,
        base_hf_dir: Path,
        lora_dcp_dir: Path,
        save_merged_hf_dir: Path,
        lora_target_modules: str = "",
        scaling: float | None = None,
        overwrite: bool = False,
    ) -> merge.Merged:
        """Add the adapters of a run, or of a distributed checkpoint, to a model's weights and write the whole model.

        Args:
            base_hf_dir: The model that the adapters were trained on.
            lora_dcp_dir: The run, its newest step is taken; or a step, or what lora_hf_to_dcp wrote.
            save_merged_hf_dir: The folder to write.
            lora_target_modules: Parts of names, with commas between them, of the layers whose adapters are added;
                empty: all.
            scaling: What B·A is multiplied by: alpha / rank. By default as the run or an adapter_config.json says it,
                else 1.
            overwrite: Replace what an earlier merge wrote there.
        """
        self._check_family(base_hf_dir)
        words = [part.strip() for part in lora_target_modules.split(",") if part.strip()]
        done = merge_checkpoint(base_hf_dir, lora_dcp_dir, save_merged_hf_dir, words, scaling, overwrite=overwrite)
        return merge.Merged(save_merged_hf_dir, (str(lora_dcp_dir),), done.tensors, done.size_bytes)

    def _check_family(self, folder: Path) -> None:
        if (found := model_config(folder).get("model_type")) not in self.model_types:
            raise UsageError(
                f"model_type is {found!r}, and this converter is for {' and '.join(self.model_types)}",
                where=str(folder / "config.json"),
                way_out="Use GenericDCPConverter for any other model.",
            )


def _name_in_model(key: str) -> str:
    """Return the model's name for a tensor of PEFT adapters: `base_model.model.x.lora_A.weight` →
    `x.lora_A.default.weight`."""
    name = key.removeprefix(_PEFT)
    stem, dot, last = name.rpartition(".")
    if ".lora_" not in name:
        return name
    if last == "lora_magnitude_vector":
        return f"{name}.{ADAPTER}.weight"
    return f"{stem}.{ADAPTER}{dot}{last}"


class Qwen3VLConverter(_FamilyConverter):
    """Qwen3-VL ↔ DCP, adapters of it, and merging them."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")


class Qwen35Converter(_FamilyConverter):
    """Qwen3.5 ↔ DCP, adapters of it, and merging them."""

    model_types = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
    other_flags: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "dcp_to_hf": {"dcp_dir": "load_dir", "save_hf_dir": "save_dir", "origin_hf_dir": "model_assets_dir"}
    }


class Mistral3Converter(_FamilyConverter):
    """Mistral 3 ↔ DCP, adapters of it, and merging them."""

    model_types = ("mistral3",)


class MOSSTTSConverter(_FamilyConverter):
    """MOSS-TTS with a delay pattern ↔ DCP, adapters of it, and merging them."""

    model_types = ("moss_tts_delay",)


_EXPERTS = KeyMap(
    [
        KeyRule(
            ("{at*}.experts.{e}.gate_proj.weight", "{at*}.experts.{e}.up_proj.weight"),
            "{at*}.experts.gate_up_proj",
            (Stack(0), Concat(1)),
        ),
        KeyRule("{at*}.experts.{e}.down_proj.weight", "{at*}.experts.down_proj", (Stack(0),)),
    ],
    keep_others=True,
)
"""Experts one by one → stacked as transformers' modules hold them: [E, 2·inner, hidden] and [E, hidden, inner]."""


class ExpertMergeDcpConverter(GenericDCPConverter):
    """Experts stored one by one on the hub, stacked in DCP; the other keys as they are."""

    def hf_to_dcp(  # type: ignore[override]
        self,
        hf_dir: Path,
        save_dir: Path,
        dcp_prefix: str = "",
        hf_prefix: str = "",
        overwrite: bool = False,
        verify: bool = True,
    ) -> Converted:
        """Write a folder with one tensor for each expert as a checkpoint with one for all experts of a layer.

        Args:
            hf_dir: The folder with config.json and the safetensors.
            save_dir: The folder to write: release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: What the checkpoint's names begin with, in place of hf_prefix.
            hf_prefix: What of the folder's keys dcp_prefix replaces.
            overwrite: Replace what an earlier conversion wrote to save_dir.
            verify: Read everything back and compare.
        """
        with open_weights(hf_dir, MAPPED_BYTES) as stored:
            ledger = SourceLedger(stored, hf_dir)
            check_prefix("--hf_prefix", hf_prefix, ledger.tensors, hf_dir)
            conversion = Conversion(
                sources=[hf_dir],
                ledgers=[ledger],
                files={layout.RELEASE: DcpFolder(renamed(_mapped(_EXPERTS, ledger), hf_prefix, dcp_prefix))},
                layout={"kind": "dcp", "names": "folder", "experts": "stacked"},
                texts={layout.TRACKER: f"{layout.RELEASE}\n"},
            )
            return convert(conversion, save_dir, Writing(overwrite, verify), stream=sys.stderr)

    def dcp_to_hf(  # type: ignore[override]
        self,
        hf_dir: Path,
        dcp_dir: Path,
        save_dir: Path,
        dcp_prefix: str = "",
        hf_prefix: str = "",
        overwrite: bool = False,
        verify: bool = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Converted:
        """Write a checkpoint with stacked experts as a folder with one tensor for each expert.

        Args:
            hf_dir: The model's own folder: configuration, tokenizer, processor.
            dcp_dir: The folder with the tracker, its release/ or an iter_*/.
            save_dir: The folder to write.
            dcp_prefix: What the checkpoint's names begin with.
            hf_prefix: What the folder's keys begin with in its place.
            overwrite: Replace what an earlier conversion wrote to save_dir.
            verify: Read everything back and compare.
            max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        """
        step = find_step(dcp_dir)
        ledger = SourceLedger(DcpReader(step).model_tensors(), step)
        check_prefix("--dcp_prefix", dcp_prefix, ledger.tensors, step)
        rule = DtypeRule.of_source(hf_dir)
        held = renamed(_mapped(_EXPERTS.inverse, ledger), dcp_prefix, hf_prefix)
        made = {key: rule.cast(key, tensor) for key, tensor in held.items()}
        if any(hf_dir.glob("*.safetensors")):
            check_same_tensors(made, step, hf_dir)
        files, texts = safetensors_files(made, max_shard_bytes)
        conversion = Conversion(
            sources=[step, hf_dir],
            ledgers=[ledger],
            files=files,
            layout={"kind": "hf"},
            copies=asset_files(hf_dir),
            texts=texts,
        )
        return convert(conversion, save_dir, Writing(overwrite, verify), stream=sys.stderr)


def _mapped(key_map: KeyMap, ledger: SourceLedger) -> dict[str, LazyTensor]:
    steps = key_map.steps(ledger.tensors)
    made = made_by(steps)
    if made.keys() == ledger.tensors.keys():
        patterns = chain.from_iterable(rule.sources for rule in key_map.rules)
        raise ModelFolderError(
            f"no key is one of {' or '.join(patterns)}",
            where=str(ledger.where),
            way_out="Use GenericDCPConverter for a model whose experts stay as they are.",
        )
    return in_natural_order(made)


# --- checkpoints of adapters ------------------------------------------------------------------------------------------

_DOWN = ".lora_A.weight"
_LENGTH = ".lora_magnitude_vector"


def merge_checkpoint(
    base: Path, source: Path, target: Path, modules: Sequence[str], scaling: float | None, *, overwrite: bool = False
) -> merge.Merged | export.Exported:
    """Write a model with the adapters of a checkpoint added.

    Args:
        base: The model that they were trained on.
        source: A run, whose newest step is taken; a step; or the folder of a conversion.
        target: The folder to write.
        modules: Parts of names: only layers that have one of them get their adapters. Empty: all.
        scaling: What B·A is multiplied by; None: as the run says it, or the adapter_config.json beside it, else 1.
        overwrite: Replace what an earlier merge wrote there.

    Raises:
        ModelFolderError: It holds no adapters of these layers, or more than adapters; or they are of another model.
        MMError: As `mm merge`.
    """
    step = find_step(source)
    tensors, left, others = _adapters_in(step, modules)
    if not tensors:
        what = "holds no adapters" + (" of these layers" if left else "")
        raise ModelFolderError(what, where=str(step), key="lora_target_modules" if left else "lora_dcp_dir")
    if left:
        say(f"note: adapters of {len(left)} layers are not added, as {left[0]}: see --lora_target_modules", err=True)
    elif scaling is None and (step / MANIFEST).is_file():  # the run knows all about them
        return export.run(ExportRequest(step, target, model_folder=base, merge=True, overwrite=overwrite))
    if others:
        raise ModelFolderError(
            f"holds {len(others)} tensors that are no adapters and would be lost",
            where=str(step),
            key=others[0],
            way_out="Write the whole model of a run with mm export --merge.",
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_safetensors(tensors, folder / PEFT_WEIGHTS, {"format": "pt"})
        ranks = {key.removesuffix(_DOWN): len(tensor) for key, tensor in tensors.items() if key.endswith(_DOWN)}
        settings: dict[str, object] = {"peft_type": "LORA", "use_dora": any(key.endswith(_LENGTH) for key in tensors)}
        # B·A as it is: the scale of the merge is the whole factor.
        settings["r"] = settings["lora_alpha"] = next(iter(ranks.values()), 1)
        if len(set(ranks.values())) > 1:
            own = {layer.removeprefix(PEFT_PREFIX): rank for layer, rank in ranks.items()}
            settings |= {"rank_pattern": own, "alpha_pattern": own}
        (folder / PEFT_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        factor = _factor(step, scaling)
        return merge.run(MergeRequest(base, (folder,), out=target, scales=(factor,), overwrite=overwrite))


def _adapters_in(step: Path, modules: Sequence[str]) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """A checkpoint's adapters under PEFT's keys, the layers that are left out, and names of what else was trained."""
    tensors: dict[str, torch.Tensor] = {}
    left: dict[str, None] = {}
    others: list[str] = []
    for name, stored in DcpReader(step).model_tensors().items():
        if ".lora_" not in name:
            if not name.startswith(PEFT_PREFIX):  # else the base that they stand on
                others.append(name)
            continue
        plain = name.removeprefix(UNDER_ADAPTERS).removeprefix(PEFT_PREFIX)
        layer, _, side = plain.partition(".lora_")
        if modules and not any(word in layer for word in modules):
            left[layer] = None
            continue
        side = side.replace(f".{ADAPTER}", "")
        if side == "magnitude_vector.weight":
            side = "magnitude_vector"
        tensors[f"{PEFT_PREFIX}{layer}.lora_{side}"] = stored.read().contiguous()
    return tensors, list(left), others


def _factor(step: Path, said: float | None) -> float:
    """What B·A is multiplied by."""
    trained = _trained_factor(step)
    if said is None:
        if trained is None:
            return 1.0
        return trained
    if trained is not None and trained != said:
        say(f"note: --scaling is {said:g}, and the adapters were trained with {trained:g}", err=True)
    return said


def _trained_factor(step: Path) -> float | None:
    """Alpha / rank, by the configuration of the run or by PEFT's settings beside the checkpoint."""
    found: object = None
    for file, keys in ((step / MANIFEST, ("context", "config", "training", "lora")), (step.parent / PEFT_CONFIG, ())):
        if found is None and file.is_file():
            found = read_json_object(file, ModelFolderError)
            for key in keys:
                found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    rank, alpha = found.get("rank", found.get("r")), found.get("alpha", found.get("lora_alpha"))
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        return None
    return alpha / (rank**0.5 if found.get("use_rslora") else rank)
