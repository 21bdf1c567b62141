"""msgpack in and out, and the checks of single fields.

The law of this module: what comes in is either exactly what was asked for or a ProtocolError or
LimitExceeded; never another exception, never code that runs, never an allocation that the sender's
claims alone decide. Bodies are arrays; binary fields are packed bins (no object a key).
"""

from __future__ import annotations

from typing import Any

import msgpack

from kvd.chunk import REF_BYTES, Kind
from kvd.errors import ProtocolError
from kvd.wire.limits import DEFAULT_LIMITS, Limits, over

HASH_BYTES = 32
FINGERPRINT_BYTES = 16
DIGEST_BYTES = 16
U32 = 1 << 32
U64 = 1 << 64

# The unpacker makes an array of the claimed size at once: this bounds what a chain of nested
# claims can cost (1024 levels, the unpacker's own stack, of 32 KiB).
_MAX_ARRAY = 4096
_MAX_MAP = 1024
_BUFFER = 4096


def pack(value: Any, limit: int = DEFAULT_LIMITS.body) -> bytes:
    """Encode plain values (None, bool, int, float, str, bytes, list, tuple, dict).

    LimitExceeded if the result is longer than `limit` bytes.
    """
    try:
        # Not one packer for all: an allocation inside may collect garbage, and a finalizer lets
        # another thread in, or packs something itself. Both would write into one buffer.
        # And a small buffer, that grows: one of the usual 256 KiB lies at the end of the heap, so
        # that its memory goes back to the system each time, and is faulted in anew.
        data: bytes = msgpack.packb(value, buf_size=_BUFFER)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"can't be encoded: {error}") from error
    if len(data) > limit:
        raise over("bytes of a body", len(data), limit, "split the request")
    return data


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("a map names one key twice")
    return found


def unpack(data: bytes, *, rows: bool = False) -> list[Any]:
    """Decode a body: one msgpack array, nothing behind it. `rows`: arrays may be as long as the
    data allows (used by clients for a daemon's answers, never by the daemon)."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_ARRAY * 16 if rows else _MAX_ARRAY,
            max_map_len=_MAX_ARRAY * 16 if rows else _MAX_MAP,
            max_ext_len=0,
            object_pairs_hook=_unique,
        )
    except ProtocolError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"body is not valid msgpack: {reason}") from error
    if type(value) is not list:
        raise ProtocolError(f"body must be an array, not {type(value).__name__}")
    return value


def fields(value: list[Any], count: int, name: str, newer: bool) -> list[Any]:
    """Exactly `count` fields; more are cut off when the sender's minor is newer."""
    size = len(value)
    if size == count:
        return value
    if size > count and newer:
        for extra in value[count:]:
            check_nesting(extra, DEFAULT_LIMITS.nesting - 1, name)
        return value[:count]
    raise ProtocolError(f"{name}: {count} fields are due, {size} came")


def check_nesting(value: Any, levels: int, name: str) -> None:
    """ProtocolError if arrays and maps are nested deeper than `levels`."""
    if type(value) is dict:
        items: Any = value.values()
    elif type(value) is list:
        items = value
    else:
        return
    if levels <= 0:
        raise ProtocolError(f"{name}: nested deeper than {DEFAULT_LIMITS.nesting} levels")
    for item in items:
        check_nesting(item, levels - 1, name)


def wrong(name: str, due: str, value: object) -> ProtocolError:
    """The error for a field of the wrong type or range; the value itself is not repeated."""
    if type(value) is int:
        return ProtocolError(f"{name}: {due} is due, not {value}")
    if isinstance(value, (bytes, str, list, dict)):
        return ProtocolError(f"{name}: {due} is due, not {type(value).__name__} of {len(value)}")
    return ProtocolError(f"{name}: {due} is due, not {type(value).__name__}")


# -- single fields --------------------------------------------------------------------------------


def uint(value: Any, name: str, below: int = U64) -> int:
    """An integer, 0 <= value < below."""
    if type(value) is int and 0 <= value < below:
        return value
    raise wrong(name, f"an integer from 0 to {below - 1}", value)


