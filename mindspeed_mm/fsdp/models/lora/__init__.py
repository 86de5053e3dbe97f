"""Adapters: targets, injection, first values, files, merging."""
