"""The settings of Kimi-K3, as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from transformers import Kimi_K25Config, Kimi_K25VisionConfig, KimiLinearConfig

_Number = TypeVar("_Number", int, float)
_TEXT_AS_BUILT: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""Setting of the text model → its only value that is built, which is the released one."""
_VISION_AS_BUILT: dict[str, Any] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
"""The same of the tower and the projector."""
_VISION_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "merge_kernel_size": "merge_kernel_size",
    "patch_size": "patch_size",
    "qkv_hidden_size": "qkv_hidden_size",
}
"""Released setting of the tower → its name in the class."""


class KimiK3TextConfig(KimiLinearConfig):  # type: ignore[misc]
    """The text model: Kimi Linear's, with what Kimi-K3 adds to it.

    Args:
        kwargs: Released settings of Kimi Linear, `linear_attn_config` among them, and those of Kimi-K3:
            `attn_res_block_size` (layers whose sum is one source of attention residuals),
            `routed_expert_hidden_size` (features that routed experts work on), `activation_situ_beta` and
            `activation_situ_linear_beta` (bounds of the activation).

    Raises:
        ValueError: The file asks for what is not built.
    """

    model_type = "kimi_k3_text"

    def __init__(self, **kwargs: Any) -> None:
        check_built("text_config.", kwargs, _TEXT_AS_BUILT)
        linear = kwargs.get("linear_attn_config") or {}
        check_built("text_config.linear_attn_config.", linear, {"use_full_rank_gate": True})
        self.attn_res_block_size = _positive(kwargs, "attn_res_block_size", 12)
        self.routed_expert_hidden_size = _positive(kwargs, "routed_expert_hidden_size", 3584)
        self.activation_situ_beta = float(_positive(kwargs, "activation_situ_beta", 4.0))
        self.activation_situ_linear_beta = float(_positive(kwargs, "activation_situ_linear_beta", 25.0))
        lower = linear.get("gate_lower_bound", kwargs.pop("linear_gate_lower_bound", -5.0))
        if lower is not None:
            lower = float(lower)
        self.linear_gate_lower_bound: float | None = lower
        if "kda_layers" in linear and kwargs.get("layer_types") is None:
            # Counted from 1. A file whose num_hidden_layers was lowered may name more layers than there are.
            _check_layer_numbers(linear["kda_layers"])
            kinds = ("full_attention", "linear_attention")
            layers = range(1, kwargs.get("num_hidden_layers", 93) + 1)
            kwargs["layer_types"] = [kinds[number in linear["kda_layers"]] for number in layers]
        super().__init__(**{"hidden_act": "situ"} | kwargs)
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise `ValueError` where the router cannot choose its experts from its groups."""
        experts, groups, kept = self.num_local_experts, self.n_group, self.topk_group
        if groups < 1 or experts % groups or experts // groups < 2:  # the two best of a group are its score
            told = f"num_expert_group is {groups}, and num_experts {experts}"
            raise ValueError(f"text_config.{told}: groups are equal, of two experts or more")
        if not 1 <= kept <= groups:
            raise ValueError(f"text_config.topk_group is {kept}, of {groups} groups (num_expert_group)")
        if not 1 <= self.num_experts_per_tok <= kept * (experts // groups):
            told = f"num_experts_per_token is {self.num_experts_per_tok}"
            raise ValueError(f"text_config.{told}; the chosen groups have {kept * (experts // groups)} experts")


class KimiK3VisionConfig(Kimi_K25VisionConfig):  # type: ignore[misc]
    """The tower: Kimi-K2.5's, with heads that are wider together than its features.

    Args:
        qkv_hidden_size: Features of all heads of queries, of keys, and of values.
        kwargs: What Kimi-K2.5's tower has.
    """

    model_type = "kimi_k3_vision"

    def __init__(self, *, qkv_hidden_size: int = 1536, **kwargs: Any) -> None:
        self.qkv_hidden_size = qkv_hidden_size
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 12}
        super().__init__(**sizes | kwargs)

    @property
    def head_dim(self) -> int:
        """Width of a head, as attention asks for it."""
        return self.qkv_hidden_size // int(self.num_attention_heads)


class KimiK3Config(Kimi_K25Config):  # type: ignore[misc]
    """The whole model.

    Args:
        text_config: Of the text model.
        vision_config: Of the tower and of the projector behind it.
        media_placeholder_token_id: The token that stands for a part of a picture.
        kwargs: What every configuration has.

    Raises:
        ValueError: The file asks for what is not built.
    """

    model_type = "kimi_k3"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "text_config": KimiK3TextConfig,
        "vision_config": KimiK3VisionConfig,
    }

    def __init__(
        self,
        *,
        text_config: Any = None,
        vision_config: Any = None,
        media_placeholder_token_id: int = 163605,
        **kwargs: Any,
    ) -> None:
        if text_config is None or isinstance(text_config, Mapping):
            settings = dict(text_config or {})
            settings.pop("model_type", None)  # of Kimi Linear, in the released file
            text_config = KimiK3TextConfig(**settings)
        if vision_config is None or isinstance(vision_config, Mapping):
            settings = dict(vision_config or {})
            check_built("vision_config.", settings, _VISION_AS_BUILT)
            kwargs.setdefault("projection_layer_norm_eps", settings.get("projector_ln_eps", 1e-5))
            known = {_VISION_NAMES.get(name, name): value for name, value in settings.items()}
            vision_config = KimiK3VisionConfig(
                **{name: known[name] for name in _VISION_NAMES.values() if name in known}
            )
        self.media_placeholder_token_id = media_placeholder_token_id
        own = {"image_token_id": media_placeholder_token_id, "video_token_id": -1, "tie_word_embeddings": False}
        super().__init__(text_config=text_config, vision_config=vision_config, **own | kwargs)


def check_built(section: str, given: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Raise `ValueError` where settings ask for something else than the released values, which alone are built."""
    for name, value in built.items():
        if given.get(name, value) != value:
            raise ValueError(f"{section}{name} is {given[name]!r}; known is {value!r} only")


def _positive(settings: dict[str, Any], name: str, released: _Number) -> _Number:
    """A setting of the text model, which is taken out; the released value where the file has none.

    Raises:
        ValueError: It is no number above 0, or no whole one where the released one is.
    """
    value = settings.pop(name, None)
    if value is None:
        return released
    is_number = type(value) is int or (type(value) is float and isinstance(released, float))
    if not is_number or not 0 < value < float("inf"):
        wanted = "number" if isinstance(released, float) else "whole number"
        raise ValueError(f"text_config.{name} is {value!r}; it is a {wanted} above 0")
    return value  # type: ignore[no-any-return]


def _check_layer_numbers(numbers: Any) -> None:
    """Raise `ValueError` where `kda_layers` is no list of numbers from 1."""
    if not isinstance(numbers, list) or any(type(number) is not int or number < 1 for number in numbers):
        told = f"text_config.linear_attn_config.kda_layers is {numbers!r}"
        raise ValueError(f"{told}; it lists layers with a state by their numbers, which begin at 1")
