"""Helpers that data providers of training scripts import."""