def boolean(value: Any, name: str) -> bool:
    if type(value) is bool:
        return value
    raise wrong(name, "true or false", value)


def text(value: Any, name: str, most: int) -> str:
    """Text of at most `most` UTF-8 bytes. LimitExceeded if it is longer."""
    if type(value) is not str:
        raise wrong(name, "text", value)
    if len(value) * 4 > most:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > most:
            raise over(f"bytes of {name}", size, most, "shorten it")
    return value


def optional_text(value: Any, name: str, most: int) -> str | None:
    return None if value is None else text(value, name, most)


def names(value: Any, name: str, count: int, most: int) -> tuple[str, ...]:
    """At most `count` texts of at most `most` bytes."""
    if type(value) is not list:
        raise wrong(name, "an array of texts", value)
    if len(value) > count:
        raise over(f"entries of {name}", len(value), count, "name fewer")
    return tuple(text(item, name, most) for item in value)


def blob(value: Any, name: str, most: int) -> bytes:
    """At most `most` bytes. LimitExceeded if there are more."""
    if type(value) is not bytes:
        raise wrong(name, "bytes", value)
    if len(value) > most:
        raise over(f"bytes of {name}", len(value), most, "shorten it")
    return value


def optional_blob(value: Any, name: str, most: int) -> bytes | None:
    return None if value is None else blob(value, name, most)


def exactly(value: Any, name: str, size: int) -> bytes:
    """Exactly `size` bytes."""
    if type(value) is bytes and len(value) == size:
        return value
    raise wrong(name, f"{size} bytes", value)


def kind(value: Any) -> int:
    """A Kind's number."""
    if type(value) is int and (value == Kind.PREFIX or value == Kind.CONTENT):
        return value
    raise wrong("kind", "1 (prefix) or 2 (content)", value)


def shards(value: Any, limits: Limits) -> tuple[int, ...]:
    """Shard numbers: at least one, none twice."""
    if type(value) is not list or not value:
        raise wrong("shards", "an array of at least one shard number", value)
    if len(value) > limits.shards:
        raise over("shards a request", len(value), limits.shards, "ask for fewer")
    for number in value:
        if type(number) is not int or not 0 <= number < U32:
            raise wrong("shards", "an array of shard numbers", number)
    if len(value) > 1 and len(set(value)) != len(value):
        raise ProtocolError("shards: a shard is named twice")
    return tuple(value)


def hashes(value: Any, limits: Limits) -> tuple[bytes, int]:
    """Packed hashes, 32 bytes a key, and how many keys they are: at least one."""
    if type(value) is not bytes:
        raise wrong("hashes", "bytes", value)
    count, rest = divmod(len(value), HASH_BYTES)
    if rest or not count:
        raise wrong("hashes", f"{HASH_BYTES} bytes for each of at least one key", value)
    if count > limits.keys:
        raise over("keys a request", count, limits.keys, "split the request")
    return value, count


def results(keys: int, shard_count: int, limits: Limits) -> int:
    """Keys x shards, within the limit."""
    if keys * shard_count > limits.results:
        raise over(
            "shard results a request", keys * shard_count, limits.results, "split the request"
        )
    return keys * shard_count


def packed(value: Any, name: str, each: int, count: int) -> bytes:
    """A bin of `each` bytes for each of `count`."""
    if type(value) is bytes and len(value) == each * count:
        return value
    raise wrong(name, f"{each} bytes for each of {count}", value)


def optional_packed(value: Any, name: str, each: int, count: int) -> bytes | None:
    return None if value is None else packed(value, name, each, count)


def several(value: Any, name: str, each: int, most: int) -> bytes:
    """A bin of any number of entries of `each` bytes, up to `most` entries."""
    if type(value) is not bytes or len(value) % each:
        raise wrong(name, f"a multiple of {each} bytes", value)
    if len(value) > each * most:
        raise over(f"entries of {name}", len(value) // each, most, "split the request")
    return value


def refs(value: Any, granted: int) -> bytes:
    """Packed slot references, one for each of `granted` results."""
    return packed(value, "refs", REF_BYTES, granted)
