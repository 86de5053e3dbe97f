"""Tokens that `model.add_tokens` adds: their rows in the embedding and the output head of a transformers model.

A row starts as the mean of the rows of the tokens that the tokenizer had before, in the embedding and in the head alike
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; `resize_token_embeddings` of
transformers draws from a normal distribution of this mean). Logits of the other tokens do not change; the softmax has
more terms.

New tokens take the rows that a folder has in excess of its tokenizer. Where these do not suffice, rows are appended, as
many as keep the largest power of two up to 64 that divides the number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor, LazyTensor, MeanRows, WithRows
from mindspeed_mm.core.errors import ConfigError, ModelFolderError, Problem, told_as
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import load_model_config, trained_config
from mindspeed_mm.fsdp.utils.added_tokens import extend_tokenizer, holds_tokens
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, embedding_of, head_of, name_of, weight_of
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.params.model_args import ModelArguments

KEY = "model.add_tokens"
_MOST_ROUNDED = 64
_PER_LAYER = "embed_tokens_per_layer"
"""Gemma 3n's further embedding, which has a number of rows of its own."""


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that are new to a folder's tokenizer, and what they change in its model."""

    ids: Mapping[str, int]
    """Token → its number; only of those that the tokenizer did not have."""
    known: tuple[str, ...]
    """Tokens that it had."""
    rows_before: int
    """Rows of the folder's embedding."""
    rows: int
    """Rows of the model's."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters with a row for each token, each once."""

    @property
    def new_rows(self) -> list[int]:
        """Rows with new values, in rising order: of new tokens, and those appended to round up their number."""
        return sorted({*self.ids.values(), *range(self.rows_before, self.rows)})

    def initial(self, stored: LazyTensor) -> LazyTensor:
        """A stored weight with the first values of the new rows."""
        rows = self.new_rows
        if not rows:
            return stored
        return WithRows(stored, MeanRows(stored, min(rows), len(rows)), rows)

    def __str__(self) -> str:
        parts = []
        if self.ids:
            first, last = min(self.ids.values()), max(self.ids.values())
            parts.append(f"{len(self.ids)} new (ids {first} to {last}), {self.rows:,} rows")
            if self.rows > self.rows_before:
                parts[-1] += f" instead of {self.rows_before:,}"
        if self.known:
            shown = ", ".join(self.known[:5]) + (" …" if len(self.known) > 5 else "")
            parts.append(f"{len(self.known)} that the tokenizer already has ({shown})")
        return "; ".join(parts)


def resolve_added_tokens(
    folder: Path, tokens: Sequence[str], special: Sequence[str], *, trust_remote_code: bool = False
) -> AddedTokens:
    """What adding tokens to a folder's tokenizer means for its model. Nothing is changed.

    Raises:
        ModelFolderError: The folder has no fast tokenizer, or a model without a vocabulary.
    """

    def with_key(problem: Problem) -> Problem:
        return (
            problem if problem.key.startswith("model.") else Problem(problem.what, problem.where, KEY, problem.way_out)
        )

    with told_as(with_key):
        processor = load_processor(folder, trust_remote_code=trust_remote_code)
        ids = extend_tokenizer(tokenizer_of(processor), tokens, special, where=str(folder))
    before = rows_of_folder(folder, trust_remote_code=trust_remote_code)
    if before is None:
        raise ModelFolderError(
            "names no vocab_size, so no tokens can be added", where=str(folder / "config.json"), key=KEY
        )
    known = tuple(token for token in (*tokens, *special) if token not in ids)
    return AddedTokens(ids, known, before, rows_for(before, list(ids.values())))


def rows_for(before: int, ids: Sequence[int]) -> int:
    """Rows of a model of `before` rows once it has some for these tokens."""
    needed, multiple = max((before, *(number + 1 for number in ids))), gcd(before, _MOST_ROUNDED)
    return -(-needed // multiple) * multiple


def rows_of_folder(folder: Path, *, trust_remote_code: bool = False) -> int | None:
    """Rows of the embedding of a folder's model; None where its configuration does not say."""
    config = trained_config(load_model_config(folder, trust_remote_code=trust_remote_code))
    rows = attribute_at(_text_config(config), "vocab_size")
    if isinstance(rows, int):
        return rows
    return None


def tokens_of_section(model_args: ModelArguments, config: object) -> AddedTokens | None:
    """The tokens that a `model` section adds, noted in the configuration from which the model will be built; None where
    it adds none.

    Raises:
        ConfigError: The model is not one of transformers, read from a folder.
        ModelFolderError: As `resolve_added_tokens`.
    """
    tokens, special = model_args.add_tokens, model_args.add_special_tokens
    if not (tokens or special):
        return None
    text = _text_config(config)
    if text is None or not model_args.model_name_or_path:
        raise refusal(model_args, "the model is not built by transformers from a folder")
    folder = Path(model_args.model_name_or_path)
    added = resolve_added_tokens(folder, tokens, special, trust_remote_code=model_args.trust_remote_code)
    text.vocab_size = added.rows
    return added


def refuse_tokens(model_args: ModelArguments, why: str) -> None:
    """Raise `ConfigError` where a section adds tokens to a model that cannot have them."""
    if model_args.add_tokens or model_args.add_special_tokens:
        raise refusal(model_args, why)


def refusal(model_args: ModelArguments, why: str) -> ConfigError:
    """The error for a section that adds tokens to a model that cannot have them."""
    key = KEY if model_args.add_tokens else "model.add_special_tokens"
    return ConfigError(f"cannot add tokens: {why}", key=key, way_out="Remove the key.")


def note_added_tokens(model: nn.Module, added: AddedTokens, model_args: ModelArguments) -> None:
    """Find the parameters with a row for each token of a built model, and note the tokens on it.

    Raises:
        ConfigError: They do not have as many rows as the configuration asks for; another embedding has a row for each
            token, too.
    """
    embedding, head = embedding_of(model), head_of(model)
    if embedding is None:
        raise refusal(model_args, f"{type(model).__name__} has no embedding of tokens")
    modules = [embedding] if head is None else [embedding, head]
    for module in modules:
        weight = attribute_at(module, "weight")
        if not isinstance(weight, torch.Tensor) or len(weight) != added.rows:
            what = f"'{name_of(model, module)}' does not follow vocab_size"
            raise refusal(model_args, f"{what} of {type(model).__name__}")
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and module is not embedding
            and (module.num_embeddings in (added.rows_before, added.rows) or name.endswith(_PER_LAYER))
        ):
            raise refusal(model_args, f"'{name}' is another embedding of tokens, which would lack rows")
    own = {id(p) for module in modules for p in module.parameters(recurse=False) if added.rows in p.shape[:1]}
    parameters = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    facts_of(model).added_tokens = replace(added, parameters=tuple(parameters))


