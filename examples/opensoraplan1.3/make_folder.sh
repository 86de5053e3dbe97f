#!/usr/bin/env bash
# One folder in diffusers' layout of what was released apart: weights of LanguageBind/Open-Sora-Plan-v1.3.0 and mT5-xxl.
#   bash examples/opensoraplan1.3/make_folder.sh downloads/Open-Sora-Plan-v1.3.0 downloads/mt5-xxl t2v
set -euo pipefail
RELEASE=$(realpath "$1")
TEXT=$(realpath "$2")
TASK=${3:-t2v}
cd "$(dirname "$0")/../.."

if [ "$TASK" = i2v ]; then
    WEIGHTS=any93x640x640_i2v TO=models/Open-Sora-Plan-v1.3.0-i2v INPAINT=true
else
    WEIGHTS=any93x640x640 TO=models/Open-Sora-Plan-v1.3.0 INPAINT=false
fi
mkdir -p "$TO/scheduler"
ln -sfn "$RELEASE/$WEIGHTS" "$TO/transformer"
[ -d "$TO/vae" ] || mm-convert OpenSoraPlanConverter --version v1.3 vae_convert \
    --cfg.source_path "$RELEASE/vae/merged.ckpt" --cfg.target_path "$TO/vae"
python - "$TEXT" "$TO" "$INPAINT" <<'PYTHON'
import json, sys
from pathlib import Path

from transformers import AutoTokenizer, MT5EncoderModel

text, folder, inpaint = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "true"
MT5EncoderModel.from_pretrained(text, dtype="bfloat16").save_pretrained(folder / "text_encoder")
tokenizer = AutoTokenizer.from_pretrained(text)
tokenizer.save_pretrained(folder / "tokenizer")
scheduler = {
    "_class_name": "EulerAncestralDiscreteScheduler",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
index = {
    "_class_name": "OpenSoraInpaintPipeline" if inpaint else "OpenSoraPipeline",
    "transformer": ["opensora", "OpenSoraInpaint_v1_3" if inpaint else "OpenSoraT2V_v1_3"],
    "vae": ["opensora", "WFVAEModel"],
    "text_encoder": ["transformers", "MT5EncoderModel"],
    "tokenizer": ["transformers", type(tokenizer).__name__],
    "scheduler": ["diffusers", scheduler["_class_name"]],
}
(folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler, indent=2) + "\n")
(folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
PYTHON
echo "made $TO"
