"""InternVL-U (arXiv:2603.09877): a language model that sees, and a diffusion transformer that draws from its states.

    words:    language model over text and features of pictures
    picture:  velocity of noisy latents, given its last states from the question on and latents of the pictures shown

Modules are named as the released weights are, but for the tower, which is transformers'. Shapes: B rows of L tokens;
K samples that draw; M tokens of latents; V features of the tower, H of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Model
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.internvl.modeling_internvl import InternVLVisionModel
from typing_extensions import override

from mindspeed_mm.core.batch import SEEN
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.joint_positions import latent_positions
from mindspeed_mm.fsdp.models.forward_arguments import kept_tokens
from mindspeed_mm.fsdp.models.internvlu.configuration_internvlu import InternVLUConfig
from mindspeed_mm.fsdp.models.internvlu.picture_head import PictureTransformer
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

_OF_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "mm_context")
"""What attention reads of a batch."""


class SeeingLanguageModel(nn.Module):
    """`vlm` of the release.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: InternVLUConfig) -> None:
        super().__init__()
        language, group = config.llm_config, round(1 / config.downsample_ratio)
        width, features = language.hidden_size, config.vision_config.hidden_size * group**2
        self.vision_model = InternVLVisionModel(config.vision_config)
        head = nn.Linear(width, language.vocab_size, bias=False)
        self.language_model = nn.ModuleDict({"model": Qwen3Model(language), "lm_head": head})
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, width), nn.GELU(), nn.Linear(width, width)
        )
        self.special_token_embedding = nn.Embedding(len(config.special_token_ids), width)


