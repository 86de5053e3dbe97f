"""Qwen3-Omni's talker (arXiv:2509.17765): what the thinker read and answered, to the codes of the answer's speech.

The talker reads the text of a conversation as the thinker's embeddings, and pictures, videos and sounds as the hidden
states of one of the thinker's layers; each through a projection of its own. It is conditioned as by transformers'
`Qwen3OmniMoeForConditionalGeneration.generate`, whose modules these are. The thinker is frozen, and holds no layer
behind the one that the talker reads.

Shapes: B rows of L places of the talker and K of the thinker, T places of all the talker's rows, N frames among them,
G codebooks, D the talker's width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoePreTrainedModel

from mindspeed_mm.fsdp.models.behaviour.spoken_frames import CODE_LOSS_FACTOR, SpokenFrames, SpokenOutput
from mindspeed_mm.fsdp.models.structure.towers import Tower, find_towers
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("qwen3_omni_talker")
def qwen3_omni_talker() -> type[Qwen3OmniTalkerForConditionalGeneration]:
    """The class; its stored weights are fused and named by transformers' rules for the whole model."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    rules = get_checkpoint_conversion_mapping(Qwen3OmniMoeConfig.model_type)
    model_class = Qwen3OmniTalkerForConditionalGeneration
    register_checkpoint_conversion_mapping(model_class.__name__, rules, overwrite=True)
    return model_class


