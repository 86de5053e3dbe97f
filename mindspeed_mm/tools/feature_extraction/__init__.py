"""Entries that encode media and captions once, before a generator is trained."""
