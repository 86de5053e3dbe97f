"""The voice of CosyVoice3 (arXiv:2505.17589): text → speech tokens → mel frames → wave."""
