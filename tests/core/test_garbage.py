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
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=600)


def test_what_is_frozen_for_good_stays_so_and_is_not_counted_again() -> None:
    subprocess.run([sys.executable, "-c", FOR_GOOD], check=True, timeout=600)


NEW = """
import gc
from mindspeed_mm.core.garbage import collecting_later, collecting_what_is_new

class Node:
    pass

def make(count):
    for _ in range(count):
        node = Node()
        node.itself = node

def alive():
    return sum(isinstance(each, Node) for each in gc.get_objects())

thresholds = gc.get_threshold()
with collecting_later():
    make(5000)
    with collecting_what_is_new():
        assert alive() == 5000, "what was there before is not looked at"
        make(5000)
        assert alive() < 7000, "what is new is collected"
        stays = [Node() for _ in range(20000)]
        assert gc.get_stats()[2]["collections"] == 0
    assert not gc.isenabled() and gc.get_threshold() == thresholds and gc.get_freeze_count() == 0
with collecting_what_is_new():
    assert gc.isenabled(), "elsewhere it changes nothing"
assert gc.isenabled()
"""


def test_what_is_new_is_collected_and_what_was_there_is_not_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", NEW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
