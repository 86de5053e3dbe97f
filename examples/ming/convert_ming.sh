#!/usr/bin/env bash
# Brings what draws in Ming-Lite-Omni into diffusers' layout, which trains; an export of a run goes back to the released names.
#   bash examples/ming/convert_ming.sh models/Ming-Lite-Omni-1.5 models/Ming-Lite-Omni-1.5-drawing
#   bash examples/ming/convert_ming.sh exported/ming_draw_2B models/Ming-Lite-Omni-1.5-mine
set -euo pipefail
SOURCE="${1:?the released folder, or an exported one}" TARGET="${2:?the folder to write}"

if [ -f "$SOURCE/model_index.json" ]; then
  mm-convert MingConverter hf_to_source --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET"
else
  mm-convert MingConverter source_to_hf --cfg.source_path "$SOURCE" --cfg.target_path "$TARGET"
fi
