"""VideoAlign's reward model, called VideoReward (arXiv:2501.13918, section 3): a Qwen2-VL whose hidden states at the
marks of its question become scores of a video.

Its class, its weights and its configuration are named as the published ones are: config.json is that of Qwen2-VL, with
`architectures` and `output_dim` of its own. Shapes: B rows of L tokens, K marks a row, D = `output_dim`, H of Qwen2-VL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Qwen2VLForConditionalGeneration
from transformers.utils import ModelOutput
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.utils.register import model_register

_KEY, _MARKS = "model.output_dim", 3
_OWN = ("output_dim", "reward_loss")
"""Settings of the configuration that the YAML may change."""


@dataclass
class RewardOutput(ModelOutput):
    """What the model makes of its questions."""

    rewards: torch.Tensor | None = None
    """(B, K): a score of each mark."""


@model_register.register("videoalign")
class Qwen2VLRewardModelBT(Qwen2VLForConditionalGeneration):
    """Qwen2-VL with a linear layer for scores in place of the head of words.

    Args:
        config: Of Qwen2-VL. Its `output_dim` is 1, as without one, where all marks share a row of the head, or the
            number of marks where each has a row of its own.
    """

    # There is no head of words to tie to the embedding.
    _tied_weights_keys: ClassVar[dict[str, str]] = {}
    scores_videos = True
    """It is trained on pairs of videos, and what it returns are `rewards`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.lm_head
        self.rm_head = nn.Linear(config.text_config.hidden_size, int(getattr(config, "output_dim", 1)), bias=False)

    @override
    def get_output_embeddings(self) -> None:
        return None

    @classmethod
    def can_generate(cls) -> bool:
        """Whether it answers in words: it does not."""
        return False

    @classmethod
    def overwrite_transformer_config(cls, config: Any, model_args: Any, feature_args: Any = None) -> Any:
        """Give a configuration of Qwen2-VL what tells the reward model from it.

        Raises:
            ConfigError: `model.output_dim` is not what the folder was trained with, or neither 1 nor 3.
        """
        del feature_args
        is_own, asked = cls.__name__ in (config.architectures or ()), model_args.get("output_dim")
        trained = getattr(config, "output_dim", 1)
        if asked is not None and is_own and asked != trained:
            way_out = "Leave it out, or start from a folder of Qwen2-VL."
            raise ConfigError(f"{asked}, and the folder's head has {trained}", key=_KEY, way_out=way_out)
        if (asked or trained) not in (1, _MARKS):
            what = f"{asked or trained} rows of the head are neither 1, for all marks, nor one of each of {_MARKS}"
            raise ConfigError(what, key=_KEY, way_out=f"Set 1 or {_MARKS}.")
        config.architectures = [cls.__name__]
        for name in _OWN:
            if (value := model_args.get(name)) is not None:
                setattr(config, name, value)
        return config

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        reward_places: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> RewardOutput:
        """Scores of every row.

        Args:
            input_ids: (B, L).
            reward_places: (B, K) int64 places of the marks in their rows.
            attention_mask: (B, L), 1 on real tokens.
            position_ids: (4, B, L) or (3, B, L); None: they are counted.
            pixel_values_videos: Patches of videos.
            video_grid_thw: (videos, 3) grids of patches.
            mm_token_type_ids: (B, L), 0 of text and 2 of videos.
            use_cache: Whether to make a cache, which nothing needs.
            kwargs: For attention.
        """
        made = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_BLH = made.last_hidden_state
        places = reward_places.unsqueeze(-1).expand(-1, -1, hidden_BLH.shape[-1])
        scores_BKD = self.rm_head(hidden_BLH.gather(1, places))
        if scores_BKD.shape[2] == 1:
            return RewardOutput(scores_BKD.squeeze(2))
        # (B, K, K): mark k is scored by row k of the head.
        return RewardOutput(scores_BKD.diagonal(dim1=1, dim2=2))
