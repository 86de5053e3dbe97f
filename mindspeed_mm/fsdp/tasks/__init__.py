"""Entries under the names that models of speech have for theirs."""
