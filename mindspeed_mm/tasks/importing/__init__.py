"""Reads the setups of other trainers and writes what means the same here."""
