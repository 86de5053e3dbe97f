"""`torchrun $DISTRIBUTED_ARGS inference_sora.py --mm-model model.json …`: see mindspeed_mm/inference_sora.py."""

from mindspeed_mm.inference_sora import main

if __name__ == "__main__":
    main()
