"""Figures of saving: ratios within a round, the hash's own time taken off where there is one."""

from __future__ import annotations

from benchmarks.saving import CP, HASHED, PLAIN, figures


def test_ratios_are_of_the_same_round() -> None:
    rounds = []
    for cp_s, plain_s, hashed_s in ((1.0, 1.2, 1.5), (2.0, 2.2, 2.9), (4.0, 6.0, 4.9)):
        times = {CP: cp_s, PLAIN: plain_s, HASHED: hashed_s}
        one = {name: {"seconds": each, "cpu_s": 0.1, "bytes_read": 7e6} for name, each in times.items()}
        rounds.append({**one, "hash_s": 0.5})
    plain, hashed, read, *_ = figures(rounds)
    assert (plain.value, plain.met) == (1.2, True)
    assert (hashed.value, hashed.met) == (1.1, True)
    assert (read.value, read.met) == (7.0, False)
