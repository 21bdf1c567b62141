"""The daemon's standard streams.

The law of this module: a stream that is closed, full, or read by nobody costs what was to be said
there, and nothing else.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

__all__ = ["complain", "hold_standard", "say"]


def hold_standard() -> None:
    """Descriptors 0 to 2 are somebody's from now on. If one was closed, the next file would get its
    number, and what a library prints to standard error would go into the arena or a slab."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if descriptor > 2:
            os.close(descriptor)
            break
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> OSError | None:
    """To standard output; why it could not be said, if so."""
    return _write(sys.stdout, text)


def complain(line: str) -> None:
    """One line to standard error, if anybody is there."""
    _write(sys.stderr, f"kvd: {' '.join(line.split())}\n")


def _write(stream: TextIO | None, text: str) -> OSError | None:
    if stream is None:
        return OSError("it is closed")
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _silence(stream)
        return error
    return None


def _silence(stream: TextIO) -> None:
    """What it still holds goes nowhere, or the interpreter's last flush would complain."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
