"""How MindSpeed-MM divides its generators among tensor ranks and pipeline stages.

Facts: MindSpeed-MM's `checkpoint/sora_model/` and `models/predictor/dits/`. Its Wan has plain projections between its
attentions and norms over all heads at once, so tensor parallelism does not divide it; its VACE and its HunyuanVideo
have no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, consecutive
from mindspeed_mm.checkpoint.megatron.family import Config, MegatronFamily, MegatronModel, PipelineTower, TensorCut
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout, even_stages, parse_stages
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts
from mindspeed_mm.core.errors import UsageError


class Places(NamedTuple):
    """How many places layers are divided among evenly, where nobody said those of each."""

    stages: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.stages} stages × {self.chunks} chunks"


@dataclass(frozen=True)
class RatioCut(TensorCut):
    """Of a tensor that holds parts of unequal lengths, in a `ratio`: each is divided for itself."""

    ratio: tuple[int, ...] = (1,)

    def piece(self, tensor: LazyTensor, rank: int, ranks: int, multiple: int = 1) -> LazyTensor:
        """A rank's share of every part, one after another. Raises `ValueError` where the rows are in no such ratio."""
        cut = TensorCut(self.dim)
        return Concatenated([cut.piece(part, rank, ranks) for part in self._parts(tensor)], self.dim)

    def whole(self, pieces: Sequence[LazyTensor], true_length: int | None = None) -> LazyTensor:
        """Part by part, each of the pieces of all ranks in order. Raises `ValueError` as `piece`."""
        of_parts = zip(*map(self._parts, pieces), strict=True)
        return Concatenated(list(chain.from_iterable(of_parts)), self.dim)

    def _parts(self, tensor: LazyTensor) -> list[LazyTensor]:
        unit, rest = divmod(tensor.shape[self.dim], sum(self.ratio))
        if rest:
            raise ValueError(f"{tensor.shape[self.dim]} rows are not in a ratio of {self.ratio}")
        return consecutive(tensor, self.dim, [unit * share for share in self.ratio])


@dataclass(frozen=True)
class MMDivision:
    """What of a family can be divided, and how."""

    layers: str
    """Names of the layers begin so, before the number."""
    first: tuple[str, ...] = ("",)
    """Beginnings of the names that stand on the first stage."""
    last: tuple[str, ...] = ()
    """Beginnings of the names that stand on the last stage."""
    has_stages: bool = True
    cuts: Mapping[str, TensorCut] = field(default_factory=dict)
    """Pattern of names → how tensor parallelism cuts them; empty: it divides nothing."""


def _linear(cut: TensorCut, *names: str) -> dict[str, TensorCut]:
    """The cuts of column-parallel layers: weight and bias."""
    cuts: dict[str, TensorCut] = {}
    for name in names:
        cuts |= {f"{name}.weight": cut, f"{name}.bias": cut}
    return cuts


def _row(*names: str) -> dict[str, TensorCut]:
    """Of row-parallel layers: every rank holds the bias."""
    return {f"{name}.weight": TensorCut(1) for name in names}


def _of_both(*names: str) -> list[str]:
    """Layers that HunyuanVideo's double blocks have for pictures and for text."""
    layers = []
    for name in names:
        layers += [f"{_DOUBLE}img_{name}", f"{_DOUBLE}txt_{name}"]
    return layers


_COLUMN, _QKV = TensorCut(0), TensorCut(0, parts=3)
_COG, _DOUBLE, _SINGLE = "videodit_blocks.{n}.", "double_blocks.{n}.", "single_blocks.{n}."
_OSP, _OSP_STAGE = "videodit_sparse_blocks.{n}.", "transformer_blocks.{s}.{n}."
_STEP = "transformer_blocks.{n}."

