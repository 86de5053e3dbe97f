"""BAGEL (arXiv:2505.14683): one sequence of text, pictures that are seen and pictures that are drawn.

Each layer is a mixture of transformers: text and seen pictures go through one set of parameters, latents of pictures
through another (`_moe_gen`), and all tokens of a sample attend to one another. Modules are named as the released
weights are. Shapes: B rows of L tokens, T = B · L, of which U go through the first set and M are latents; S patches of
seen pictures, V features of the tower, H of the language model, D of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from typing_extensions import override

from mindspeed_mm.core.batch import SEEN
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig
from mindspeed_mm.fsdp.models.behaviour.part_cache import KeyValues
from mindspeed_mm.fsdp.models.diffusion.latents import places_of
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

_FREQUENCIES = 256


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of a pass stand. Layers hold them in another order than the sequence: those of the first set of
    parameters in front, so that each set takes one slice."""

    order: torch.Tensor
    """(T,) places in the sequence, of the tokens as layers hold them."""
    inverse: torch.Tensor
    """(T,) where layers hold the tokens of the sequence."""
    first: int
    """U."""
    documents: list[tuple[int, int]]
    """Borders of the samples."""
    masks: list[torch.Tensor | None]
    """(l, l) bool of each, True where a token (row) sees another; None: it sees all."""
    past: KeyValues | None = None
    keeps: bool = False
    """Whether `past` goes on with the keys and values of this pass."""

    def split(self, hidden: torch.Tensor, first: nn.Module, second: nn.Module) -> torch.Tensor:
        """(1, T, …): the tokens of each set through its module. Either may be given none: it gets zero gradients, and
        ranks stay in step."""
        return torch.cat([first(hidden[:, : self.first]), second(hidden[:, self.first :])], dim=1)


def visible(part_ids: torch.Tensor) -> torch.Tensor:
    """(l, l) bool: which tokens (columns) a token (row) of one sample sees.

    Text sees what is before it. The tokens of a picture see each other, too. A noised picture is seen by nobody else.

    Args:
        part_ids: (l,) 0 for text; n > 0 for the tokens and marks of a picture; n < 0 for those of a noised one.
    """
    same = (part_ids[:, None] == part_ids) & (part_ids != 0)
    before = torch.ones(len(part_ids), len(part_ids), dtype=torch.bool, device=part_ids.device).tril()
    return (before | same) & (same | (part_ids >= 0))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: list[tuple[int, int]],
    masks: list[torch.Tensor | None],
) -> torch.Tensor:
    """Attention inside each document: (1, heads, T, D) → (1, T, heads · D).

    Args:
        query: (1, heads, T, D).
        key: (1, heads, T, D); where there is one document, it may be longer.
        value: As `key`.
        documents: Borders, from 0 to T.
        masks: As of `TokenLayout`.
    """
    if len(documents) == 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=masks[0]).transpose(1, 2).flatten(2)
    sizes = [stop - start for start, stop in documents]
    outputs = []
    for q, k, v, mask in zip(*(each.split(sizes, dim=2) for each in (query, key, value)), masks, strict=True):
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)


