"""BAGEL (arXiv:2505.14683): one sequence of text, pictures that are seen and pictures that are drawn.

Each layer is a mixture of transformers: text and seen pictures go through one set of parameters, latents of pictures
through another (`_moe_gen`), and all tokens of a sample attend to one another. Modules are named as the released
weights are. Shapes: B rows of L tokens, of which a rank holds t where a sequence is spread over ranks, else all; T =
B · t tokens, M of them latents; S patches of seen pictures, of which a rank holds s, V features of the tower, H of the
language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from typing_extensions import override

from mindspeed_mm.core.batch import SEEN
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig
from mindspeed_mm.fsdp.models.bagel.mixture import BagelTextModel, Samples, TokenLayout, attend, orders
from mindspeed_mm.fsdp.models.behaviour.part_cache import KeyValues
from mindspeed_mm.fsdp.models.diffusion.latents import places_of
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

_FREQUENCIES = 256


# --- pictures that are seen, and places -------------------------------------------------------------------------------


class BagelVisionLayer(SiglipEncoderLayer):
    """SigLIP's layer on the patches of many pictures, each of which sees its own."""

    @override
    def forward(self, hidden: torch.Tensor, pictures: Samples | ContextShare) -> torch.Tensor:  # type: ignore[override]
        attention: Any = self.self_attn
        normed = self.layer_norm1(hidden)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (each(normed).unflatten(2, (-1, attention.head_dim)) for each in projections)
        if isinstance(pictures, ContextShare):
            attended = pictures.attend(query, key, value, causal=False, scale=None).flatten(2)
        else:
            attended = attend(query, key, value, pictures)
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

    def forward(
        self, patches: torch.Tensor, places: torch.Tensor, lengths: list[int], share: ContextShare | None = None
    ) -> torch.Tensor:
        """(s, channels · p²) → (1, s, V).

        Args:
            patches: Of all pictures; of a spread sequence the own ones.
            places: (s,) of each patch, in the table of places.
            lengths: Patches of each picture.
            share: Of the patches, where they are spread over ranks.
        """
        hidden = self.embeddings(patches, places)
        pictures: Samples | ContextShare = share or Samples(
            list(pairwise(accumulate(lengths, initial=0))), [None] * len(lengths)
        )
        for layer in self.encoder["layers"]:
            hidden = layer(hidden, pictures)
        return self.post_layernorm(hidden)


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


