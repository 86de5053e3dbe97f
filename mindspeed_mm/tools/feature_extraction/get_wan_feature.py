"""Encodes media and captions for Wan: `get_sora_feature` under the name that scripts have."""

from __future__ import annotations

from mindspeed_mm.tools.feature_extraction.get_sora_feature import main

if __name__ == "__main__":
    main()