def check_trainable(model: nn.Module, added: AddedTokens) -> None:
    """Raise `ConfigError` where `model.freeze` freezes rows of new tokens."""
    for name in added.parameters:
        if added.ids and not model.get_parameter(name).requires_grad:
            raise ConfigError(
                f"freezes {name}, and the rows of new tokens in it ({KEY}) must be trained",
                key="model.freeze",
                way_out="Leave it out of the patterns.",
            )


def _text_config(config: object) -> Any:
    """The section of a configuration of transformers that describes the decoder of text; None for another object."""
    get = attribute_at(config, "get_text_config")
    if get is not None:
        return get()
    return None


def with_new_rows(
    model: nn.Module, tensors: Mapping[str, LazyTensor], folder: Path, names: Mapping[str, str] | None = None
) -> dict[str, LazyTensor]:
    """Stored tensors of a model, with rows for the tokens that are added to it. A folder that was written with these
    tokens has their rows already.

    Args:
        model: From `ModelHub.build`.
        tensors: By name in the model, without adapters.
        folder: Where they are stored.
        names: Further names of parameters → the first one.
    """
    added = facts_of(model).added_tokens
    if added is None or not added.ids:
        return dict(tensors)
    is_written_with = holds_tokens(folder, added.ids)
    made = dict(tensors)
    for key, tensor in tensors.items():
        if (names or {}).get(key, key) not in added.parameters:
            continue
        if tensor.shape[0] == added.rows_before and not (is_written_with and added.rows == added.rows_before):
            made[key] = added.initial(tensor)
    return made


@torch.no_grad()
def grow_live(model: Any, ids: Sequence[int]) -> None:
    """Append rows to a loaded transformers model until it has some for these tokens; they start as they do in training.
    A model that has enough of them stays as it is."""
    embedding = embedding_of(model)
    before = len(weight_of(embedding)) if embedding is not None else 0
    new = list(range(before, rows_for(before, ids)))
    if embedding is None or not new:
        return
    model.resize_token_embeddings(new[-1] + 1, mean_resizing=False)
    done: set[int] = set()
    for module in filter(None, (embedding_of(model), head_of(model))):
        for parameter in module.parameters(recurse=False):
            if new[-1] + 1 in parameter.shape[:1] and id(parameter) not in done:
                done.add(id(parameter))
                parameter[new] = MeanRows(HeldTensor(parameter.detach()), before, 1).read().to(parameter.device)


def write_rows_in_config(draft: Path, folder: Path, added: AddedTokens) -> None:
    """Write the number of rows into a copy of a folder's config.json.

    Raises:
        ModelFolderError: transformers would read another number from it.
    """
    if added.rows == added.rows_before:
        return
    whole = load_model_config(folder)
    path = draft / "config.json"
    content = read_json_object(path, ModelFolderError)
    section = content
    for name in _way_to(whole, _text_config(trained_config(whole))):
        section = section.get(name, section)  # older files have the settings of the text model at the top
    for holder in (section, content):
        if holder is section or holder.get("vocab_size") == added.rows_before:
            holder["vocab_size"] = added.rows
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if attribute_at(_text_config(trained_config(load_model_config(draft))), "vocab_size") != added.rows:
        raise ModelFolderError(
            f"transformers does not read the vocabulary of {added.rows} rows from it", where=str(path), key="vocab_size"
        )


def _way_to(config: object, target: object) -> list[str]:
    """Names of the sections that lead to one inside a configuration."""
    for name in attribute_at(config, "sub_configs", {}):
        section = attribute_at(config, name)
        if section is target:
            return [name]
        if section is not None and (inner := _way_to(section, target)):
            return [name, *inner]
    return []
