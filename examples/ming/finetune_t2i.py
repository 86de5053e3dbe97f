"""`torchrun … examples/ming/finetune_t2i.py …`: see mindspeed_mm/finetune_t2i.py."""

from mindspeed_mm.finetune_t2i import main

if __name__ == "__main__":
    main()
