"""Every message of protocol 1 with fixed values, and the bytes that kvd makes of it.

Run as a program it prints all vectors; `golden.json` beside it is what they must be for ever. It
was written once by this program: a difference is a broken protocol, not an old file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvd.wire import DEFAULT_LIMITS, FrameFlag, Op, Trace, encode_frame
from kvd.wire import messages as m
from kvd.wire.attach import (
    ArenaTold,
    AttachReply,
    AttachRequest,
    encode_attach,
    encode_attach_error,
    encode_attach_reply,
)

SPEC = bytes(range(32))
HASHES = bytes(range(64))
PARENT = bytes(range(100, 132))
PRINTS = bytes(range(200, 232))
TOKENS = bytes.fromhex("4000000010000000")
POS0 = bytes.fromhex("8000000000000000c000000000000000")
ITEMS = bytes.fromhex("0000000001000000")
REF = bytes.fromhex("0000000007000000001000000000000000200000000000000900000000000000")
SESSION = bytes(range(16, 32))
TRACE = Trace(bytes(range(16)), bytes(range(8)), 1)

REQUESTS: dict[str, m.Request] = {
    "hello": m.Hello("vllm-0", ("inline", "trace"), 123456789, "main", None, None),
    "hello tcp": m.Hello("Grüße", (), 0, None, b"group", b"token"),
    "register_spec": m.RegisterSpec(b"an encoded spec"),
    "reserve": m.Reserve(
        SPEC, 1, (0, 3), HASHES, PARENT, 5, PRINTS, TOKENS, POS0, 2, 30_000_000_000
    ),
    "reserve plain": m.Reserve(SPEC, 2, (0,), HASHES, bytes(32), 0, PRINTS, None, None, 0, 1),
    "commit": m.Commit(17, None, None),
    "commit sealed": m.Commit(17, ITEMS, bytes(range(32))),
    "abort": m.Abort(17, ITEMS),
    "lookup": m.Lookup(SPEC, 1, (0,), HASHES, None, 1, 30_000_000_000, bytes(32), 0, 0),
    "lookup all": m.Lookup(SPEC, 1, (0, 1), HASHES, PRINTS, 15, 600_000_000_000, PARENT, 7, 1),
    "load": m.Load(3, None, None),
    "load some": m.Load(3, ITEMS, (1, 0)),
    "wait": m.Wait(4, 2, 1_000_000),
    "cancel": m.Cancel(4),
    "renew": m.Renew(3, 1_000_000_000),
    "release": m.Release(3),
    "evict": m.Evict(m.Selector(everything=True), False, 0, 1000),
    "evict some": m.Evict(
        m.Selector("a", SPEC, 1, (PARENT,), b"\x01", PARENT, 5, "sealed", "dram"), True, 9, 1
    ),
    "list": m.List("chunks", m.Selector(namespace="default"), 0, 100),
    "stat": m.Stat(),
    "heartbeat": m.Heartbeat(),
    "put": m.Put(SPEC, 1, (0,), HASHES[:32], bytes(32), 0, PRINTS[:16], None, None, 0, 5),
    "get": m.Get(SPEC, 1, (0,), HASHES, PRINTS, 8),
    "bye": m.Bye(),
}

REPLIES: dict[str, tuple[Op, m.Reply]] = {
    "hello": (
        Op.HELLO,
        m.HelloReply(
            "main",
            "0.1.0",
            ("inline",),
            1,
            DEFAULT_LIMITS._replace(chunk_bytes=1 << 25),
            "default",
            True,
            30_000_000_000,
            SESSION,
        ),
    ),
    "register_spec": (Op.REGISTER_SPEC, m.SpecReply(SPEC)),
    "reserve": (Op.RESERVE, m.ReserveReply(17, b"\x03\x04", REF, 99)),
    "reserve nothing": (Op.RESERVE, m.ReserveReply(0, b"\x06\x06", b"", 0)),
    "commit": (Op.COMMIT, m.OutcomesReply(b"\x01\x09")),
    "abort": (Op.ABORT, m.OutcomesReply(b"\x14")),
    "lookup": (Op.LOOKUP, m.LookupReply(b"\x01\x02", 1, 3, 99, None, None)),
    "lookup all": (
        Op.LOOKUP,
        m.LookupReply(
            b"\x01\x02",
            1,
            3,
            99,
            m.LoadReply(0, b"\x01", REF, True),
            m.ReserveReply(17, b"\x03", REF, 99),
        ),
    ),
    "load": (Op.LOAD, m.LoadReply(4, b"\x01\x00", REF, False)),
    "wait": (Op.WAIT, m.WaitReply(ITEMS, b"\x01\x0d", REF, 2, True)),
    "cancel": (Op.CANCEL, m.DoneReply()),
    "renew": (Op.RENEW, m.LeaseReply(99, 2)),
    "release": (Op.RELEASE, m.LeaseReply(0, 2)),
    "evict": (Op.EVICT, m.EvictReply(3, 1, 1, 1, 8192, [{"hash": "00"}], 12)),
    "list": (Op.LIST, m.ListReply([{"namespace": "default", "bytes": 1, "idle_s": 0.5}], None)),
    "stat": (Op.STAT, m.StatReply({"instance": "main", "tiers": [{"name": "dram"}]})),
    "heartbeat": (Op.HEARTBEAT, m.DoneReply()),
    "put": (Op.PUT, m.OutcomesReply(b"\x01")),
    "get": (Op.GET, m.OutcomesReply(b"\x01\x02")),
    "bye": (Op.BYE, m.DoneReply()),
}


def vectors() -> dict[str, Any]:
    """Name -> hex, in groups."""
    attach = AttachRequest(1, 0, "vllm-0", 4711, b"group", b"token", "main", True)
    attached = AttachReply(
        SESSION, bytes(16), "main", 7, "default", False, (ArenaTold(0, SESSION, 4096, 4096),), 5
    )
    frames = {
        "request": encode_frame(
            Op.LOOKUP,
            b"\x90",
            session=SESSION,
            request=0x0102030405060708,
            ack=0x0102030405060700,
            epoch=0x1112131415161718,
            deadline=0x2122232425262728,
            trace=TRACE,
            frames=2,
        ),
        "relative": encode_frame(
            Op.GET, b"", flags=int(FrameFlag.RELATIVE), request=2, ack=1, deadline=5000
        ),
        "error": encode_frame(
            Op.LOOKUP,
            m.encode_error(8, "keys a request: 5000, at most 4096 allowed"),
            flags=int(FrameFlag.REPLY | FrameFlag.ERROR),
            request=3,
            epoch=9,
        ),
    }
    return {
        # all but the minor version, which is the sender's
        "frames": {name: (data[:5] + b"\0" + data[6:]).hex() for name, data in frames.items()},
        "requests": {name: m.encode_request(v).hex() for name, v in REQUESTS.items()},
        "replies": {name: m.encode_reply(v).hex() for name, (_, v) in REPLIES.items()},
        "attach": {
            "request": encode_attach(attach).hex(),
            "bare": encode_attach(AttachRequest(1, 0, "", 1, None, None, None, False)).hex(),
            "reply": encode_attach_reply(attached).hex(),
            "error": encode_attach_error(4, "uid 1000 has no namespace").hex(),
        },
    }


# What 1.1 added: `golden_1_1.json`.
REQUESTS_1_1: dict[str, m.Request] = {
    "tier": m.Tier("nvme", "scrub"),
}
REPLIES_1_1: dict[str, tuple[Op, Any]] = {
    "tier": (Op.TIER, m.TierReply(True, "", 7)),
    "lookup below": (Op.LOOKUP, m.LookupReply(b"\x01\x01\x02", 2, 3, 99, None, None, b"\0\2\0")),
}


# What 1.2 added: `golden_1_2.json`.
REQUESTS_1_2: dict[str, m.Request] = {
    "hint": m.Hint(b"\x07" * 32, 1, bytes(range(64)), 3, 0, 60_000_000_000),
}
REPLIES_1_2: dict[str, tuple[Op, Any]] = {
    "hint": (Op.HINT, m.HintReply(7, 2, 1, 60_000_000_000)),
}

# What 1.3 added: `golden_1_3.json`.
REQUESTS_1_3: dict[str, m.Request] = {
    "prefetch": m.Prefetch(SPEC, 1, (0, 2), HASHES, 3_000_000_000),
}
REPLIES_1_3: dict[str, tuple[Op, Any]] = {
    "prefetch": (Op.PREFETCH, m.OutcomesReply(b"\x01\x06")),
}

# What 1.4 added: `golden_1_4.json`.
REQUESTS_1_4: dict[str, m.Request] = {
    "tenant": m.Tenant("set", "Büro \u2603", {"dram": {"min": "25%", "max": 4096}, "public": True}),
    "hello": m.Hello("c", (), 5, None, None, b"token", "public"),
}
REPLIES_1_4: dict[str, tuple[Op, Any]] = {
    "tenant": (Op.TENANT, m.TenantReply([{"name": "a", "tokens": 1}], "told-once")),
}

ADDED = {
    "1_1": (REQUESTS_1_1, REPLIES_1_1),
    "1_2": (REQUESTS_1_2, REPLIES_1_2),
    "1_3": (REQUESTS_1_3, REPLIES_1_3),
    "1_4": (REQUESTS_1_4, REPLIES_1_4),
}


def vectors_of(version: str) -> dict[str, Any]:
    """What a minor version added."""
    requests, replies = ADDED[version]
    return {
        "requests": {name: m.encode_request(v).hex() for name, v in requests.items()},
        "replies": {name: m.encode_reply(v).hex() for name, (_, v) in replies.items()},
    }


if __name__ == "__main__":
    chosen = vectors_of(sys.argv[1]) if sys.argv[1:] else vectors()
    print(json.dumps(chosen, indent=1, sort_keys=True))
