"""TensorBoard's event files, written without TensorBoard, whose import is five megabytes and a third of a second.

A file is a row of records (https://www.tensorflow.org/tutorials/load_data/tfrecord), each a message `Event` in the wire
format of Protocol Buffers. The numbers of fields are those of `event.proto` and `summary.proto` of TensorFlow.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

# Fields of the messages. Event: wall_time, step, file_version, summary, session_log.
_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE = 1  # of a Summary
_TAG, _NUMBER, _IMAGE = 1, 2, 4  # of a Value
_HEIGHT, _WIDTH, _COLOURS, _ENCODED = 1, 2, 3, 4  # of an Image
_STATUS, _START = 1, 1  # of a SessionLog
_RGB = 3

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Wire types."""
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


class EventFile:
    """An event file that grows; every record is with the system when the call returns.

    Args:
        folder: Where the file is put, beside those of earlier starts.
        first_step: TensorBoard leaves out what earlier files of the folder say of this step and of later ones.

    Raises:
        OSError: From this and all methods: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        self._file = self._path.open("xb", buffering=0)
        self._write(_bytes(_VERSION, b"brain.Event:2"))
        if first_step:
            self._write(_varint(_STEP, first_step) + _bytes(_SESSION, _varint(_STATUS, _START)))

    def add_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """One event with the numbers of a step."""
        values = []
        for tag, number in numbers.items():
            values.append(_bytes(_TAG, tag.encode()) + _key(_NUMBER, _FLOAT) + struct.pack("<f", _in_range(number)))
        self._add(values, step)

    def add_picture(self, tag: str, encoded: bytes, width: int, height: int, step: int) -> None:
        """One event with a picture, as the bytes of a PNG or GIF file."""
        sizes = _varint(_HEIGHT, height) + _varint(_WIDTH, width) + _varint(_COLOURS, _RGB)
        self._add([_bytes(_TAG, tag.encode()) + _bytes(_IMAGE, sizes + _bytes(_ENCODED, encoded))], step)

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()

    def _add(self, values: Iterable[bytes], step: int) -> None:
        self._write(_varint(_STEP, step) + _bytes(_SUMMARY, b"".join(_bytes(_VALUE, value) for value in values)))

    def _write(self, event: bytes) -> None:
        if not self._path.exists():
            raise FileNotFoundError(f"the event file {self._path} is gone")
        data = _key(_TIME, _DOUBLE) + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))


def _in_range(number: float) -> float:
    """As fp32 holds it: what is too large becomes infinite, where `struct` would raise."""
    try:
        struct.pack("<f", number)
    except OverflowError:
        if number > 0:
            return float("inf")
        return float("-inf")
    return number


def _key(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def _varint(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _digits(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _digits(len(value)) + value


def _digits(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as records have it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        table.append(number)
    return table