DIVISIONS: dict[str, MMDivision] = {
    "Wan": MMDivision(
        "blocks.",
        first=("patch_embedding.", "text_embedding.", "time_embedding.", "time_projection.", "img_emb."),
        last=("head.",),
    ),
    "VACE": MMDivision("wan_dit.blocks.", has_stages=False),
    "CogVideoX": MMDivision(
        "videodit_blocks.",
        first=("patch_embed.", "caption_projection.", "time_embed.", "ofs_embed.", "pos_embed."),
        last=("norm_final.", "norm_out.", "proj_out_linear.", "adaLN_modulation."),
        cuts={
            **_linear(_COLUMN, "adaLN_modulation.1", f"{_COG}ff.net.0.proj", f"{_COG}scale_shift_table.1"),
            **_linear(_QKV, f"{_COG}self_atten.proj_qkv"),
            **_row(f"{_COG}self_atten.proj_out", f"{_COG}ff.net.2"),
        },
    ),
    "Open-Sora Plan 1.3": MMDivision(
        "videodit_sparse_blocks.",
        first=("pos_embed", "caption_projection.", "adaln_single."),
        last=("scale_shift_table", "proj_out."),
        cuts={
            **_linear(_COLUMN, *(f"{_OSP}{at}_atten.proj_{name}" for at in ("self", "cross") for name in "qkv")),
            **_linear(_COLUMN, f"{_OSP}ff.net.0.proj"),
            **_row(f"{_OSP}self_atten.proj_out", f"{_OSP}cross_atten.proj_out", f"{_OSP}ff.net.2"),
        },
    ),
    "Open-Sora Plan 1.5": MMDivision(
        "transformer_blocks.",
        has_stages=False,
        cuts={
            **_linear(_COLUMN, "norm_out.linear", *(f"{_OSP_STAGE}norm{number}.linear" for number in (1, 2))),
            **_linear(_COLUMN, *(f"{_OSP_STAGE}attn1.{at}proj_{name}" for at in ("", "added_") for name in "qkv")),
            **_linear(_COLUMN, *(f"{_OSP_STAGE}{name}.net.0.proj" for name in ("ff", "ff_enc"))),
            **_row(f"{_OSP_STAGE}attn1.proj_out", f"{_OSP_STAGE}attn1.added_proj_out"),
            **_row(f"{_OSP_STAGE}ff.net.2", f"{_OSP_STAGE}ff_enc.net.2"),
        },
    ),
    "HunyuanVideo": MMDivision(
        "double_blocks.",
        has_stages=False,
        cuts={
            **_linear(_COLUMN, "vector_in.fc1", "proj_out", "adaLN_modulation.1"),
            **_linear(_COLUMN, *_of_both("mod.linear", "mlp.fc1")),
            **_linear(_COLUMN, f"{_SINGLE}modulation.linear", f"{_SINGLE}linear1_mlp"),
            **_linear(_QKV, *_of_both("attn_qkv"), f"{_SINGLE}linear1_qkv"),
            **_row("vector_in.fc2", *_of_both("attn_proj", "mlp.fc2")),
            # Attention's output and the projections' stand side by side.
            f"{_SINGLE}linear2.weight": RatioCut(1, ratio=(1, 4)),
        },
    ),
    "Step-Video": MMDivision(
        "transformer_blocks.",
        first=("pos_embed.", "adaln_single.", "caption_projection.", "clip_projection."),
        last=("scale_shift_table", "proj_out."),
        cuts={
            **_linear(_COLUMN, "adaln_single.linear", f"{_STEP}ff.net.0.proj", f"{_STEP}attn2.proj_q"),
            **_linear(_QKV, f"{_STEP}attn1.proj_qkv"),
            **_linear(TensorCut(0, parts=2), f"{_STEP}attn2.proj_kv"),
            **_row(f"{_STEP}attn1.proj_out", f"{_STEP}attn2.proj_out", f"{_STEP}ff.net.2"),
        },
    ),
}
"""By the family's name."""


def megatron_family(family: GeneratorLayouts) -> MegatronFamily:
    """A family as the readers and writers of `mp_rank_*` folders want it; its config has `model_type`, the family's
    name, and `num_layers`."""
    division = DIVISIONS[family.name]
    # As the language model of a family: the one tower that a pipeline divides.
    tower = PipelineTower("text", prefix="", layers=division.layers, first=division.first, last=division.last)

    def describe(config: Config) -> MegatronModel:
        rules = [rule.inverse for rule in family.mm]
        return MegatronModel((tower,), {"text": int(config["num_layers"])}, rules, division.cuts)

    return MegatronFamily(family.name, (family.name,), describe)


def layout_of(family: GeneratorLayouts, depth: int, tp: int, pp_layers: object) -> MegatronLayout:
    """The division that a person asks for.

    Args:
        family: Of the model.
        depth: Layers.
        tp: Tensor ranks.
        pp_layers: `[10, 10, 10]`, or one list for each virtual chunk, or `Places`; None or []: one stage.

    Raises:
        UsageError: MindSpeed-MM does not divide this family so, or the layers are not the model's.
    """
    division = DIVISIONS[family.name]
    if isinstance(pp_layers, Places):
        stages = even_stages(depth, *pp_layers)
    elif pp_layers:
        stages = parse_stages(pp_layers, "pp_layers")
    else:
        stages = ((depth,),)
    layout = MegatronLayout({"text": stages}, tp=tp)
    if tp > 1 and not division.cuts:
        raise UsageError(
            f"MindSpeed-MM's {family.name} is not divided by tensor parallelism, and tp_size is {tp}",
            key="target_parallel_config.tp_size",
            way_out="Leave it at 1" + (", and divide its layers into stages." if division.has_stages else "."),
        )
    if layout.stages * layout.chunks > 1 and not division.has_stages:
        raise UsageError(
            f"MindSpeed-MM's {family.name} is not divided into stages, and {pp_layers} is asked for",
            key="target_parallel_config.pp_layers",
            way_out="Leave it out" + (", and divide it by tensor parallelism." if division.cuts else "."),
        )
    if (given := sum(map(sum, stages))) != depth:
        raise UsageError(
            f"{pp_layers} are {given} layers, and the model has {depth}", key="target_parallel_config.pp_layers"
        )
    return layout