class PictureDecoder(nn.Module):
    """`generation_decoder` of the release.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: InternVLUConfig) -> None:
        super().__init__()
        self.decoder = PictureTransformer(config.decoder_config)
        states = config.decoder_config["joint_attention_dim"]
        self.encoder_padding_token = nn.Parameter(torch.zeros(states), requires_grad=False)
        """Stored with the weights; the published code cuts what it pads off again before anything reads it."""


@dataclass
class InternVLUOutput(CausalLMOutputWithPast):
    """Logits of words in `logits`, (B, L, vocabulary); velocities of latents beside them."""

    velocities: torch.Tensor | None = None
    """(drawn tokens, p² · channels): noise minus latents, as predicted."""


@model_register.register("internvlu")
class InternVLUForConditionalGeneration(PreTrainedModel):
    """The whole model, without its VAE.

    Args:
        config: As written by the converter of the released folder.
    """

    config: InternVLUConfig
    config_class = InternVLUConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["InternVLVisionLayer", "Qwen3DecoderLayer", "InternVLUTransformerBlock"]
    denoises_pictures = draws_from_states = True

    def __init__(self, config: InternVLUConfig) -> None:
        super().__init__(config)
        self.vlm = SeeingLanguageModel(config)
        self.generation_decoder = PictureDecoder(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PictureTransformer):  # the first prediction is 0
            nn.init.zeros_(module.proj_out.weight)
            nn.init.zeros_(module.proj_out.bias)
        elif isinstance(module, PictureDecoder):
            nn.init.zeros_(module.encoder_padding_token)

    @override
    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().embed_tokens  # type: ignore[no-any-return]

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        self.get_decoder().embed_tokens = value

    @override
    def get_output_embeddings(self) -> nn.Module:
        return self.vlm.language_model["lm_head"]

    def get_decoder(self) -> Any:
        """The language model without its head."""
        return self.vlm.language_model["model"]

    def get_towers(self) -> list[Tower]:
        """The tower that sees; one picture is the least."""
        return [Tower("image", "vlm.vision_model", "pixel_values", "vlm.language_model.model", _see_nothing)]

    def get_cut_points(self) -> Any:
        """Refuse a pipeline: what draws reads states of the last layers, and its latents come in on the first stage.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be cut into stages: what draws reads states of two layers",
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1.",
        )

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(tokens, H) of pictures (N, 3, side, side): squares of neighbouring features as one, through two layers."""
        states = self.vlm.vision_model(pixel_values=pixel_values).last_hidden_state[:, 1:]  # without the class token
        group, side = round(1 / self.config.downsample_ratio), self.config.seen_side
        # (N, rows, group, columns, group, V) → (N, tokens, group² · V)
        squares = states.unflatten(1, (side, group, side, group)).transpose(2, 3).flatten(3).flatten(1, 2)
        features: torch.Tensor = self.vlm.mlp1(squares.to(self.vlm.mlp1[1].weight.dtype))
        return features.flatten(0, 1)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L, H): tokens of marks and of pictures have a table of their own."""
        embeds = self.get_input_embeddings()(input_ids)
        ids = torch.tensor(self.config.special_token_ids, device=input_ids.device)
        is_own = input_ids[..., None] == ids
        # Row 0 where a token is none of these; `where` drops that.
        own = self.vlm.special_token_embedding(is_own.int().argmax(-1)).to(embeds.dtype)
        return torch.where(is_own.any(-1, keepdim=True), own, embeds)

    def forward(
        self,
        input_ids: torch.Tensor,
        part_ids: torch.Tensor | None = None,
        token_kinds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        latent_tokens: torch.Tensor | None = None,
        latent_times: torch.Tensor | None = None,
        state_positions: torch.Tensor | None = None,
        state_lengths: torch.Tensor | None = None,
        picture_sizes: torch.Tensor | None = None,
        picture_is_drawn: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> InternVLUOutput:
        """Logits of words and velocities of latents.

        Args:
            input_ids: (B, L), padded on the right.
            part_ids: (B, L), 1 where what draws reads a token's state; None: nowhere.
            token_kinds: (B, L), 1 where a token is of a picture that is seen.
            position_ids: (B, L).
            pixel_values: (N, 3, side, side) of the pictures that are seen, in order of place.
            latent_tokens: (M, p² · channels); of each sample that draws, those of the pictures that are given, then
                those of the one that is drawn, with their noise.
            latent_times: (M,) their noise levels; those of a sample's drawn picture count for all of it.
            state_positions: (S, 3) of the states that are read, as of `picture_head.state_positions`.
            state_lengths: (K,) how many they are of each sample that draws.
            picture_sizes: (pictures, 2) pixels along height and width of the pictures that have latents.
            picture_is_drawn: (pictures,) bool.
            attention_mask: (B, L), 1 on real tokens.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            past_key_values: What was read already; only words can go on from it.
            use_cache: Whether it goes on.
            others: What attention reads, and keys of a batch that mean nothing here.
        """
        read = self._read(
            input_ids, token_kinds, position_ids, pixel_values, attention_mask, past_key_values, use_cache, others
        )
        shown = read.last_hidden_state[:, kept_tokens(logits_to_keep)]
        output = InternVLUOutput(logits=self.vlm.language_model["lm_head"](shown))
        output.past_key_values = read.past_key_values
        if past_key_values is not None:
            return output
        states = self._read_by_head(read)
        if latent_tokens is None or latent_times is None or state_positions is None or state_lengths is None:
            # What draws runs on no tokens all the same: ranks stay in step, and it gets zero gradients.
            none = states.new_zeros(0, 3)
            output.velocities = self.draw(
                states[:0], none, [], states.new_zeros(0, self.config.latent_features), none[:, 0], []
            )
            return output
        assert part_ids is not None and picture_sizes is not None and picture_is_drawn is not None
        lengths, side = host_values(state_lengths), self.config.latent_side
        grids = [(height // side, width // side) for height, width in host_values(picture_sizes)]
        samples = _samples(grids, host_values(picture_is_drawn))
        # Places of the ones, in order. Their number is known on the host, so nothing waits for it.
        read_places = part_ids.flatten().argsort(descending=True, stable=True)[: len(state_positions)]
        output.velocities = self.draw(
            states.index_select(0, read_places), state_positions, lengths, latent_tokens, latent_times, samples
        )
        return output

    def read_states(
        self,
        input_ids: torch.Tensor,
        token_kinds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B · L, H · layers) of the language model, as what draws reads them. Arguments as of `forward`."""
        return self._read_by_head(self._read(input_ids, token_kinds, None, pixel_values, None, None, False, {}))

    def _read_by_head(self, read: Any) -> torch.Tensor:
        layers = [read.hidden_states[layer] for layer in self.config.vlm_select_layer]
        return torch.cat(layers, dim=-1).flatten(0, 1)

    def _read(
        self,
        input_ids: torch.Tensor,
        token_kinds: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        past_key_values: object,
        use_cache: bool | None,
        others: JsonObject,
    ) -> Any:
        """The language model's output with the states of all layers. Arguments as of `forward`."""
        embeds = self.embed(input_ids)
        if pixel_values is not None:
            assert token_kinds is not None
            seen = self.get_image_features(pixel_values).to(embeds.dtype)
            embeds = embeds.masked_scatter((token_kinds == SEEN)[..., None], seen)
        return self.get_decoder()(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=bool(use_cache),
            output_hidden_states=True,
            **{name: others[name] for name in _OF_ATTENTION if name in others},
        )

    def draw(
        self,
        states: torch.Tensor,
        state_positions: torch.Tensor,
        state_lengths: list[int],
        latents: torch.Tensor,
        times: torch.Tensor,
        samples: list[list[tuple[int, int]]],
    ) -> torch.Tensor:
        """(drawn tokens, p² · channels) velocities, sample by sample.

        Args:
            states: (S, H · layers) of the samples that draw.
            state_positions: (S, 3).
            state_lengths: Of each sample, its states.
            latents: (M, p² · channels); of each sample what it is given, then what it draws.
            times: (M,).
            samples: Of each, the grid of what it draws and those of what it is given.
        """
        assert len(samples) == len(state_lengths), "as many samples draw as have states that are read"
        order: list[int] = []
        drawn: list[int] = []
        firsts: list[int] = []
        positions: list[torch.Tensor] = []
        for sample in samples:
            counts, start = [rows * columns for rows, columns in sample], len(order)
            given = sum(counts[1:])
            firsts.append(start + given)
            # The drawn picture stands behind those that are given, and goes in front of them here.
            order += [*range(start + given, start + given + counts[0]), *range(start, start + given)]
            drawn.append(counts[0])
            positions.append(latent_positions(sample, self.config.video_position_scale))
        where, first = (torch.tensor(places, dtype=torch.long, device=states.device) for places in (order, firsts))
        of_latents = state_positions.float()  # without samples empty, as these are
        if positions:
            of_latents = torch.cat(positions).to(states.device)
        velocities: torch.Tensor = self.generation_decoder.decoder(
            latents.index_select(0, where),
            states,
            times.index_select(0, first),
            torch.cat([of_latents, state_positions.float()]),
            drawn,
            [len(each) for each in positions],
            state_lengths,
        )
        return velocities


def _samples(grids: list[tuple[int, int]], is_drawn: list[bool]) -> list[list[tuple[int, int]]]:
    """Of each sample that draws, the grid of what it draws and those of what it is given, which stand in front."""
    found: list[list[tuple[int, int]]] = []
    given: list[tuple[int, int]] = []
    for grid, drawn in zip(grids, is_drawn, strict=True):
        if drawn:
            found.append([grid, *given])
            given = []
        else:
            given.append(grid)
    assert not given, "pictures are given to samples that draw"
    return found


def _see_nothing(model: Any) -> torch.Tensor:
    height, width = model.config.vision_config.image_size
    pixels = torch.zeros(1, 3, height, width, device=current_device(), dtype=model.dtype)
    features: torch.Tensor = model.get_image_features(pixels)
    return features


_PLACES, _OWN_PLACES = r"vlm\.vision_model\.embeddings\.", "vlm.vision_model.embeddings."
_BLOCK, _OWN_BLOCK = r"vlm\.vision_model\.encoder\.layers\.(\d+)\.", r"vlm.vision_model.encoder.layer.\1."
_NAMES = {
    rf"{_PLACES}class_embedding": f"{_OWN_PLACES}cls_token",
    rf"{_PLACES}position_embedding": f"{_OWN_PLACES}position_embeddings",
    rf"{_PLACES}patch_embedding\.": f"{_OWN_PLACES}patch_embeddings.projection.",
    rf"{_BLOCK}ls1": f"{_OWN_BLOCK}lambda_1",
    rf"{_BLOCK}ls2": f"{_OWN_BLOCK}lambda_2",
    rf"{_BLOCK}norm1\.": f"{_OWN_BLOCK}layernorm_before.",
    rf"{_BLOCK}norm2\.": f"{_OWN_BLOCK}layernorm_after.",
    rf"{_BLOCK}mlp\.": f"{_OWN_BLOCK}mlp.",
    rf"{_BLOCK}attn\.proj\.": f"{_OWN_BLOCK}attention.projection_layer.",
    rf"{_BLOCK}attn\.q_norm\.": f"{_OWN_BLOCK}attention.q_norm.",
    rf"{_BLOCK}attn\.k_norm\.": f"{_OWN_BLOCK}attention.k_norm.",
    rf"{_BLOCK}attn\.qkv\.": f"{_OWN_BLOCK}attention.qkv.",
}
"""Released name → own name, where they differ."""


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, and how its released weights are named. Its processor is the
    folder's tokenizer."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    AutoConfig.register(InternVLUConfig.model_type, InternVLUConfig, exist_ok=True)
    AutoModelForImageTextToText.register(InternVLUConfig, InternVLUForConditionalGeneration, exist_ok=True)
    rules: list[Any] = [WeightRenaming(f"^{released}", own) for released, own in _NAMES.items()]
    for kind in ("weight", "bias"):
        parts = [f"attention.{name}_proj.{kind}" for name in "qkv"]
        rules.append(WeightConverter(f"attention.qkv.{kind}", parts, operations=[Chunk(dim=0)]))
    register_checkpoint_conversion_mapping(InternVLUConfig.model_type, rules, overwrite=True)
