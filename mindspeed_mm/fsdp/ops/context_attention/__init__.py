"""Exact attention over a sequence that is spread over ranks: ring, Ulysses, and one inside the other."""
