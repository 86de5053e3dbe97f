"""`torchrun $DISTRIBUTED_ARGS finetune_ocr.py $GPT_ARGS …`: see mindspeed_mm/finetune_ocr.py."""

from mindspeed_mm.finetune_ocr import main

if __name__ == "__main__":
    main()