# --- the model -------------------------------------------------------------------------------------------------------


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
    denoises_pictures = keeps_documents_apart = takes_share = True
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

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, groups: ContextGroups | None = None
    ) -> torch.Tensor:
        """(S, H) of pictures that are seen.

        Args:
            pixel_values: (S, 3 · p²) patches, row by row; the numbers of a patch run over rows, columns, colours.
            image_grid_thw: (pictures, 3): 1, and the patches along height and width.
            groups: Ranks that share the patches; pictures too small to give each of them some are computed on all.
        """
        grids = host_values(image_grid_thw)
        vit = self.config.vit_config
        own = [places_of(rows, columns, vit.image_size // vit.patch_size) for _, rows, columns in grids]
        shared = [places_of(rows, columns, self.config.vit_max_num_patch_per_side) for _, rows, columns in grids]
        device = pixel_values.device
        places, of_tower = torch.cat(shared).to(device), torch.cat(own).to(device)
        lengths, share = [rows * columns for _, rows, columns in grids], None
        if groups is not None:
            stops = list(accumulate(lengths, initial=0))
            layout = build_layout(stops[-1], groups.ring_size, groups.ulysses_size, borders=stops)
            share = None if layout.leaves_ranks_empty else ContextShare(groups, layout)
        if share is not None:
            pixel_values, places, of_tower = (share.take(each, 0) for each in (pixel_values, places, of_tower))
        features = self.connector(self.vit_model["vision_model"](pixel_values, of_tower, lengths, share))[0]
        features = features + self.vit_pos_embed(places).to(features.dtype)
        # Each rank reads those among its own tokens: gradients are summed.
        if share is None:
            return features
        return share.gather(features, 0, sum_gradients=True)

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
        mm_context: ContextShare | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> BagelOutput:
        """Logits of words and velocities of latents.

        Args:
            input_ids: (B, L), padded on the right; tokens of pictures are any.
            part_ids: (B, L), as of `mixture.visible`; None: all is text.
            token_kinds: (B, L) 0 for text and the marks around pictures; otherwise as of `core.batch`.
            position_ids: (B, L); all tokens of a picture have one.
            pixel_values: As of `get_image_features`, of the pictures in order of place; so is `image_grid_thw`.
            image_grid_thw: See `pixel_values`.
            latent_tokens: (M, C · p²), with their noise, in order of place; of a spread sequence the own ones.
            latent_times: (M,) their noise levels; 0: none.
            latent_positions: (M,) their places in the table.
            latent_places: (M,) their places in the flattened rows, of a spread sequence among the own tokens.
            drawn_places: (drawn,) places of those whose velocities are asked for.
            attention_mask: Unused: padding stands behind all that could see it.
            cu_seq_lens_q: Borders of the samples of a packed row.
            mm_context: What this rank holds of rows that are spread; logits and velocities are those of own tokens.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
        """
        rows, length = input_ids.shape
        embeds_BtH = self._embed_words(input_ids, token_kinds, pixel_values, image_grid_thw, mm_context)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(rows, -1)
        if mm_context is not None:
            position_ids = mm_context.take(position_ids, 1)
        embeds = embeds_BtH.flatten(0, 1)
        if latent_tokens is None or latent_times is None or latent_positions is None or latent_places is None:
            latent_tokens, latent_times = embeds.new_zeros(0, self.config.latent_features), embeds.new_zeros(0)
            latent_positions = latent_places = drawn_places = input_ids.new_zeros(0)
        latents = self.embed_latents(latent_tokens, latent_times, latent_positions).to(embeds.dtype)
        embeds = embeds.index_copy(0, latent_places, latents)
        if part_ids is None:
            part_ids = torch.zeros_like(input_ids)
        samples = Samples.of_rows(part_ids, cu_seq_lens_q, mm_context)
        layout = TokenLayout(*orders(latent_places, len(embeds)), samples, mm_context)
        hidden = self.get_decoder()(inputs_embeds=embeds[None], position_ids=position_ids.reshape(1, -1), layout=layout)
        hidden_BtH = hidden.view(rows, -1, hidden.shape[-1])
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.language_model["lm_head"](hidden_BtH[:, kept])
        drawn = latent_places if drawn_places is None else drawn_places
        return BagelOutput(logits=logits, velocities=self.llm2vae(hidden[0].index_select(0, drawn)))

    def _embed_words(
        self,
        input_ids: torch.Tensor,
        token_kinds: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        image_grid_thw: torch.Tensor | None,
        share: ContextShare | None,
    ) -> torch.Tensor:
        """(B, t, H) of own tokens: words and pictures that are seen."""
        embeds_BLH: torch.Tensor = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert image_grid_thw is not None and token_kinds is not None
            groups = None if share is None else share.groups
            seen = self.get_image_features(pixel_values, image_grid_thw, groups).to(embeds_BLH.dtype)
            embeds_BLH = embeds_BLH.masked_scatter((token_kinds == SEEN)[..., None], seen)
        if share is None:
            return embeds_BLH
        return share.take(embeds_BLH, 1)

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
        samples = Samples([(0, tokens)], [mask])
        layout = TokenLayout(*orders(latent_places, tokens), samples, past=past, keeps=keeps)
        states: torch.Tensor = self.get_decoder()(inputs_embeds=embeds, position_ids=positions, layout=layout)
        return states


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
