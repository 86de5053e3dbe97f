"""What data providers import to make iterators of loaders."""

from __future__ import annotations


def build_iterations(
    train_dl: object = None, val_dl: object = None, test_dl: object = None, **_: object
) -> tuple[object, object, object]:
    """The loaders as they are: the engine begins them again at their end, which an iterator would not do, and finds its
    place in them when a run is resumed.

    Args:
        train_dl: Of the training data, or None.
        val_dl: For validation, or None.
        test_dl: For the test at the end, or None.
        _: Kinds of iterators, of which none is needed.
    """
    return train_dl, val_dl, test_dl
