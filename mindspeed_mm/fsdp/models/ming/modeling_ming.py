"""Ming-Lite-Omni (arXiv:2506.09344): pictures and videos through Qwen2.5-VL's tower, sounds through Whisper's encoder
or SAN-M, into a mixture of experts whose routers differ by what a token stands for.

What a tower makes is brought to length 1 before it takes the places of its tokens. The model that speaks is not built,
and the one that draws is `ming_draw`: a released folder's weights of them are left as they are. Shapes: B rows of L
tokens, H features of the language model; P patches; N sounds of F frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from mindspeed_mm.fsdp.models.deepseek_vl2.modeling_deepseek_vl2 import AnswersPictures
from mindspeed_mm.fsdp.models.ming.configuration_ming import BailingMMConfig
from mindspeed_mm.fsdp.models.ming.hearing_ming import MingSanm, MingWhisper, SoundProjection
from mindspeed_mm.fsdp.models.ming.language_ming import AUDIO, IMAGE, VIDEO, BailingMoeModel, ColumnNormHead
from mindspeed_mm.fsdp.models.ming.processing_ming import BailingMMImageProcessor, BailingMMProcessor
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("ming")
class BailingMMNativeForConditionalGeneration(AnswersPictures, PreTrainedModel, GenerationMixin):
    """The whole model, by the name that `architectures` has.

    Args:
        config: Of all its parts.
    """

    config: BailingMMConfig
    config_class = BailingMMConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = [
        "BailingMoeDecoderLayer",
        "Qwen2_5_VLVisionBlock",
        "WhisperEncoderLayer",
        "FunAsrNanoEncoderLayer",
    ]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^talker\."]

    def __init__(self, config: BailingMMConfig) -> None:
        super().__init__(config)
        language, width = config.llm_config, config.llm_config.hidden_size
        self.vision = Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config)
        layers: list[nn.Module] = [nn.Linear(config.vision_config.out_hidden_size, width)]
        for _ in range(1, config.mlp_depth):
            layers += [nn.GELU(), nn.Linear(width, width)]
        self.linear_proj = nn.Sequential(*layers)
        if config.audio_config is not None:
            encoder = MingWhisper if config.audio_config.hears_as_whisper else MingSanm
            self.audio = encoder._from_config(config.audio_config)
            self.linear_proj_audio = SoundProjection(config.audio_config, width, config.mlp_depth)
        self.language_model = BailingMoeModel._from_config(language)
        self.lm_head: nn.Module = nn.Linear(width, language.vocab_size, bias=False)
        if language.norm_head:
            self.lm_head = ColumnNormHead(width, language.vocab_size)
        self._rope_deltas: torch.Tensor | None = None
        self.post_init()

    @override
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ColumnNormHead):
            nn.init.normal_(module.weight, std=self.config.llm_config.initializer_range)

    @override
    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.embed_tokens = value

    @override
    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        """The language model without its head."""
        return self.language_model

    def get_towers(self) -> list[Tower]:
        """The tower of pictures and of videos, which sees one square of patches at least, and the encoder of sounds."""
        seen = {"image": "pixel_values", "video": "pixel_values_videos"}
        towers = [Tower(kind, "vision", key, "language_model", _see_nothing) for kind, key in seen.items()]
        if self.config.audio_config is not None:
            towers.append(Tower("audio", "audio", "input_features", "language_model", _hear_nothing))
        return towers

    def get_cut_points(self) -> Any:
        """Refuse a pipeline: routers of all stages ask what the tokens of the first one stand for.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be cut into stages: routers of each stage ask what the tokens stand for",
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1; parallel.expert_parallel_size spreads the experts.",
        )

    # --- what is seen and heard --------------------------------------------------------------------------------------

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        """(tokens, H) of pictures or videos.

        Args:
            pixel_values: (P, numbers of a patch), in squares of patches that become one token.
            image_grid_thw: (items, 3) patches along time, height and width.
        """
        made = self.vision(pixel_values.to(self.vision.dtype), grid_thw=image_grid_thw, return_dict=True)
        return F.normalize(self.linear_proj(made.pooler_output), dim=-1)

    def get_audio_features(self, input_features: torch.Tensor, input_features_mask: torch.Tensor) -> torch.Tensor:
        """(tokens, H) of sounds.

        Args:
            input_features: (N, F, numbers of a frame).
            input_features_mask: (N, F) where a sound is.

        Raises:
            DataError: Frames are of another size than the encoder's.
        """
        hearing = self.config.audio_config
        assert hearing is not None
        if input_features.shape[2] != hearing.features:
            raise DataError(
                f"frames of a sound have {input_features.shape[2]} numbers, and the model's encoder takes "
                f"{hearing.features}",
                key="model.model_name_or_path",
                way_out="Take configuration and processor of one version of the model.",
            )
        hidden, real = self.linear_proj_audio(*self.audio(input_features, input_features_mask))
        features = hidden[real]
        if hearing.norm_query_embeds:
            return F.normalize(features, dim=-1)
        return features

    # --- positions ---------------------------------------------------------------------------------------------------

    def get_rope_index(
        self,
        input_ids: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (3, B, L) by time, height and width, and (B, 1) how much further than by tokens the next one is.

        Words and sounds go on by one from the furthest position so far. A token of a picture or video is as far behind
        that as its place in the grid, its time counted in pairs of frames, whatever their rate.

        Args:
            input_ids: Tokens (B, L).
            mm_token_type_ids: (B, L) what each stands for.
            image_grid_thw: (pictures, 3) patches along time, height and width.
            video_grid_thw: The same of videos.
            attention_mask: (B, L), 0 for padding.
        """
        merge = self.config.vision_config.spatial_merge_size
        grids = {}
        for kind, grid in ((IMAGE, image_grid_thw), (VIDEO, video_grid_thw)):
            if grid is not None and self.config.llm_config.counts_media:
                grids[kind] = iter(host_values(grid))
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = torch.zeros(3, *input_ids.shape, dtype=torch.long)
        deltas = []
        for row, (kinds, is_real) in enumerate(zip(mm_token_type_ids.cpu(), real.bool().cpu(), strict=True)):
            found = list(_blocks(kinds[is_real].tolist(), grids, merge))
            of_row = torch.cat(found, dim=1) if found else torch.zeros(3, 0, dtype=torch.long)
            positions[:, row, is_real] = of_row
            deltas.append(int(of_row.max()) + 1 - of_row.shape[1] if found else 0)
        return positions.to(input_ids.device), torch.tensor(deltas, device=input_ids.device)[:, None]

    @override
    def _prepare_position_ids_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Positions (4, B, L) of a prompt: by tokens, then by time, height and width. What follows goes on."""
        by_tokens: torch.Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        cache = model_kwargs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        ids, kinds = model_kwargs.get("input_ids", inputs_tensor), model_kwargs.get("mm_token_type_ids")
        if past and self._rope_deltas is not None and (kinds is None or not bool(kinds[:, past:].any())):
            return torch.cat([by_tokens[None], (by_tokens + self._rope_deltas)[None].expand(3, -1, -1)])
        three = by_tokens[None].expand(3, -1, -1)
        self._rope_deltas = torch.zeros(len(by_tokens), 1, dtype=torch.long, device=by_tokens.device)
        if kinds is not None and ids.dim() == 2:
            grids = (model_kwargs.get("image_grid_thw"), model_kwargs.get("video_grid_thw"))
            mask = model_kwargs.get("attention_mask")
            three, self._rope_deltas = self.get_rope_index(ids, kinds, *grids, attention_mask=mask)
            three = three[..., -by_tokens.shape[1] :]
        return torch.cat([by_tokens[None], three])

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        input_features_mask: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocabulary) of tokens (B, L).

        Args:
            input_ids: Tokens.
            pixel_values: As of `get_image_features`, of all pictures of the batch.
            image_grid_thw: Their grids.
            pixel_values_videos: The same of all videos.
            video_grid_thw: Their grids.
            input_features: As of `get_audio_features`, of all sounds of the batch.
            input_features_mask: Where they are.
            mm_token_type_ids: (B, L) what each token stands for: 0 text, 1 a picture, 2 a video, 3 a sound. It chooses
                the router, too; None: all are text.
            attention_mask: As transformers' text models take it; so are the remaining arguments.
            position_ids: Places of the tokens, as of `get_rope_index`, or with those by tokens in front.
            past_key_values: Cache.
            inputs_embeds: In place of tokens.
            labels: Tokens to predict, for the model's own loss.
            use_cache: Whether the cache is filled.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            kwargs: For the language model.
        """
        if inputs_embeds is None:  # first: ranks that lack a medium run its tower behind all others
            inputs_embeds = self.get_input_embeddings()(input_ids)
        media: dict[int, torch.Tensor] = {}
        if pixel_values is not None:
            assert image_grid_thw is not None
            media[IMAGE] = self.get_image_features(pixel_values, image_grid_thw)
        if pixel_values_videos is not None:
            assert video_grid_thw is not None
            media[VIDEO] = self.get_image_features(pixel_values_videos, video_grid_thw)
        if input_features is not None:
            assert input_features_mask is not None
            media[AUDIO] = self.get_audio_features(input_features, input_features_mask)
        kinds = mm_token_type_ids
        if kinds is not None and kinds.shape[1] != inputs_embeds.shape[1]:  # a prompt's, while answers are written
            kinds = kinds[:, -inputs_embeds.shape[1] :]
        for kind, features in media.items():
            assert kinds is not None
            inputs_embeds = with_media(inputs_embeds, kinds == kind, features)
        if position_ids is None and past_key_values is None and input_ids is not None and kinds is not None:
            position_ids, _ = self.get_rope_index(input_ids, kinds, image_grid_thw, video_grid_thw, attention_mask)
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            mm_token_type_ids=kinds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return self.answered(outputs, labels, logits_to_keep, **kwargs)


def _blocks(kinds: list[int], grids: dict[int, Iterator[list[int]]], merge: int) -> Iterator[torch.Tensor]:
    """(3, tokens) positions of a row's runs of words, and of each of its pictures and videos."""
    at = place = 0
    while at < len(kinds):
        if kinds[at] in grids:
            time, height, width = next(grids[kinds[at]])
            ranges = [torch.arange(sides) for sides in (time, height // merge, width // merge)]
            block = torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1)
        else:
            end = at
            while end < len(kinds) and kinds[end] not in grids:
                end += 1
            block = torch.arange(end - at).expand(3, -1)
        yield block + place
        at += block.shape[1]
        place += int(block.max()) + 1


def _see_nothing(model: Any) -> torch.Tensor:
    vision, device = model.config.vision_config, current_device()
    side = vision.spatial_merge_size
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, numbers, device=device, dtype=model.vision.dtype)
    return model.get_image_features(pixels, torch.tensor([[1, side, side]], device=device))