class BagelAttention(nn.Module):
    """Joint attention of all tokens, with projections and norms for each set of parameters.

    Args:
        config: Of Qwen2.
        layer: Its number.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self._layer, self._heads, self._kv_heads = layer, config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.hidden_size // config.num_attention_heads
        width, own, shared = config.hidden_size, self._heads * self._head_dim, self._kv_heads * self._head_dim
        for end in ("", "_moe_gen"):
            for name, features in (("q", own), ("k", shared), ("v", shared)):
                self.add_module(f"{name}_proj{end}", nn.Linear(width, features, bias=True))
            self.add_module(f"o_proj{end}", nn.Linear(own, width, bias=False))
            for name in "qk":
                self.add_module(f"{name}_norm{end}", Qwen2RMSNorm(self._head_dim, eps=config.rms_norm_eps))

    def _both(self, layout: TokenLayout, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return layout.split(hidden, self.get_submodule(name), self.get_submodule(f"{name}_moe_gen"))

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], layout: TokenLayout
    ) -> torch.Tensor:
        """(1, T, H) in the order of layers; the same order comes out."""
        query, key, value = (
            self._both(layout, f"{name}_proj", hidden).unflatten(2, (-1, self._head_dim)) for name in "qkv"
        )
        query, key = self._both(layout, "q_norm", query), self._both(layout, "k_norm", key)
        query, key = apply_rotary_pos_emb(query, key, *rotation, unsqueeze_dim=2)
        query, key, value = (
            each.index_select(1, layout.inverse).transpose(1, 2).to(value.dtype) for each in (query, key, value)
        )
        past = layout.past
        if past is not None and self._layer < len(past.layers):
            known_key, known_value = past.layers[self._layer]
            key, value = torch.cat([known_key, key], dim=2), torch.cat([known_value, value], dim=2)
        if past is not None and layout.keeps:
            past.layers[self._layer : self._layer + 1] = [(key, value)]
        groups = self._heads // self._kv_heads
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        attended = attend(query, key, value, layout.documents, layout.masks)
        return self._both(layout, "o_proj", attended.index_select(1, layout.order))


class BagelDecoderLayer(GradientCheckpointingLayer):
    """One layer of the mixture of transformers: both sets of parameters.

    Args:
        config: Of Qwen2.
        layer: Its number.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = BagelAttention(config, layer)
        self.mlp, self.mlp_moe_gen = Qwen2MLP(config), Qwen2MLP(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            for end in ("", "_moe_gen"):
                self.add_module(f"{name}{end}", Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], layout: TokenLayout
    ) -> torch.Tensor:
        """(1, T, H) in the order of `layout`.

        Args:
            hidden: States.
            rotation: Cosines and sines (1, T, D) of the tokens' positions, in the same order.
            layout: Where tokens stand.
        """
        normed = layout.split(hidden, self.input_layernorm, self.input_layernorm_moe_gen)
        hidden = hidden + self.self_attn(normed, rotation, layout)
        normed = layout.split(hidden, self.post_attention_layernorm, self.post_attention_layernorm_moe_gen)
        return hidden + layout.split(normed, self.mlp, self.mlp_moe_gen)


class BagelTextModel(nn.Module):
    """The language model without its head.

    Args:
        config: Of Qwen2.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BagelDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_moe_gen = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen2RotaryEmbedding(config)

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """(1, T, H) embeddings in the order of the sequence → normed states in the same order.

        Args:
            inputs_embeds: Of all tokens.
            position_ids: (1, T).
            layout: Where tokens stand.
        """
        hidden = inputs_embeds.index_select(1, layout.order)
        rotation = self.rotary_emb(hidden, position_ids.index_select(1, layout.order))
        for layer in self.layers:
            hidden = layer(hidden, rotation, layout)
        return layout.split(hidden, self.norm, self.norm_moe_gen).index_select(1, layout.inverse)


class BagelVisionLayer(SiglipEncoderLayer):
    """SigLIP's layer on the patches of many pictures, each of which sees its own."""

    @override
    def forward(self, hidden: torch.Tensor, documents: list[tuple[int, int]]) -> torch.Tensor:  # type: ignore[override]
        attention: Any = self.self_attn
        normed = self.layer_norm1(hidden)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = [each(normed).unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for each in projections]
        attended = attend(heads[0], heads[1], heads[2], documents, [None] * len(documents))
        hidden = hidden + attention.out_proj(attended)
        return hidden + self.mlp(self.layer_norm2(hidden))


class BagelVisionEmbeddings(nn.Module):
    """Patches and their places.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        vit = config.vit_config
        self.patch_embedding = nn.Linear(vit.num_channels * vit.patch_size**2, vit.hidden_size)
        self.position_embedding = nn.Embedding((vit.image_size // vit.patch_size) ** 2, vit.hidden_size)

    def forward(self, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(S, channels · p²) numbers of patches → (1, S, V), with their places added."""
        patches = patches.to(self.patch_embedding.weight.dtype)
        return (self.patch_embedding(patches) + self.position_embedding(places))[None]


