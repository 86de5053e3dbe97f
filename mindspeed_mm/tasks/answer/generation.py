"""Models of Hugging Face folders, loaded to answer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.checkpoint.dequantized import sections_of
from mindspeed_mm.checkpoint.hf_folder import config_dtype
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.models.behaviour.attention import attention_name, choose_attention
from mindspeed_mm.fsdp.models.behaviour.experts import fit_experts
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import (
    OTHERS,
    check_all_loaded,
    load_model_config,
    native_class,
    read_config,
    trained_config,
)
from mindspeed_mm.fsdp.models.vocabulary import check_vocabulary
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.speech.voice import is_speaker
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.answer.peft_loading import check_peft_folder, check_tokens, grow_for_adapters, load_peft
from mindspeed_mm.tasks.model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_generator(
    folder: Path,
    lora: Path | None = None,
    view: RowsView | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Generator:
    """The model of a Hugging Face folder on this process's device, in the type that its weights are stored in.

    Args:
        folder: With weights, configuration and processor; the weights may be in Megatron's layout.
        lora: Adapters to put beside the weights, as PEFT has them.
        view: How rows were shown to the model; None: as the folder says.
        adapters: Folders of adapters that rows may choose by these names, as PEFT has them.

    Raises:
        UsageError: There are adapters for all rows as well, or the model speaks and writes nothing.
        ModelFolderError: Weights, configuration or processor are missing or broken, or the adapters of another model.
    """
    if lora is not None and adapters:
        raise UsageError(
            "there are adapters for all rows as well", where=str(lora), key="--adapter", way_out="Name them."
        )
    if is_speaker(folder):
        way_out = "Let it speak: mm infer --speak FILE; score it: mm evaluate --recogniser FOLDER."
        raise UsageError("the model speaks, and writes no answers", where=str(folder), way_out=way_out)
    if lora is not None:
        check_peft_folder(lora, "--lora")
    for path in (adapters or {}).values():
        check_peft_folder(path, "--adapter")
    encoder = QuestionEncoder(folder, view)  # first: it makes torchvision importable
    model = load_model(folder)
    _tell_attention(model)
    chosen = [("--adapter", path) for path in (adapters or {}).values()]
    if lora is not None:
        chosen.append(("--lora", lora))
    for key, path in chosen:
        check_tokens(path, encoder.tokenizer, key)
        grow_for_adapters(model, path, key)
    check_vocabulary(model, encoder.tokenizer, where=str(folder))
    if lora is not None:
        model = load_peft(model, lora)
    for name, path in (adapters or {}).items():
        model = load_peft(model, path, name, "--adapter")
    return Generator(model.to(current_device()), encoder, tuple(adapters or ()))


def load_on_ranks(
    source: ModelSource,
    view: RowsView,
    plan: Path | None,
    ranks: Ranks,
    adapters: Mapping[str, Path] | None = None,
) -> Generator:
    """The whole model on each rank or, by the plan of a YAML, this rank's part of it.

    Raises:
        MMError: As `load_generator` and `load_over_ranks`.
    """
    if plan is None:
        return load_generator(source.folder, source.lora, view, adapters)
    from mindspeed_mm.tasks.answer.spread import load_over_ranks  # all of training's plans: half a second

    return load_over_ranks(source, view, plan, ranks, adapters)


def load_model(folder: Path) -> Any:
    """The model of a Hugging Face folder, in the type that its weights are stored in.

    Raises:
        ModelFolderError: Weights or configuration are missing or broken.
    """
    divided = is_megatron_folder(folder)
    if not divided:
        find_entries(folder)  # says what is wrong with weight files in words
    joins = divided or any(sections_of(read_config(folder)))
    config = trained_config(load_model_config(folder))
    model_class: Any = native_class(config, folder)
    try:
        with quiet("transformers"):
            if joins:
                model, report = _joined_model(model_class, config, folder)
            else:
                model, report = model_class.from_pretrained(
                    folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
                )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        what, way_out = f"the model cannot be loaded: {first_line}", "Take the folder as it was published or exported."
        raise ModelFolderError(what, where=str(folder), way_out=way_out) from error
    unexpected = [key for key in report.get("unexpected_keys") or () if not re.match(OTHERS, key)]
    check_all_loaded({**report, "unexpected_keys": unexpected}, folder)
    fit_experts(model, model.dtype)
    _choose_attention_everywhere(model.config)
    _take_fastest_attention(model)
    return model


def _take_fastest_attention(model: PreTrainedModel) -> None:
    """Put the fastest attention kernel that does what a model needs into force. The model keeps the name that
    transformers gave its attention: the kernel stands below torch's own function."""
    choice = choose_attention(None, type(model), config=model.config, param_dtype=model.dtype)
    name = str(model.config._attn_implementation)
    facts_of(model).attention = choice._replace(name=name, need=choice.need if name == "sdpa" else None)


def _tell_attention(model: PreTrainedModel) -> None:
    """Say by which kernel attention is computed, and what would bring a faster one, where there was something to choose
    from."""
    choice = facts_of(model).attention
    if choice is None or not (choice.kernel() or choice.install) or os.environ.get("RANK", "0") != "0":
        return
    say(f"attention: {attention_name(model)}", err=True)
    if choice.install:
        say(f"faster: {choice.install}", err=True)


def _choose_attention_everywhere(config: PreTrainedConfig) -> None:
    """Give sections of a configuration that have no attention implementation that of the whole.

    transformers 5.23 chooses none for a section whose modules are no model of their own, as Fun-ASR-Nano's adaptor. Its
    masks then have the wrong form: padding is heard, and a row's answer depends on what shares its batch.
    """
    for name in config.sub_configs:
        section = getattr(config, name, None)
        if section is not None and getattr(section, "_attn_implementation", "") is None:
            section._attn_implementation = config._attn_implementation


def _joined_model(model_class: Any, config: Any, folder: Path) -> tuple[Any, JsonObject]:
    """The model of a folder in Megatron's layout, or of quantised weights, and transformers' report of its loading."""
    from transformers import GenerationConfig  # seconds

    from mindspeed_mm.checkpoint.stored_weights import open_stored  # all of Megatron's layouts

    with open_stored(folder, config.to_dict()) as stored:
        weights = {key: tensor.read() for key, tensor in stored.items()}
    dtype = config_dtype(folder) or next(iter(weights.values())).dtype
    model, report = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, report
