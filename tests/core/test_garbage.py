"""What is built is kept from the garbage collector while it works, and given back afterwards."""

import gc

from mindspeed_mm.core.garbage import collecting_later, passed_over_by_collection


def test_set_up_is_not_collected_and_what_it_built_is_passed_over() -> None:
    found = gc.get_freeze_count()
    with collecting_later():
        assert not gc.isenabled()
        with passed_over_by_collection():
            assert gc.isenabled()
            assert gc.get_freeze_count() > found + 1000
            frozen = gc.get_freeze_count()
            with passed_over_by_collection():
                pass
            assert gc.get_freeze_count() == frozen  # an inner one thaws nothing of the outer one's
        assert gc.get_freeze_count() <= found
    assert gc.isenabled()


def test_a_cycle_made_inside_is_collected() -> None:
    class Node:
        pass

    with passed_over_by_collection():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        alive = gc.get_objects
        del node
        gc.collect()
        assert not any(isinstance(each, Node) for each in alive())