class BagelVision(nn.Module):
    """SigLIP for pictures of any size: `vit_model.vision_model` of the release.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        vit = config.vit_config
        self.embeddings = BagelVisionEmbeddings(config)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(BagelVisionLayer(vit) for _ in range(config.vit_layers))})
        self.post_layernorm = nn.LayerNorm(vit.hidden_size, eps=vit.layer_norm_eps)

    def forward(self, patches: torch.Tensor, places: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """(S, channels · p²) → (1, S, V).

        Args:
            patches: Of all pictures.
            places: (S,) of each patch, in the table of places.
            lengths: Patches of each picture.
        """
        hidden = self.embeddings(patches, places)
        documents = borders(lengths)
        for layer in self.encoder["layers"]:
            hidden = layer(hidden, documents)
        return self.post_layernorm(hidden)


def borders(lengths: list[int]) -> list[tuple[int, int]]:
    """Beginning and end of pieces of these lengths, one behind the other."""
    found, at = [], 0
    for length in lengths:
        found.append((at, at + length))
        at += length
    return found


class PlaceTable(nn.Module):
    """A fixed table of places, sines and cosines of column and row (arXiv:2212.09748); stored with the weights.

    Args:
        per_side: PlaceTable along a side.
        width: H.
    """

    def __init__(self, per_side: int, width: int) -> None:
        super().__init__()
        self._per_side = per_side
        self.pos_embed = nn.Parameter(torch.empty(per_side**2, width), requires_grad=False)

    def table(self) -> torch.Tensor:
        """What the table holds: of each place the sines, then the cosines of its column; then of its row."""
        half = self.pos_embed.shape[1] // 2
        speeds = 10000.0 ** -(torch.arange(half // 2, dtype=torch.float64) / (half / 2))
        angles = torch.arange(self._per_side, dtype=torch.float64)[:, None] * speeds
        side = torch.cat([angles.sin(), angles.cos()], dim=1)
        count = self._per_side
        return torch.cat([side.repeat(count, 1), side.repeat_interleave(count, dim=0)], dim=1)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) places, numbered row by row → (n, H)."""
        return self.pos_embed[places]


