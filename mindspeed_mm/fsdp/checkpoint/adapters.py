"""The adapters of a model: written as a folder of their own, in the layout that its library reads, or added to the
base, so that the model is as one without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, copy_assets, drafted_folder, write_weights
from mindspeed_mm.checkpoint.lazy_tensor import Computed, LazyTensor
from mindspeed_mm.checkpoint.original.lora_names import (
    ALPHA_BESIDE_LAYERS,
    LayerAdapter,
    LoraFormat,
    renamed_adapters,
)
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.checkpoint.base_weights import open_base
from mindspeed_mm.fsdp.checkpoint.hf import folder_tensors, hub_tensors, live_tensors, remember_layout, with_beside
from mindspeed_mm.fsdp.checkpoint.tree import tied_names
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import write_own_settings
from mindspeed_mm.fsdp.models.loading.folder import kept_beside
from mindspeed_mm.fsdp.models.lora.files import (
    ALPHA_END,
    DIFFUSERS_PREFIX,
    DIFFUSERS_WEIGHTS,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    TOKENS,
    diffusers_metadata,
    file_key,
    peft_settings,
)
from mindspeed_mm.fsdp.models.lora.merge import deltas_of_run, merge_into
from mindspeed_mm.fsdp.models.lora.names import (
    INITIAL,
    LoraReport,
    adapter_weight,
    base_name,
    initial_weights,
    is_adapter_weight,
    split_adapter_weight,
)
from mindspeed_mm.fsdp.models.structure.stages import whole_of
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.ranks import Ranks


def save_adapters(
    model: nn.Module,
    folder: Path,
    base: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    ranks: Ranks | None = None,
    write_view: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of a live model, sharded or not, and what is trained whole beside them. Called by all ranks;
    each tensor is gathered by itself, rank 0 writes.

    Args:
        model: With adapters by `apply_lora`.
        folder: Appears when complete. For transformers' models what `PeftModel.from_pretrained` takes, for generators
            what a pipeline's `load_lora_weights` takes.
        base: The base model's folder; PEFT notes it.
        dtype: None writes full precision, as it is trained.
        overwrite: Replace an existing folder.
        ranks: All of them; made here when not given, which is itself a collective.
        write_view: Adds to the folder how training looked at its rows.
    """
    ranks = ranks or Ranks()
    with drafted_folder(folder, ranks, overwrite=overwrite) as draft:
        write_adapters(whole_of(model), live_tensors(model), draft, base, dtype=dtype, ranks=ranks)
        ranks.first("writing the view", lambda: write_view(draft) if write_view else None)


def write_adapters(
    model: nn.Module,
    tensors: Mapping[str, LazyTensor],
    draft: Path,
    base: str | Path,
    *,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    lora_format: LoraFormat = "diffusers",
) -> None:
    """Write adapters into a folder that exists.

    Args:
        model: With adapters; it may be without weights.
        tensors: What is trained, by its names in the model.
        draft: Where to.
        base: As above.
        dtype: As above.
        ranks: Given when reading is a collective.
        lora_format: Of a generator's adapters, whose names they bear.

    Raises:
        UsageError: `lora_format` cannot hold these adapters.
    """
    lora = facts_of(model).lora
    assert lora is not None, "the model has no adapters"
    ranks = ranks or Ranks()
    tensors = of_untouched_base(tensors)
    if facts_of(model).kind.library == "diffusers":
        stem = DIFFUSERS_WEIGHTS.removesuffix(".safetensors")
        for folder, own, report in _of_transformers(model, tensors, lora):
            made = {file_key(name, DIFFUSERS_PREFIX): tensor for name, tensor in own.items()}
            metadata = diffusers_metadata(report)
            if lora_format != "diffusers":
                made, metadata = _renamed(model, folder, own, report, lora_format), {}
            elif _transformer_class(model) in ALPHA_BESIDE_LAYERS:
                made, metadata = made | _alphas(own, report), {}
            # In full precision whatever weights are written in: a rounded alpha scales every update.
            rule = DtypeRule({key: torch.float32 for key in made if key.endswith(ALPHA_END)}, dtype)
            ranks.first("making the folder", partial((draft / folder).mkdir, exist_ok=True))
            write_weights(made, draft / folder, rule, inf, ranks, stem=stem, metadata=metadata)
        return
    # PEFT keeps the rows of new tokens under keys of their own, apart from the adapters.
    rows = _token_rows(lora, tensors)
    others = {name: tensor for name, tensor in tensors.items() if name not in lora.token_rows}
    made = {file_key(name, PEFT_PREFIX): tensor for name, tensor in _with_aliases(model, others).items()} | rows
    write_weights(made, draft, DtypeRule({}, dtype), inf, ranks, stem=PEFT_WEIGHTS.removesuffix(".safetensors"))
    settings = peft_settings(lora, str(base), _task_type(model))
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    ranks.first("writing the settings", lambda: (draft / PEFT_CONFIG).write_text(text, encoding="utf-8"))


