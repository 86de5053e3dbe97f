"""What is logged, for the few tests that ask: pytest's own plugin looks through all loggers six times a test, and there
are thousands of both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Inside, what is logged from a level on, also by loggers that hand nothing on to the root."""
    kept, root = _Kept(), logging.getLogger()
    known = (each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))
    loggers = [root, *(logger for logger in known if not logger.propagate)]
    before = root.level
    root.setLevel(level)
    for logger in loggers:
        logger.addHandler(kept)
    try:
        yield kept.records
    finally:
        for logger in loggers:
            logger.removeHandler(kept)
        root.setLevel(before)
