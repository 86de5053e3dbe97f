"""Encodes clips of VACE with control videos, masks and references: `get_sora_feature` by the name that scripts have."""

from __future__ import annotations

from mindspeed_mm.tools.feature_extraction.get_sora_feature import main

if __name__ == "__main__":
    main()
