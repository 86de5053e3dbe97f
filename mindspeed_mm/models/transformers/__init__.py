"""Bases and classes of models that come from transformers."""
