"""`torchrun $DISTRIBUTED_ARGS evaluate_vlm.py $GPT_ARGS …`: see mindspeed_mm/evaluate_vlm.py."""

from mindspeed_mm.evaluate_vlm import main

if __name__ == "__main__":
    main()