class Qwen3OmniTalkerForConditionalGeneration(Qwen3OmniMoePreTrainedModel):
    """The talker with its code predictor behind the beginning of a frozen thinker.

    Args:
        config: Of the whole released folder.

    Raises:
        ValueError: The talker reads a layer that the thinker does not have.
    """

    config_class = Qwen3OmniMoeConfig
    base_model_prefix = ""
    _no_split_modules: ClassVar[list[str]] = [
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeAudioEncoderLayer",
        "Qwen3OmniMoeVisionBlock",
        "Qwen3OmniMoeTalkerDecoderLayer",
        "Qwen3OmniMoeTalkerCodePredictorDecoderLayer",
    ]
    code_loss_factor = CODE_LOSS_FACTOR
    run_without_gradient: ClassVar[tuple[str, ...]] = ("thinker",)
    """Modules whose passes nothing is learnt from: their routers do not count in a balancing loss."""

    def __init__(self, config: Qwen3OmniMoeConfig) -> None:
        kept, layers = config.talker_config.accept_hidden_layer, config.thinker_config.text_config.num_hidden_layers
        if not 1 <= kept <= layers:
            raise ValueError(f"talker_config.accept_hidden_layer is {kept}, the thinker has {layers} layers")
        config = _config_of_parts(config, kept)
        super().__init__(config)
        self.thinker = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config.thinker_config)
        self.thinker.requires_grad_(False)
        self.thinker.lm_head, _text_model(self.thinker).norm = nn.Identity(), nn.Identity()
        self.talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config.talker_config)
        self._keys_to_ignore_on_load_unexpected = _unread_keys(kept, layers)
        self.post_init()
        # What the parts say of their layers, but for heads that are left out or are several.
        of_parts: dict[str, str] = vars(self).get("_tp_plan") or {}
        self._tp_plan = {name: style for name, style in of_parts.items() if not name.endswith(".lm_head")}

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of text, which is the thinker's."""
        return self.thinker.get_input_embeddings()  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        """The head of the first codebook."""
        return self.talker.codec_head  # type: ignore[no-any-return]

    def get_decoder(self) -> nn.Module:
        """Blocks and code predictor together: neither stages nor ranks of a sequence can part them, as the predictor
        goes on from the hidden state in front of each frame."""
        return self.talker  # type: ignore[no-any-return]

    def get_towers(self) -> list[Tower]:
        """Return the thinker's towers under their names in the whole model."""
        towers = []
        for tower in find_towers(self.thinker):
            module, decoder = f"thinker.{tower.module}", f"thinker.{tower.decoder}"
            towers.append(replace(tower, module=module, decoder=decoder, run=partial(_run_in_thinker, tower)))
        return towers

    def forward(
        self,
        input_ids: torch.Tensor,
        codec_ids: torch.Tensor,
        frame_places: torch.Tensor,
        thinker_input_ids: torch.Tensor,
        thinker_attention_mask: torch.Tensor,
        media_places: torch.Tensor,
        media_sources: torch.Tensor,
        attention_mask: torch.Tensor,
        input_features: torch.Tensor | None = None,
        feature_attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        video_second_per_grid: torch.Tensor | None = None,
        use_audio_in_video: bool | None = None,
        labels: torch.Tensor | None = None,
    ) -> SpokenOutput:
        """What each place stands for is the sum of what was read and of its codes.

        Args:
            input_ids: (B, L) of text, with the placeholders of media.
            codec_ids: (B, L, G), see `SpokenFrames`.
            frame_places: (N,) places of the frames in the flattened rows.
            thinker_input_ids: (B, K) of the conversation, as far as it has media.
            thinker_attention_mask: (B, K), 1 on real tokens.
            media_places: (M,) places of media in the talker's flattened rows.
            media_sources: (M,) the same places in the thinker's flattened rows.
            attention_mask: (B, L), 1 on real places.
            input_features: And what follows: media, as the thinker takes them.
            labels: (B, L) of the first codebook, not shifted; for the model's own loss.
        """
        talker, grids = self.talker, (image_grid_thw, video_grid_thw)
        media = {
            "input_features": input_features,
            "feature_attention_mask": feature_attention_mask,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "video_second_per_grid": video_second_per_grid,
            "use_audio_in_video": use_audio_in_video,
        }
        seen_KD = self._read(thinker_input_ids, thinker_attention_mask, media).index_select(0, media_sources)
        with torch.no_grad():
            words_BLD = self.get_input_embeddings()(input_ids)
        text_TD = talker.text_projection(words_BLD).flatten(0, 1)
        # Also without media, so that its parameters have gradients on every rank.
        read_TD = text_TD.index_put((media_places,), talker.hidden_projection(seen_KD).to(text_TD.dtype))
        sounds = None
        if feature_attention_mask is not None:
            sounds = feature_attention_mask.sum(dim=1)
        position_ids, _ = talker.get_rope_index(
            input_ids, *grids, attention_mask, bool(use_audio_in_video), sounds, video_second_per_grid
        )
        frames = SpokenFrames(codec_ids, frame_places, talker.model.codec_embedding, talker.code_predictor)
        hidden_BLD = talker.model(
            inputs_embeds=frames.added_to(read_TD).unflatten(0, input_ids.shape),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return frames.output(hidden_BLD, talker.codec_head, labels)

    @torch.no_grad()
    def _read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, media: Mapping[str, object]) -> torch.Tensor:
        """(B · K, width of the thinker) of its last layer here, before anything that follows on it."""
        kept: list[torch.Tensor] = []

        def keep(_layer: nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            if isinstance(output, tuple):
                output = output[0]
            kept.append(output)

        hook = _text_model(self.thinker).layers[-1].register_forward_hook(keep)
        try:
            given = {name: value for name, value in media.items() if value is not None}
            self.thinker(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **given)
        finally:
            hook.remove()
        return kept[-1].flatten(0, 1)


def _config_of_parts(config: Qwen3OmniMoeConfig, layers: int) -> object:
    """What is built of a released folder: that many layers of the thinker's decoder, and nothing that makes sounds."""
    config = copy.deepcopy(config)
    config.thinker_config.text_config.num_hidden_layers = layers
    config.talker_config.audio_config = config.thinker_config.audio_config  # by which positions of sounds are counted
    config.code2wav_config = None
    return config


def _unread_keys(kept: int, layers: int) -> list[str]:
    """Patterns of stored keys that have no place in the model."""
    decoder = r"^thinker\.model\.(language_model\.)?"
    patterns = [r"^code2wav\.", r"^thinker\.lm_head\.", rf"{decoder}norm\."]
    if kept < layers:
        behind = "|".join(map(str, range(kept, layers)))
        patterns.append(rf"{decoder}layers\.({behind})\.")
    return patterns


def _text_model(thinker: Any) -> Any:
    """The decoder; in releases of transformers before 5.23 the inner model itself."""
    return getattr(thinker.model, "language_model", thinker.model)


def _run_in_thinker(tower: Tower, model: Any) -> object:
    with torch.no_grad():
        return tower.run(model.thinker)
