"""Predicts the memory of a training step without a device, without weights and without running anything.

`static_part` counts what stays from step to step; `simulation` runs the real model's own step on tensors that have
shapes and no memory, and `ledger` keeps the books; `gathering` adds what sharding holds for a while.
"""