def _hear_nothing(model: Any) -> torch.Tensor:
    frames = 4 * model.config.audio_config.ds_stride
    features = torch.zeros(1, frames, model.config.audio_config.features, device=current_device())
    return model.get_audio_features(features.to(model.audio.dtype), features.new_ones(1, frames).long())


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        MergeModulelist,
        Split,
        WeightConverter,
        WeightRenaming,
    )

    model = BailingMMNativeForConditionalGeneration
    AutoConfig.register(BailingMMConfig.model_type, BailingMMConfig, exist_ok=True)
    AutoModel.register(BailingMMConfig, model, exist_ok=True)  # where its rule of positions is looked for
    AutoModelForImageTextToText.register(BailingMMConfig, model, exist_ok=True)
    AutoImageProcessor.register(BailingMMConfig, fast_image_processor_class=BailingMMImageProcessor, exist_ok=True)
    AutoProcessor.register(BailingMMConfig, BailingMMProcessor, exist_ok=True)
    rules: list[Any] = [WeightRenaming(released, own) for released, own in _NAMES.items()]
    of_sanm: list[Any] = [WeightRenaming(released, own) for released, own in _NAMES_OF_SANM.items()]
    for kind in ("weight", "bias"):
        own = [f".attention.{name}_proj.{kind}" for name in "qkv"]
        rules.append(WeightConverter(f".attention.query_key_value.{kind}", own, operations=[Split(dim=0)]))
        own = [f".self_attn.{name}_proj.{kind}" for name in "qkv"]
        of_sanm.append(WeightConverter(f".self_attn.linear_q_k_v.{kind}", own, operations=[Chunk(dim=0)]))
    gate_up = [f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up")]
    joined = [MergeModulelist(dim=0), Concatenate(dim=1)]
    rules.append(WeightConverter(gate_up, "mlp.experts.gate_up_proj", operations=joined))
    stacked = [MergeModulelist(dim=0)]
    rules.append(WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=stacked))
    of_whisper = [WeightRenaming(released, own) for released, own in _NAMES_OF_WHISPER.items()]
    register_checkpoint_conversion_mapping(BailingMMConfig.model_type, rules, overwrite=True)
    register_checkpoint_conversion_mapping(MingWhisper.__name__, of_whisper, overwrite=True)
    register_checkpoint_conversion_mapping(MingSanm.__name__, of_sanm, overwrite=True)


