"""`torchrun … examples/deepseekocr2/finetune_ocr2.py …`: see mindspeed_mm/finetune_ocr2.py."""

from mindspeed_mm.finetune_ocr2 import main

if __name__ == "__main__":
    main()
