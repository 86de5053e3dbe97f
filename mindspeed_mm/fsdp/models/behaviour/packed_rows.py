"""Lets a language model take packed rows: documents one behind the other in one row, none of which sees another.

Attention learns of the borders by itself (`ops.attention`). What is left: layers with a state are run document by
document (`SegmentedForward`), towers do not get the text's borders, masks of image blocks are made here, and models
that are not known to keep documents apart are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from mindspeed_mm.core.errors import ConfigError, DataError, Problem
from mindspeed_mm.core.patterns import holding_others
from mindspeed_mm.fsdp.ops.attention import (
    ATTENTION_NAME,
    PADDING_KEY,
    check_borders,
    register_attention,
    without_borders,
)
from mindspeed_mm.fsdp.ops.attention_kernels import OF_PACKAGES
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.ops.host_values import host_values, outside_graphs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


KEY = "data.dataset_param.basic_parameters.packing"
_ATTENTION_KEY = "model.attn_implementation"
_KNOW_BORDERS = (ATTENTION_NAME, *OF_PACKAGES)
"""Kernels that read the borders."""
_KEPT_APART = frozenset({"full_attention", "sliding_attention", "reference_sliding_attention", "minimax_m3_sparse"})
"""Kinds of layers that see one document at a time."""
_WITH_STATE = frozenset({"linear_attention", "conv"})
"""Kinds of layers that see one document at a time where they are run document by document."""
_BLOCKS = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "gemma4_unified": "mm_token_type_ids",
    "hrm_text": "token_type_ids",
    "molmo2": "mm_token_type_ids",
}
"""Model type → the batch key that marks blocks, whose tokens see each other both ways: images, or HRM's prefixes."""
_PICTURES = ("pixel_values", "pixel_values_videos")
_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""Of transformers, in which attention classes look their kernels up."""
MOST_MASKED_TOKENS = 16_384
"""Maximum length of a row that needs a mask of T² entries."""


def apply_packed_rows(model: nn.Module, *, attention: str | None = None) -> None:
    """Prepare a model for packed rows, in place; call it before anything is split or sharded. Other batches go through
    as before.

    Args:
        model: Built.
        attention: `model.attn_implementation`.

    Raises:
        ConfigError: The model would mix documents, or it is not known whether it does.
    """
    check_packed_rows(model, attention=attention)
    if keeps_apart(model):
        return
    if _is_of_transformers(model):
        if model.config._attn_implementation not in _KNOW_BORDERS:
            model.set_attn_implementation(register_attention())
        for name in _models_beside_the_decoder(model):
            model.get_submodule(name).register_forward_pre_hook(leave_borders_out, with_kwargs=True)
    for mixer in find_mixers(model):
        replace_forward(mixer, ForwardKind.PACKING, SegmentedForward(mixer))
    if (marks := blocks_key(model)) is not None:
        model.register_forward_pre_hook(_BlockMasks(model, marks), with_kwargs=True)
    model.register_forward_pre_hook(read_positions, with_kwargs=True)


# --- what is refused --------------------------------------------------------------------------------------------------


def check_packed_rows(model: nn.Module, *, attention: str | None = None) -> None:
    """Raise `ConfigError` for what `apply_packed_rows` refuses; the model stays as it is."""
    if keeps_apart(model):
        return
    problems = [*packing_problems(model), *attention_problems(attention, model)]
    if problems:
        raise ConfigError(f"{type(model).__name__} cannot keep samples of one row apart", problems=problems)


def keeps_apart(model: nn.Module) -> bool:
    """Whether a model says that it reads the borders itself, in every part that could look beyond them
    (`keeps_documents_apart`)."""
    return bool(attribute_at(model, "keeps_documents_apart", False))


def packing_problems(model: nn.Module) -> Iterator[Problem]:
    """Why a model cannot take packed rows."""
    for reason in _reasons_against_packing(model):
        yield Problem(reason, key=KEY, way_out="Set it to false.")


def _reasons_against_packing(model: nn.Module) -> Iterator[str]:
    has_mixers = bool(find_mixers(model))
    takes = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    if not takes_any and "cu_seq_lens_q" not in takes:
        yield "the model's forward takes no cu_seq_lens_q, the borders of documents"
    if not _is_of_transformers(model):
        return
    if attribute_at(model, "config.is_encoder_decoder", False):
        yield "the model is an encoder-decoder, which encodes every sample by itself"
        return
    if not _calls_attention_interface(model, has_mixers=has_mixers):
        unnamed = ", or `get_decoder()` does not name its text model" if decoder_of(model) is model else ""
        yield f"the model's attention is not behind transformers' interface{unnamed}"
    if "cross_attention_states" in inspect.signature((decoder_of(model) or model).forward).parameters:
        # Llama 3.2 Vision's: a token in front of its document's pictures sees all of the row, whatever the mask says.
        yield "layers of its text model see the pictures of a whole row, those of other samples with them"
    if attribute_at(model, "_is_stateful", False) and not has_mixers:
        yield "the model's layers carry a state over tokens, and it is not known how to reset it between documents"
    kept_apart = _KEPT_APART
    if has_mixers:
        kept_apart |= _WITH_STATE
    looking_beyond = set(attribute_at(model.config.get_text_config(), "layer_types", ())) - kept_apart
    if looking_beyond:
        yield f"the model has layers of type {', '.join(sorted(looking_beyond))}, which look beyond a document"
    if attribute_at(model, "config.model_type", "") not in _BLOCKS and _joins_blocks(model):
        yield "tokens of its pictures or prefixes see each other both ways, and those of two documents would"


def _joins_blocks(model: nn.Module) -> bool:
    """Whether a model around the decoder makes masks in which blocks of tokens see each other both ways, as Molmo2's
    do: transformers calls the numbers of blocks `block_sequence_ids`."""
    decoder = f"{name_of(model, decoder_of(model))}."
    around = [module for name, module in model.named_modules() if not name or decoder.startswith(f"{name}.")]
    return any(_names_in_code(type(module), "block_sequence_ids") for module in around)


def _names_in_code(kind: type, word: str) -> bool:
    """Whether a method of a class reads, sets or passes something of that name. Compiled code is looked at: to parse
    the source takes a tenth of a second, and fails beside other threads in Python 3.11."""
    for member in vars(kind).values():
        code = attribute_at(inspect.unwrap(member) if callable(member) else member, "__code__")
        if code is None:
            continue
        keywords = [name for each in code.co_consts if isinstance(each, tuple) for name in each]
        if word in (*code.co_names, *code.co_varnames, *code.co_consts, *keywords):
            return True
    return False


def _calls_attention_interface(model: nn.Module, *, has_mixers: bool) -> bool:
    """Whether the decoder looks its attention up in transformers' table: only then does it see the borders. Its file
    has to know the table, and a layer to read it; where layers carry a state, there may be none that does."""
    decoder = decoder_of(model) or model
    modules = {each.__module__ for each in type(decoder).__mro__} - {"transformers.modeling_utils"}
    if not any(hasattr(sys.modules[module], _TABLE) for module in modules):
        return False
    kinds = {kind for module in decoder.modules() for kind in type(module).__mro__}
    own = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "transformers.modeling_utils"))]
    return has_mixers or any(_names_in_code(kind, _TABLE) for kind in own)


def attention_problems(requested: str | None, model: nn.Module | None = None) -> Iterator[Problem]:
    """Why an attention kernel cannot serve packed rows of a model."""
    caps = (
        model is not None
        and _is_of_transformers(model)
        and bool(attribute_at(model.config.get_text_config(), "attn_logit_softcapping"))
    )
    if caps and requested != "flash_attention_2":
        yield Problem(
            "the model caps the scores of attention, which 'flash_attention_2' alone does in packed rows",
            key=_ATTENTION_KEY,
            way_out="Take it, or set packing to false.",
        )
        return
    if requested is not None and requested not in _KNOW_BORDERS:
        yield Problem(
            f"'{requested}' knows no borders of documents, or makes a mask of T² entries for them",
            key=_ATTENTION_KEY,
            way_out=f"Leave it out, or take one of {', '.join(_KNOW_BORDERS)}.",
        )


def _is_of_transformers(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    from transformers import PreTrainedModel  # a second to import, and whoever builds a model has it already

    return isinstance(model, PreTrainedModel)


# --- what is added ----------------------------------------------------------------------------------------------------


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Layers that carry a state from token to token (gated delta nets, state spaces, linear attention, short
    convolutions): transformers hands them `cache_params`, or they put what a convolution saw into the cache. Of two
    inside each other the inner one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        takes = inspect.signature(module.forward).parameters
        if "hidden_states" in takes and ("cache_params" in takes or _is_convolution(module)):
            found[name] = module
    holders = holding_others(found, found)
    return [module for name, module in found.items() if name not in holders]


def _is_convolution(module: nn.Module) -> bool:
    """Whether a layer is a convolution over tokens that gets the borders of documents (LFM2's), and no attention with
    one inside it (Zaya's)."""
    takes = inspect.signature(module.forward).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes):
        return False
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    return any(_names_in_code(kind, "update_conv_state") for kind in own)


def leave_borders_out(_: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
    """Hook in front of a tower: the text's borders would cut its own tokens."""
    return args, without_borders(kwargs)


def read_positions(_: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
    """Hook in front of a model: positions that came as the bits of fp32 numbers become numbers. Sharding, which casts
    what are numbers, has passed them on by then."""
    positions = kwargs.get("position_ids")
    if positions is None or positions.dtype != torch.int32:
        return None
    return args, {**kwargs, "position_ids": positions.view(torch.float32)}


def _models_beside_the_decoder(model: nn.Module) -> list[str]:
    """Names of models inside the model that its decoder is not a part of, nor they of it."""
    decoder = name_of(model, decoder_of(model))
    beside = []
    for name, module in model.named_modules():
        holds_decoder = f"{decoder}.".startswith(f"{name}.")
        is_below_decoder = name.startswith(f"{decoder}.")
        if name and _is_of_transformers(module) and not holds_decoder and not is_below_decoder:
            beside.append(name)
    return beside


def blocks_key(model: nn.Module) -> str | None:
    """The batch key that marks blocks, where their tokens see each other both ways; None for all other models."""
    config: PreTrainedConfig | None = attribute_at(model, "config")
    kind = attribute_at(config, "model_type", "")
    if config is None or kind not in _BLOCKS:
        return None
    if kind.startswith("gemma4"):
        has_blocks = attribute_at(config.get_text_config(), "use_bidirectional_attention") == "vision"
    else:
        has_blocks = bool(attribute_at(config, "prefix_lm", True))
    if has_blocks:
        return _BLOCKS[kind]
    return None


class _BlockMasks:
    """Hook in front of a model that has blocks: the masks of its one or two kinds of layers, ready-made.

    Args:
        model: Its module says how marks become numbers of blocks (`get_block_sequence_ids_for_mask`); without that, all
            tokens of a document with the mark 1 are one block, as in Molmo2 and HRM.
        marks: Batch key of the marks.
    """

    def __init__(self, model: nn.Module, marks: str) -> None:
        self._marks = marks
        self._of_pictures = bool(_models_beside_the_decoder(model))
        text_config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._window: int | None = attribute_at(text_config, "sliding_window")
        module = sys.modules[type(model).__module__]
        self._blocks_of: Callable[..., torch.Tensor] = attribute_at(
            module, "get_block_sequence_ids_for_mask", _one_block
        )

    def __call__(self, _: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
        borders, marks_1T = kwargs.get("cu_seq_lens_q"), kwargs.get(self._marks)
        has_pictures = any(kwargs.get(key) is not None for key in _PICTURES)
        if borders is None or marks_1T is None or (self._of_pictures and not has_pictures):
            return None
        tokens = marks_1T.shape[1]
        if tokens > MOST_MASKED_TOKENS:
            raise DataError(
                f"a row of {tokens} tokens with blocks that see each other both ways needs a mask of {tokens}² "
                f"entries; {MOST_MASKED_TOKENS} tokens are the most",
                key="data.dataset_param.basic_parameters.cutoff_len",
                way_out="Lower it, or set packing to false.",
            )
        masks = block_masks(borders, self._blocks_of(marks_1T, device=marks_1T.device)[0], self._window)
        others = without_borders(kwargs) | {"attention_mask": masks}
        if PADDING_KEY in kwargs:  # routers ask for it
            others[PADDING_KEY] = kwargs[PADDING_KEY]
        return args, others


def _one_block(marks_1T: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.where(marks_1T.to(device) == 1, 0, -1)


def block_masks(
    borders: torch.Tensor, blocks_T: torch.Tensor, window: int | None
) -> torch.Tensor | dict[str, torch.Tensor]:
    """(1, 1, T, T) booleans, by kind of layer where there are full and sliding ones: a token sees what is before it,
    and all of its block, in its own document.

    Args:
        borders: (documents + 1,).
        blocks_T: Number of each token's block, -1 outside.
        window: How many tokens a sliding layer sees; None: there is no such layer.
    """
    place_T = torch.arange(len(blocks_T), device=blocks_T.device)
    document_T = torch.bucketize(place_T, borders[1:], right=True)  # borders that a token has passed
    distance_TT = place_T[:, None] - place_T[None, :]
    in_block_TT = (blocks_T[:, None] == blocks_T[None, :]) & (blocks_T[:, None] >= 0)
    full_TT = (document_T[:, None] == document_T[None, :]) & ((distance_TT >= 0) | in_block_TT)
    if window is None:
        return full_TT[None, None]
    # Tokens ahead in a block have a negative distance, and stay visible.
    sliding_TT = full_TT & (distance_TT < window)
    return {"full_attention": full_TT[None, None], "sliding_attention": sliding_TT[None, None]}


class SegmentedForward:
    """Stands for a layer's `forward`; calls without borders go through.

    Args:
        mixer: Called with `hidden_states` (1, T, C) by name, returns (1, T, C) or a tuple that begins with it.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output for a packed row."""
        borders = kwargs.get("cu_seq_lens_q")
        if borders is None:
            return self._forward(*args, **kwargs)
        hidden_1TC = args[0] if args else kwargs["hidden_states"]
        places = host_values(borders)
        check_borders(places, hidden_1TC[:, None])
        own = without_borders(kwargs)
        spans = list(pairwise(places))
        lengths = [stop - start for start, stop in spans]
        pieces: dict[int, Tensor] = {}
        others: tuple[Any, ...] | None = None  # what the layer returns beside hidden states, if it returns a tuple
        for bucket in buckets(lengths, waste_on(hidden_1TC.device)):
            cut = partial(_rows_of, length=hidden_1TC.shape[1], spans=[spans[document] for document in bucket])
            bucket_args, bucket_kwargs = tree_map_only(Tensor, cut, (args, own))
            output = self._forward(*bucket_args, **bucket_kwargs)
            if isinstance(output, tuple):
                output, *rest = output
                others = tuple(rest)
            for row, document in enumerate(bucket):
                pieces[document] = output[row, : lengths[document]]
        # Empty documents are in no bucket, and have no tokens to be put back.
        joined = torch.cat([pieces[document] for document in sorted(pieces)])[None]
        if others is None:
            return joined
        return (joined, *others)


def waste_on(device: torch.device) -> float:
    """Most padding of a batch of documents, of its real tokens: an accelerator gains by computing more of them at once,
    a CPU does not."""
    if device.type == "cpu":
        return 0.0
    return 0.25


def buckets(lengths: Sequence[int], waste: float) -> list[list[int]]:
    """Documents that are computed at once, by their numbers; empty ones are left out.

    Args:
        lengths: Tokens of each.
        waste: Most padding, of the real tokens of a bucket.
    """
    found: list[list[int]] = []
    tokens = 0
    # From the longest to the shortest: all rows of a bucket are filled up to its first one.
    documents = [number for number, length in enumerate(lengths) if length]
    documents.sort(key=lambda number: -lengths[number])
    for document in documents:
        tokens += lengths[document]
        if found:
            longest = lengths[found[-1][0]]
            if longest * (len(found[-1]) + 1) <= (1 + waste) * tokens:
                found[-1].append(document)
                continue
        found.append([document])
        tokens = lengths[document]
    return found


def _rows_of(tensor: Tensor, length: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """(documents, longest, …) of (1, length, …); other tensors stay."""
    if tensor.dim() < 2 or tensor.shape[:2] != (1, length):
        return tensor
    return pad_sequence([tensor[0, start:stop] for start, stop in spans], batch_first=True)
