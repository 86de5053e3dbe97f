"""Fun-ASR: speech recognition."""
