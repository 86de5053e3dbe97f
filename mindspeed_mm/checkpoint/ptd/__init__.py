"""Converters between Hugging Face folders and the Megatron-style checkpoints that MindSpeed-MM trains."""
