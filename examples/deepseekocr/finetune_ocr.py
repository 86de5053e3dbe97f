"""`torchrun … examples/deepseekocr/finetune_ocr.py …`: see mindspeed_mm/finetune_ocr.py."""

from mindspeed_mm.finetune_ocr import main

if __name__ == "__main__":
    main()
