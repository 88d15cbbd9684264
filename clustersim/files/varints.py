"""Numbers of protobuf's wire format, which several tools' files are in: read without the package ``protobuf``."""

from __future__ import annotations


def varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a place, and where it ends; -1 for one that is cut off or longer than 64 bits allow."""
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        shift = shift + 7
        at = at + 1
        if data[at - 1] < 0x80:
            return value, at
    return -1, at