_NAMES = {
    r"^model\.model\.": "language_model.",
    r"^language_model\.word_embeddings\.": "language_model.embed_tokens.",
    r"^model\.lm_head\.": "lm_head.",
    r"\.attention\.dense\.": ".attention.o_proj.",
    r"\.mlp\.image_gate\.weight": ".mlp.gate.image_weight",
    r"\.mlp\.audio_gate\.weight": ".mlp.gate.audio_weight",
}
"""Released name → name here."""
_BLOCK, _LAYER = r"blocks\.(\d+)\.", r"(encoders0?\.\d+)\."
_NAMES_OF_WHISPER = {
    rf"{_BLOCK}attn\.query\.": r"blocks.\1.self_attn.q_proj.",
    rf"{_BLOCK}attn\.key\.": r"blocks.\1.self_attn.k_proj.",
    rf"{_BLOCK}attn\.value\.": r"blocks.\1.self_attn.v_proj.",
    rf"{_BLOCK}attn\.out\.": r"blocks.\1.self_attn.out_proj.",
    rf"{_BLOCK}attn_ln\.": r"blocks.\1.self_attn_layer_norm.",
    rf"{_BLOCK}mlp\.0\.": r"blocks.\1.fc1.",
    rf"{_BLOCK}mlp\.2\.": r"blocks.\1.fc2.",
    rf"{_BLOCK}mlp_ln\.": r"blocks.\1.final_layer_norm.",
}
"""The same of version 1.5's encoder of sounds, which is named as openai-whisper's."""
_NAMES_OF_SANM = {
    rf"{_LAYER}self_attn\.linear_out\.": r"\1.self_attn.o_proj.",
    rf"{_LAYER}self_attn\.fsmn_block\.": r"\1.self_attn.fsmn.conv.",
    rf"{_LAYER}feed_forward\.w_1\.": r"\1.mlp.fc1.",
    rf"{_LAYER}feed_forward\.w_2\.": r"\1.mlp.fc2.",
    rf"{_LAYER}norm1\.": r"\1.input_layernorm.",
    rf"{_LAYER}norm2\.": r"\1.post_attention_layernorm.",
}
"""The same of the preview's, which is named as FunASR's."""