def _token_rows(lora: LoraReport, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The rows of new tokens under PEFT's keys; it ties those of a shared weight itself."""
    made: dict[str, LazyTensor] = {}
    for name, rows in lora.token_rows.items():
        weight = tensors[name]
        shape = (len(rows), *weight.shape[1:])
        key = f"{PEFT_PREFIX}{name.removesuffix('.weight')}{TOKENS}"
        made[key] = Computed([weight], partial(_rows_of, rows), shape, weight.dtype)
    return made


def _rows_of(rows: Sequence[int], read: list[torch.Tensor]) -> torch.Tensor:
    return read[0][list(rows)]


def _of_transformers(
    model: nn.Module, tensors: Mapping[str, LazyTensor], lora: LoraReport
) -> Iterator[tuple[str, Mapping[str, LazyTensor], LoraReport]]:
    """What is written of a generator's adapters: all of it, or, of two transformers, each by itself in a folder of its
    name, as `load_lora_weights` of pipelines takes them."""
    adapter = facts_of(model).adapter
    assert adapter is not None
    if len(adapter.transformers) == 1:
        yield "", tensors, lora
        return
    for part in adapter.transformers:
        start = f"{part}."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        layers = set()
        for name in own:
            found = split_adapter_weight(name)
            if found is not None:
                layers.add(found[0])
        yield part, own, replace(lora, peft_targets=tuple(sorted(layers)))


def _transformer_class(model: nn.Module) -> str:
    adapter = facts_of(model).adapter
    assert adapter is not None
    return adapter.transformer_class


def _alphas(tensors: Mapping[str, LazyTensor], lora: LoraReport) -> dict[str, LazyTensor]:
    """Alpha of each layer, by its key in a file of diffusers."""
    made: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        layer, side = split_adapter_weight(name) or ("", "")
        if side == "A":
            value = torch.tensor(lora.scale * tensor.shape[0])
            made[f"{DIFFUSERS_PREFIX}{layer}{ALPHA_END}"] = Computed([], partial(_as_it_is, value), (), torch.float32)
    return made


def _as_it_is(value: torch.Tensor, _: object) -> torch.Tensor:
    return value


def _renamed(
    model: nn.Module, part: str, tensors: Mapping[str, LazyTensor], lora: LoraReport, lora_format: LoraFormat
) -> dict[str, LazyTensor]:
    """Adapters of one transformer under another tool's names.

    Args:
        model: With adapters.
        part: Name of the transformer in the model; empty where it is all of it.
        tensors: What is trained of it, by its own names.
        lora: Its adapters.
        lora_format: Whose names.
    """
    halves: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        layer, side = split_adapter_weight(name) or (base_name(name), "")
        if side not in ("A", "B"):
            raise UsageError(
                f"is not a plain adapter of a linear layer, which is all that {lora_format} knows",
                key=layer,
                way_out="Export with --lora-format diffusers, or with --merge.",
            )
        halves.setdefault(layer, {})[side] = tensor
    start = part and f"{part}."
    shapes = {}
    for name, parameter in model.named_parameters():
        if name.startswith(start) and not is_adapter_weight(name):
            shapes[base_name(name).removeprefix(start)] = tuple(parameter.shape)
    layers = {layer: LayerAdapter(sides["A"], sides["B"], lora.scale) for layer, sides in halves.items()}
    return renamed_adapters(layers, shapes, _transformer_class(model), lora_format)


def of_untouched_base(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Adapters whose base gave away what they started with, as adapters of the base as it was, with twice the rank:
    W' + s·B·A = W + s·(B·A − B0·A0) = W + s·[B | −B0]·[A ; A0], as PEFT's `subtract_mutated_init` has it.

    Args:
        tensors: What is trained, by its names in the model.
    """
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(INITIAL)}
    for name in tensors:
        if name.endswith(INITIAL[0]):
            layer = name.removesuffix(f".{INITIAL[0]}")
            first_a, first_b = map(tensors.__getitem__, initial_weights(layer))
            a, b = tensors[adapter_weight(layer, "A")], tensors[adapter_weight(layer, "B")]
            (rank, inputs), outputs = a.shape, b.shape[0]
            rows = Computed([a, first_a], lambda read: torch.cat(read), (2 * rank, inputs), a.dtype)
            columns = Computed(
                [b, first_b], lambda read: torch.cat([read[0], -read[1]], dim=1), (outputs, 2 * rank), b.dtype
            )
            # Lazy: each is computed when its file is written.
            made |= {adapter_weight(layer, "A"): rows, adapter_weight(layer, "B"): columns}
    return made


def _with_aliases(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """PEFT copies each module that is trained whole: a weight that two of them share stands in its files twice."""
    named = dict(tensors)
    for alias, first in tied_names(model).items():
        if first in tensors:
            shared = tensors[first]
            named[alias] = Computed([shared], lambda read: read[0], shared.shape, shared.dtype)  # memory of its own
    return named


def _task_type(model: nn.Module) -> str | None:
    writes_text = hasattr(model, "can_generate") and model.can_generate()
    is_two_sided = setting_of(setting_of(model, object, "config"), bool, "is_encoder_decoder")
    if writes_text and not is_two_sided:
        return "CAUSAL_LM"
    return None


# --- added to the base ------------------------------------------------------------------------------------------------


@contextmanager
def merged_tensors(model: nn.Module, outline: nn.Module, base: Path) -> Iterator[dict[str, LazyTensor]]:
    """The tensors of a model that trains adapters, sharded or not, by the names of the base's folder; inside, they can
    be read. Adapters are gathered when they are read: all ranks read the same ones in the same order.

    Args:
        model: With adapters.
        outline: The same model without, parameters on meta.
        base: Folder that the adapters were put on.

    Raises:
        ModelFolderError: The folder is not the model's.
    """
    lora = facts_of(model).lora
    assert lora is not None
    trained = of_untouched_base(live_tensors(model))
    whole = {name: tensor for name, tensor in trained.items() if not is_adapter_weight(name)}
    with open_base(outline, base) as stored:
        tensors = folder_tensors(outline, stored, whole)
        remember_layout(outline, base)
        merge_into(tensors, [(deltas_of_run(lora, trained, outline), 1.0)], None)
        # What is trained whole beside the adapters replaces the base's.
        tensors |= whole
        yield with_beside(hub_tensors(outline, tensors), kept_beside(outline, stored))


def save_merged_hf(model: nn.Module, outline: nn.Module, folder: Path, base: Path, *, ranks: Ranks) -> None:
    """Write it as a whole Hugging Face folder. Called by all ranks, rank 0 writes.

    Args:
        model: With adapters.
        outline: The same model without, parameters on meta.
        folder: Replaced when the new one is complete.
        base: Folder that the adapters were put on.
        ranks: All of them.

    Raises:
        ModelFolderError: The base is not the model's.
    """
    with merged_tensors(model, outline, base) as made, drafted_folder(folder, ranks, overwrite=True) as draft:
        rule = ranks.first("reading the source", lambda: DtypeRule.of_source(base, None))
        ranks.first("copying", lambda: copy_assets(base, draft, None))
        ranks.first("writing settings", lambda: write_own_settings(outline, draft))
        write_weights(made, draft, rule, MAX_SHARD_BYTES, ranks)
