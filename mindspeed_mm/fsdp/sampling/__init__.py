"""Prompts and samplers of generators: what draws while training, afterwards, and in an evaluation."""
