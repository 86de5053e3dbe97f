"""Fun-ASR, a model for speech recognition: the entry point of its training."""
