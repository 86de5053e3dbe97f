"""DeepSeek-OCR2: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.deepseek_ocr2 import modeling_deepseek_ocr2 as modeling_deepseek_ocr2
