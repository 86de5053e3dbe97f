"""Towers over ranks: media balanced between them, layouts of their own, towers without input."""
