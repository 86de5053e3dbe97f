"""Keeps libraries from printing over our own lines: what they say becomes an error of ours or does not matter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Inside, `transformers` and `diffusers` show no bars and log nothing below an error."""
    with ExitStack() as stack:
        for library in libraries:
            stack.enter_context(_quiet(library))
        yield


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    logging = importlib.import_module(f"{library}.utils.logging")
    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # A changed level empties what each of thousands of loggers has kept: only where it changes.
    is_loud = verbosity < logging.ERROR
    if is_loud:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_loud:
            logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
