"""The `model` section: which model, from where, what of it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.value_types import Flag, Natural, Number, OpenSection, PathText, Patterns, Tokens, renamed

Kernel = Literal["eager", "triton", "ascendc"]


class ModelArguments(OpenSection):
    """Which model, from where, and what of it is trained. The model's own plugin may add keys."""

    model_id: str | None = None
    """Registered id of the model. Not given: the transformers Auto class that matches `architectures` in the folder's
    config.json."""
    model_name_or_path: PathText | None = None
    """Local folder with config.json, and with the weights unless `training.load` or `train_from_scratch` says
    otherwise; or a run, or one of its checkpoints, whose weights and tokenizer are taken, with adapters merged. Nothing
    is downloaded."""
    train_from_scratch: Flag = False
    """Initialise the weights from the seed instead of loading them."""
    trust_remote_code: Flag = False
    """Let the folder's own Python files define the model. They are executed, so read them first."""
    attn_implementation: (
        Literal[
            "eager",
            "sdpa",
            "flash_attention_2",
            "flash_attention_3",
            "flash_attention_4",
            "flex",
            "flex_attention",
            "native-sparse",
            "mm_varlen",
        ]
        | None
    ) = None
    """Attention kernel; null: the best one available on this machine, which is printed."""
    freeze: Patterns = ()
    """Patterns of the modules whose parameters are not trained, e.g. `model.visual`; or of single parameters."""
    add_tokens: Tokens = ()
    """Tokens to add to the tokenizer: a list, or a text file with one token a line. The embedding and the output head
    get a row for each, which starts as the mean of the rows that were there. Adapters train these rows in full. Tokens
    that the tokenizer already has are reported and stay as they are."""
    add_special_tokens: Tokens = ()
    """As `add_tokens`, for special tokens: text is never split inside them, and decoded answers leave them out."""
    mtp_num_layers: Natural = 0
    """Number of multi-token prediction layers to train; 0 switches it off."""
    mtp_loss_scaling_factor: Annotated[Number, Field(ge=0)] = 0.1
    """Weight of the multi-token prediction loss in the total loss."""
    gdn_implementation: Kernel | None = None
    """Kernel that computes gated delta-net layers."""
    causal_conv1d_implementation: Kernel | None = None
    """Kernel of causal one-dimensional convolutions."""
    kda_implementation: Annotated[Kernel, renamed(fused="triton", naive="eager")] | None = None
    """Kernel that computes Kimi delta-attention layers. Older files write `fused` for `triton` and `naive` for
    `eager`."""
    skip_flash_attn_recompute: Flag = False
    """Keep the results of flash attention instead of recomputing them."""
    skip_gdn_recompute: Flag = False
    """Keep the results of gated delta-net kernels instead of recomputing them."""
    skip_kda_recompute: Flag = False
    """Keep the results of Kimi delta-attention kernels instead of recomputing them."""
    use_grouped_expert_matmul: Flag = False
    """Multiply all experts of a layer in one grouped kernel. The text suite calls this key `moe_grouped_gemm`."""
    checkpoint_path: PathText | None = None
    """Weights of models whose configuration is stored elsewhere (LTX)."""
    text_encoder_path: PathText | None = None
    """Folder of the text encoder of a generative model."""
    task: str | None = None
    """Task that a generative model is trained for, if its folder allows more than one: `t2v` or `v2v`, `i2v` or `flf2v`
    … Null: the first task of the folder's pipeline."""
    vae_tiling: Flag = False
    """Let the VAE of a generative model encode and decode large pictures and clips tile by tile, which takes less
    memory. Latents and pixels differ a little where tiles meet."""
    vae_slicing: Flag = False
    """Let the VAE of a generative model encode and decode one sample of a batch at a time, which takes less memory."""
    quantize_encoders: Literal["nf4", "int8"] | None = None
    """Keep the linear layers of a generative model's frozen text and picture encoders in 4 or 8 bits, in extraction, in
    training on raw media and in sampling: they take less memory, and features differ a little."""
    transformer: JsonObject | None = None
    """Settings of a generative model's denoising transformer."""
