"""DeepSeek-OCR, written here on the classes of Unlimited-OCR; importing this package registers it."""

from mindspeed_mm.fsdp.models.deepseek_ocr import modeling_deepseek_ocr as modeling_deepseek_ocr
