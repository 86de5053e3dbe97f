"""Benchmarks: speed and memory beside a floor and a peer, in the same run. Never part of the tests."""
