"""Folders of Step-Video small enough for a test: the classes are the real ones, only the sizes are tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from tests.helpers.tiny_generators import seeded
from tests.helpers.tiny_language_models import character_tokenizer

HEAD_DIM = 8
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": HEAD_DIM, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "caption_channels": [16, 12],
}  # fmt: skip
VAE: dict[str, Any] = {
    "latent_channels": 4, "encoder_channels": 4, "encoder_multipliers": [1, 2, 2, 4], "decoder_channels": 4,
    "decoder_multipliers": [1, 1, 2, 4], "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip
STEP_LLM: dict[str, Any] = {
    "hidden_size": 16, "ffn_hidden_size": 24, "num_layers": 2, "num_attention_heads": 4, "num_attention_groups": 2,
}  # fmt: skip
_WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
)


def make_tiny_stepvideo(folder: Path, **changes: Any) -> None:
    """Write a folder in diffusers' layout.

    Args:
        folder: The folder.
        changes: Settings of the transformer.
    """
    from transformers import BertConfig, BertModel, BertTokenizer

    from mindspeed_mm.fsdp.models.stepvideo.pipeline_stepvideo import FlowMatchDiscreteScheduler, StepVideoPipeline
    from mindspeed_mm.fsdp.models.stepvideo.step_llm import StepLLMConfig, StepLLMModel
    from mindspeed_mm.fsdp.models.stepvideo.transformer import StepVideoModel
    from mindspeed_mm.fsdp.models.stepvideo.vae import StepVideoVAE

    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(_WORDS) + "\n")
    bert = BertTokenizer(str(vocabulary), model_max_length=77)
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = BertConfig(vocab_size=len(bert), max_position_embeddings=77, **sizes)
    llm = StepLLMConfig(**STEP_LLM, padded_vocab_size=len(tokenizer))
    StepVideoPipeline(
        transformer=seeded(lambda: StepVideoModel(**{**TRANSFORMER, **changes}), 0),
        vae=seeded(lambda: StepVideoVAE(**VAE), 1),
        text_encoder=seeded(lambda: StepLLMModel(llm), 2),
        tokenizer=tokenizer,
        text_encoder_2=seeded(lambda: BertModel(clip), 3),
        tokenizer_2=bert,
        scheduler=FlowMatchDiscreteScheduler(),
    ).save_pretrained(folder)
    vocabulary.unlink()
