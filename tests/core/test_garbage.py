"""What is built is kept from the garbage collector while it works, and given back afterwards."""

import subprocess
import sys

SCRIPT = """
import gc
from mindspeed_mm.core.garbage import collecting_later, passed_over_by_collection

class Node:
    pass

def is_alive():
    return any(isinstance(each, Node) for each in gc.get_objects())

found = gc.get_freeze_count()
with collecting_later():
    assert not gc.isenabled()
    built = Node()
    built.itself = built
    with passed_over_by_collection():
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen > found + 1000
        with passed_over_by_collection():
            pass
        assert gc.get_freeze_count() == frozen, "an inner one thaws what the outer one froze"
        made = Node()
        made.itself = made
        del made
        gc.collect()
        assert not is_alive(), "what is made inside is collected"
    assert gc.get_freeze_count() <= found
    assert is_alive()
    del built
    gc.collect()
    assert not is_alive(), "what was built can be collected afterwards"
assert gc.isenabled()
"""

FOR_GOOD = """
import gc
from mindspeed_mm.core.garbage import freeze_for_good, passed_over_by_collection

freeze_for_good()
frozen, count = gc.get_freeze_count(), gc.get_freeze_count
gc.get_freeze_count = lambda: 1 / 0
with passed_over_by_collection():
    pass
assert count() == frozen
"""


def test_what_is_built_is_passed_over_and_given_back() -> None:
    """In a process of its own: that of the tests has frozen what it imported."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def test_what_is_frozen_for_good_stays_so_and_is_not_counted_again() -> None:
    subprocess.run([sys.executable, "-c", FOR_GOOD], check=True, timeout=60)
