#!/usr/bin/env bash
# One folder in diffusers' layout of what was released apart: weights of LanguageBind/Open-Sora-Plan-v1.5.0, T5 and CLIP.
#   bash examples/opensoraplan1.5/make_folder.sh downloads/model_ema.pt downloads/vae/checkpoint.ckpt downloads/t5-v1_1-xl downloads/CLIP-ViT-bigG-14
set -euo pipefail
WEIGHTS=$(realpath "$1")
VAE=$(realpath "$2")
T5=$(realpath "$3")
CLIP=$(realpath "$4")
cd "$(dirname "$0")/../.."

TO=models/Open-Sora-Plan-v1.5.0
mkdir -p "$TO/scheduler"
for part in "transformer source_to_hf $WEIGHTS" "vae vae_convert $VAE"; do
    read -r name command source <<< "$part"
    [ -d "$TO/$name" ] || mm-convert OpenSoraPlanConverter --version v1.5 "$command" \
        --cfg.source_path "$source" --cfg.target_path "$TO/$name"
done
python - "$T5" "$CLIP" "$TO" <<'PYTHON'
import json, sys
from pathlib import Path

from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

t5, clip, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
T5EncoderModel.from_pretrained(t5, dtype="bfloat16").save_pretrained(folder / "text_encoder")
CLIPTextModelWithProjection.from_pretrained(clip, dtype="bfloat16").save_pretrained(folder / "text_encoder_2")
index = {
    "_class_name": "OpenSoraJointPipeline",
    "transformer": ["opensora", "OpenSoraT2V_v1_5"],
    "vae": ["opensora", "WFVAEModel"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "linear_quadratic": False,
}
for name, source in (("tokenizer", t5), ("tokenizer_2", clip)):
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder / name)
    index[name] = ["transformers", type(tokenizer).__name__]
scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0}
(folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler, indent=2) + "\n")
(folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
PYTHON
echo "made $TO"
