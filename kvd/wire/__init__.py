"""Protocol 1: framing, messages, limits, versions, and where the sockets are.

The law of this package: bytes in, values out, and the other way round. It opens no socket, starts
no thread and reads no clock; whatever a peer sends, decoding ends in a value or in a typed error.
docs/protocol.md states it to the byte; tests/wire/golden.json holds it there.
"""

from kvd.wire.frame import (
    HEADER_BYTES,
    NO_SESSION,
    NO_TRACE,
    Address,
    Frame,
    Trace,
    address_of,
    check_payload,
    decode_frame,
    encode_frame,
)
from kvd.wire.limits import DEFAULT_LIMITS, Limits
from kvd.wire.ops import FrameFlag, GetFlag, HintKind, LookupFlag, Op
from kvd.wire.paths import attach_path, check_socket_path, default_socket, short_address
from kvd.wire.versions import FEATURES, MAJOR, MINOR, check_version, common_features

__all__ = [
    "DEFAULT_LIMITS",
    "FEATURES",
    "HEADER_BYTES",
    "MAJOR",
    "MINOR",
    "NO_SESSION",
    "NO_TRACE",
    "Address",
    "Frame",
    "FrameFlag",
    "GetFlag",
    "HintKind",
    "Limits",
    "LookupFlag",
    "Op",
    "Trace",
    "address_of",
    "attach_path",
    "check_payload",
    "check_socket_path",
    "check_version",
    "common_features",
    "decode_frame",
    "default_socket",
    "encode_frame",
    "short_address",
]
