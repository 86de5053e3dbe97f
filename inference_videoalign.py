"""`torchrun … inference_videoalign.py --mm-data data.json --load MODEL`: see mindspeed_mm/inference_videoalign.py."""

from mindspeed_mm.inference_videoalign import main

if __name__ == "__main__":
    main()
