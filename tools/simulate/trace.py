"""A request trace as the simulator reads it.

The law of this module: one JSON object a line in the format of the Mooncake traces (timestamp in
ms, input_length in tokens, hash_ids: one id for each block of the prompt, where an id stands for
the block and all before it). Hashes only, never tokens. A line that does not hold is refused with
its number: a figure over half a trace is worse than none. Only a last line without its end is
passed over: whoever wrote it was killed, or is writing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS = 512  # of the Mooncake traces
LINE_MAX = 64 << 20  # bytes: no prompt is that long, and what has no lines may have no end
_WANTED = (
    "wanted is a recording of requests, one JSON object a line with timestamp, input_length and "
    "hash_ids: a daemon with trace.record = PATH writes one, Mooncake publishes some"
)


class TraceError(Exception):
    """A file that is no trace; the message names file, line and what was expected."""


class Request(NamedTuple):
    """One prompt. `blocks`: ids from the root on; equal ids are equal prefixes."""

    time_ns: int
    tokens: int
    blocks: tuple[int, ...]


class Trace(NamedTuple):
    name: str
    requests: list[Request]
    block_tokens: int
    parents: list[int]  # of each block; -1: a root

    @property
    def unique_blocks(self) -> int:
        return len(self.parents)

    @property
    def accesses(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """All requests of a file, in its order. `block_tokens`: tokens a full block. TraceError."""
    requests: list[Request] = []
    unique: dict[int | str, int] = {}
    parents: list[int] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_MAX + 1), b""), 1):
                if len(line) > LINE_MAX:
                    raise TraceError(
                        f"{path}:{number}: a line of more than {LINE_MAX} bytes: no trace"
                    )
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        if not line.endswith(b"\n"):
                            break
                        raise TraceError(
                            f"{path}:{number}: no JSON ({error}); {_WANTED}"
                        ) from error
                    try:
                        request = _request(row, unique)
                    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                        raise TraceError(f"{path}:{number}: {_why(error)}") from error
                    above = -1
                    for block in request.blocks:
                        if block == len(parents):
                            parents.append(above)
                        elif parents[block] != above:
                            raise TraceError(
                                f"{path}:{number}: a block stands behind two different prefixes;"
                                " hash_ids must be chained"
                            )
                        above = block
                    requests.append(request)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}: no requests in it; {_WANTED}")
    return Trace(path.name.removesuffix(".jsonl"), requests, block_tokens, parents)


def _request(row: Any, unique: dict[int | str, int]) -> Request:
    """`unique` numbers the blocks in the order of their first use: ids may be numbers or hex."""
    if not isinstance(row, dict):
        raise TypeError(f"no object; {_WANTED}")
    blocks = []
    for block in row["hash_ids"]:
        if not isinstance(block, int | str) or isinstance(block, bool):
            raise TypeError(f"hash id {block!r} is neither a number nor a text")
        blocks.append(unique.setdefault(block, len(unique)))
    time, tokens = float(row["timestamp"]), int(row["input_length"])
    if tokens < 0 or not -1e15 < time < 1e15:
        raise ValueError("timestamp or input_length out of range")
    return Request(int(time * 1e6), tokens, tuple(blocks))


def _why(error: Exception) -> str:
    if isinstance(error, LookupError):
        return f"field {error} is missing; {_WANTED}"
    return str(error)
