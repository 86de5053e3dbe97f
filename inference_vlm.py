"""`python inference_vlm.py --mm-model model.json --load RUN`: see mindspeed_mm/inference_vlm.py."""

from mindspeed_mm.inference_vlm import main

if __name__ == "__main__":
    main()
