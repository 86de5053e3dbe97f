"""Rows of files: which files, in which format, and what a row becomes."""