class TimeEmbedder(nn.Module):
    """Noise levels from 0 to 1 as vectors.

    Args:
        width: H.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """(n,) noise levels → (n, H), as DiT makes them of timesteps."""
        half = _FREQUENCIES // 2
        speeds = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
        angles = times[:, None] * speeds.to(times.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))  # type: ignore[no-any-return,union-attr]


class Connector(nn.Module):
    """From the tower to the language model.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width = config.llm_config.hidden_size
        self.fc1, self.fc2 = nn.Linear(config.vit_config.hidden_size, width), nn.Linear(width, width)
        self._activation = ACT2FN[config.connector_act]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(…, V) features of patches → (…, H) in the language model."""
        return self.fc2(self._activation(self.fc1(features)))


@dataclass
class BagelOutput(CausalLMOutputWithPast):
    """Logits of words in `logits`, (B, L, vocabulary); velocities of latents beside them."""

    velocities: torch.Tensor | None = None
    """(drawn tokens, C · p²): noise minus latents, as predicted."""


@model_register.register("bagel")
class BagelForConditionalGeneration(PreTrainedModel):
    """The whole model, without its VAE.

    Args:
        config: As released.
    """

    config: BagelConfig
    config_class = BagelConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["BagelDecoderLayer", "BagelVisionLayer"]
    denoises_pictures = keeps_documents_apart = True
    latent_modules: ClassVar[tuple[str, ...]] = ("_moe_gen", "vae2llm", "llm2vae", "time_embedder")
    """Parts of the names of modules that latents alone go through; others in layers see the rest of the tokens."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__(config)
        width = config.llm_config.hidden_size
        head = nn.Linear(width, config.llm_config.vocab_size, bias=False)
        self.language_model = nn.ModuleDict({"model": BagelTextModel(config.llm_config), "lm_head": head})
        self.vit_model = nn.ModuleDict({"vision_model": BagelVision(config)})
        self.connector = Connector(config)
        self.vit_pos_embed = PlaceTable(config.vit_max_num_patch_per_side, width)
        self.time_embedder = TimeEmbedder(width)
        self.vae2llm = nn.Linear(config.latent_features, width)
        self.llm2vae = nn.Linear(width, config.latent_features)
        self.latent_pos_embed = PlaceTable(config.max_latent_size, width)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PlaceTable):
            with torch.no_grad():
                module.pos_embed.copy_(module.table())
        elif module is self.llm2vae:  # the first prediction is 0
            nn.init.zeros_(self.llm2vae.weight)
            nn.init.zeros_(self.llm2vae.bias)
        elif isinstance(module, nn.Linear) and any(module is each for each in self._between()):
            module.reset_parameters()

    def _between(self) -> Iterator[nn.Module]:
        """Layers between pictures and the language model. As published, they begin as torch has them: of smaller
        weights, what a picture shows would be lost beside the places of its tokens."""
        for part in (self.connector, self.vae2llm, self.time_embedder):
            yield from part.modules()

    @override
    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().embed_tokens  # type: ignore[return-value]

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        self.get_decoder().embed_tokens = value

    @override
    def get_output_embeddings(self) -> nn.Module:
        return self.language_model["lm_head"]

    def get_decoder(self) -> Any:
        """The language model without its head."""
        return self.language_model["model"]

    def get_towers(self) -> list[Tower]:
        """The tower that sees; one patch is the least."""
        return [Tower("image", "vit_model.vision_model", "pixel_values", "language_model.model", _see_nothing)]

    def get_cut_points(self) -> Any:
        """Refuse a pipeline: latents enter on the first stage, and their loss is on the last one.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be cut into stages: latents that the last one predicts come in on the first",
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1.",
        )

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        """(S, H) of pictures that are seen.

        Args:
            pixel_values: (S, 3 · p²) patches, row by row; the numbers of a patch run over rows, columns, colours.
            image_grid_thw: (pictures, 3): 1, and the patches along height and width.
        """
        grids = host_values(image_grid_thw)
        vit = self.config.vit_config
        own = [places_of(rows, columns, vit.image_size // vit.patch_size) for _, rows, columns in grids]
        shared = [places_of(rows, columns, self.config.vit_max_num_patch_per_side) for _, rows, columns in grids]
        device = pixel_values.device
        lengths = [rows * columns for _, rows, columns in grids]
        features = self.vit_model["vision_model"](pixel_values, torch.cat(own).to(device), lengths)
        places: torch.Tensor = self.vit_pos_embed(torch.cat(shared).to(device))
        return self.connector(features)[0] + places.to(features.dtype)

    def embed_latents(
        self, latent_tokens: torch.Tensor, latent_times: torch.Tensor, latent_positions: torch.Tensor
    ) -> torch.Tensor:
        """(M, H) of latents (M, C · p²) with noise of levels (M,), at places (M,) of the table."""
        weight = self.vae2llm.weight
        embeds = self.vae2llm(latent_tokens.to(weight.dtype)) + self.time_embedder(latent_times)
        return embeds + self.latent_pos_embed(latent_positions).to(embeds.dtype)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        part_ids: torch.Tensor | None = None,
        token_kinds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        latent_tokens: torch.Tensor | None = None,
        latent_times: torch.Tensor | None = None,
        latent_positions: torch.Tensor | None = None,
        latent_places: torch.Tensor | None = None,
        drawn_places: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> BagelOutput:
        """Logits of words and velocities of latents.

        Args:
            input_ids: (B, L), padded on the right; tokens of pictures are any.
            part_ids: (B, L), as of `visible`; None: all is text.
            token_kinds: (B, L) 0 for text and the marks around pictures; otherwise as of `core.batch`.
            position_ids: (B, L); all tokens of a picture have one.
            pixel_values: As of `get_image_features`, of the pictures in order of place.
            image_grid_thw: As of `get_image_features`.
            latent_tokens: (M, C · p²), with their noise, in order of place.
            latent_times: (M,) their noise levels; 0: none.
            latent_positions: (M,) their places in the table.
            latent_places: (M,) their places in the flattened rows.
            drawn_places: (drawn,) places of those whose velocities are asked for.
            attention_mask: Unused: padding stands behind all that could see it.
            cu_seq_lens_q: Borders of the samples of a packed row.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
        """
        rows, length = input_ids.shape
        embeds = self.get_input_embeddings()(input_ids).flatten(0, 1)
        if pixel_values is not None:
            assert image_grid_thw is not None and token_kinds is not None
            seen = self.get_image_features(pixel_values, image_grid_thw).to(embeds.dtype)
            embeds = embeds.masked_scatter((token_kinds == SEEN).flatten()[:, None], seen)
        if latent_tokens is None or latent_times is None or latent_positions is None or latent_places is None:
            latent_tokens, latent_times = embeds.new_zeros(0, self.config.latent_features), embeds.new_zeros(0)
            latent_positions = latent_places = drawn_places = input_ids.new_zeros(0)
        latents = self.embed_latents(latent_tokens, latent_times, latent_positions).to(embeds.dtype)
        embeds = embeds.index_copy(0, latent_places, latents)
        if cu_seq_lens_q is None:
            documents = borders([length] * rows)
        else:
            stops = host_values(cu_seq_lens_q)
            documents = list(pairwise(stops))
        if part_ids is None:
            part_ids = torch.zeros_like(input_ids)
        flat = part_ids.flatten()
        masks: list[torch.Tensor | None] = [visible(flat[start:stop]) for start, stop in documents]
        order, inverse = orders(latent_places, len(embeds))
        layout = TokenLayout(order, inverse, len(embeds) - len(latent_places), documents, masks)
        if position_ids is None:
            position_ids = torch.arange(length, device=embeds.device).expand(rows, -1)
        hidden = self.get_decoder()(inputs_embeds=embeds[None], position_ids=position_ids.reshape(1, -1), layout=layout)
        hidden_BLH = hidden.view(rows, length, -1)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = BagelOutput(logits=self.language_model["lm_head"](hidden_BLH[:, kept]))
        drawn = latent_places if drawn_places is None else drawn_places
        output.velocities = self.llm2vae(hidden[0].index_select(0, drawn))
        return output

    def go_on(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        latent_places: torch.Tensor,
        past: KeyValues,
        *,
        keeps: bool,
        is_text: bool,
    ) -> torch.Tensor:
        """(1, T, H) states of one part behind a sequence, all of which it sees.

        Args:
            embeds: (1, T, H) of the part.
            positions: (1, T).
            latent_places: (M,) which of its tokens are latents.
            past: The sequence.
            keeps: Whether it goes on with this part.
            is_text: A token sees those in front of it alone; otherwise all of the part.
        """
        tokens = embeds.shape[1]
        before = past.layers[0][0].shape[2] if past.layers else 0
        mask = None
        if is_text:
            mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=embeds.device).tril(before)
        order, inverse = orders(latent_places, tokens)
        layout = TokenLayout(order, inverse, tokens - len(latent_places), [(0, tokens)], [mask], past, keeps)
        states: torch.Tensor = self.get_decoder()(inputs_embeds=embeds, position_ids=positions, layout=layout)
        return states


def orders(latent_places: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which layers hold tokens, those that are no latents in front, and its inverse. The device is not
    waited for.

    Args:
        latent_places: (M,).
        tokens: T.
    """
    is_latent = torch.zeros(tokens, dtype=torch.uint8, device=latent_places.device).index_fill(0, latent_places, 1)
    order = is_latent.argsort(stable=True)
    return order, order.argsort()


def _see_nothing(model: Any) -> torch.Tensor:
    vit, device = model.config.vit_config, current_device()
    pixels = torch.zeros(1, vit.num_channels * vit.patch_size**2, device=device, dtype=model.dtype)
    features: torch.Tensor = model.get_image_features(pixels, torch.ones(1, 3, dtype=torch.long, device=device))
    return features


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model. Its processor is the folder's tokenizer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    AutoConfig.register(BagelConfig.model_type, BagelConfig, exist_ok=True)
    AutoModelForImageTextToText.register(BagelConfig, BagelForConditionalGeneration, exist_ok=True)
