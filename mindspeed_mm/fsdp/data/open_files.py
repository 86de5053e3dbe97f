"""Files that a data set from outside keeps open. Processes that are forked share the one position that such a file has:
each reads where another has sought. Of an archive that gives the bytes of other members, mostly without an error.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from itertools import islice

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

_MOST_LOOKED_AT = 1000
"""Of a list or a dict: of files that are kept in one, the first is one."""


def check_keeps_no_file_open(dataset: MMDataset) -> None:
    """Raise `ConfigError` where processes that are about to be forked would share a file of a data set."""
    members = attribute_at(dataset.origin, "__dict__", {})
    for name, value in members.items():
        if any(map(_is_open_file, _held(value))):
            raise ConfigError(
                f"{type(dataset.origin).__name__} keeps a file open in {name}; processes that read samples share the "
                "place in it, and get wrong bytes",
                key="data.dataset_param.dataset_type",
                way_out="Open it where a sample is read, and close it there: with open(path) as file. Or set "
                "data.dataloader_param.num_workers: 0.",
            )


def _held(value: object) -> Iterator[object]:
    """The value, or what a list or a dict holds, but for what is kept for this process alone."""
    if isinstance(value, Mapping):
        own = os.getpid()
        yield from (each for key, each in islice(value.items(), _MOST_LOOKED_AT) if key != own)
    elif isinstance(value, list | tuple):
        yield from islice(value, _MOST_LOOKED_AT)
    else:
        yield value


def _is_open_file(value: object) -> bool:
    if isinstance(value, tarfile.TarFile):
        value = value.fileobj
    elif isinstance(value, zipfile.ZipFile):
        value = value.fp
    if not isinstance(value, io.IOBase) or value.closed or not value.readable():
        return False
    try:
        value.fileno()
    except OSError:  # in memory
        return False
    return True
