"""A daemon for tests of the client: real sockets and real shared memory, scripted answers.

It speaks attach and protocol 1 and keeps chunks in a dict over a real arena. `script` is asked
before each request: it may swallow the reply, delay it, or answer something else. It runs in a
thread of its own; `stop()` and `start()` again make a restart with a new epoch.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from kvd.arena import ArenaOwner
from kvd.chunk import KVSpec, Outcome, ShardSpec, SlotRef, pack_refs
from kvd.errors import KvdError, ProtocolError, UnknownHandle, UnknownSession
from kvd.wire import (
    DEFAULT_LIMITS,
    FEATURES,
    FrameFlag,
    Limits,
    LookupFlag,
    Op,
    attach_path,
    decode_frame,
    encode_frame,
    short_address,
)
from kvd.wire import messages as m
from kvd.wire.attach import (
    ArenaTold,
    AttachReply,
    AttachRequest,
    decode_attach,
    encode_attach_error,
    encode_attach_reply,
)

SLOT = 8192
MIB = 1 << 20


class Seen(NamedTuple):
    """A request as the daemon got it."""

    session: bytes
    request: int
    ack: int
    message: m.Request
    deadline: int
    trace_id: bytes


class Hold:
    """A reply that is kept until `go` is called."""

    def __init__(self) -> None:
        self.send: Callable[[], None] | None = None
        self.arrived = threading.Event()

    def go(self) -> None:
        assert self.send is not None
        self.send()


SWALLOW = object()
Script = Callable[[Seen], Any]


def make_spec(shards: int = 1, nbytes: int = SLOT, model: str = "fake") -> KVSpec:
    """A spec with `shards` shards of `nbytes` each."""
    table = tuple(ShardSpec(0, i, 0, 0, 0, 1, i, i + 1, nbytes) for i in range(shards))
    return KVSpec(
        model=model,
        revision="r1",
        weights="sha256:" + "0" * 64,
        engine="test",
        dtype="bfloat16",
        quantisation="none",
        codec="test",
        chunk_tokens=16,
        pipeline=1,
        tensor=shards,
        groups=1,
        rope=(),
        extra=(),
        shards=table,
    )


class FakeDaemon:
    """See the module. `socket` is the path for clients."""

    def __init__(self, *, instance: str | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.directory = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
        self.socket = os.path.join(self.directory, "k")
        tag = os.environ.get("PYTEST_LEAK_MARK", "")[:8]  # for conftest.py's search for leaks
        self.instance = instance or f"fake-{tag}-{os.path.basename(self.directory)}"
        self.features = FEATURES
        self.limits = limits._replace(chunk_bytes=64 * 1024)
        self.script: Script = lambda seen: None
        self.attach_script: Callable[[AttachRequest], bytes | None] = lambda request: None
        self.seen: list[Seen] = []
        self.executed: list[Seen] = []
        self.attached = 0
        self.free_run = 10**9  # slots that may be granted
        self.lease_ns: int | None = None  # instead of what is asked for
        self.pending_load = False  # loads are not done at once
        self.owner: ArenaOwner | None = None
        self.start()

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """A new life: the same sockets and arena, a new epoch, no sessions."""
        base = Path("/dev/shm") / f"kvd-{os.getuid()}-{self.instance}"
        self.base = base
        self.owner = ArenaOwner.open(
            base, 4 * MIB, slab_size=64 * 1024, instance=self.instance, now_unix_ns=time.time_ns()
        )
        while not self.owner.reserve_step():
            pass
        self.sessions: dict[bytes, int] = {}  # token -> lock descriptor of ours, or -1
        self.replies: dict[tuple[bytes, int], list[bytes]] = {}
        self.chunks: dict[tuple[bytes, int], SlotRef] = {}
        self.writes: dict[int, dict[int, tuple[tuple[bytes, int], SlotRef]]] = {}
        self.leases: dict[int, list[SlotRef | None]] = {}
        self.transfers: dict[int, int] = {}
        self.slot = 0
        self.handle = 0
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind("ipc://" + self.socket)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        target = attach_path(self.socket)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        with short_address(target) as address:
            self.listener.bind(address)
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.connections: dict[int, socket.socket] = {}
        self.tokens: dict[int, bytes] = {}
        self.deferred: list[Callable[[], None]] = []
        self.wake_r, self.wake_w = os.pipe()
        self.running = True
        self.thread = threading.Thread(target=self._run, name="fake-daemon")
        self.thread.start()

    def stop(self, *, keep_arena: bool = True) -> None:
        """End, as by SIGKILL: everything is closed, nobody is told."""
        if not self.running:
            return
        self.running = False
        os.write(self.wake_w, b"x")
        self.thread.join(10)
        assert not self.thread.is_alive()
        for connection in self.connections.values():
            connection.close()
        self.listener.close()
        self.router.close(0)
        self.context.term()
        os.close(self.wake_r)
        os.close(self.wake_w)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(attach_path(self.socket))
        assert self.owner is not None
        if keep_arena:
            self.owner.close()
        else:
            self.owner.destroy()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        if self.running:
            self.stop(keep_arena=False)
        shutil.rmtree(self.directory, ignore_errors=True)
        for name in self.base.parent.glob(self.base.name + "*"):
            if name.is_dir():
                shutil.rmtree(name, ignore_errors=True)
            else:
                name.unlink(missing_ok=True)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def drop_sessions(self) -> None:
        """End every session from this side."""
        self.call(self._drop_all)

    def forget_sessions(self) -> None:
        """Forget every token, but leave the connections open."""
        self.call(self.sessions.clear)

    def call(self, what: Callable[[], object]) -> None:
        """Run in the daemon's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self.deferred.append(run)
        os.write(self.wake_w, b"x")
        assert done.wait(10)

    def requests(self, kind: type) -> list[Any]:
        """Messages of one type that were carried out, in order."""
        return [seen.message for seen in self.executed if isinstance(seen.message, kind)]

    # -- the loop --------------------------------------------------------------------------

    def _run(self) -> None:
        while self.running:
            poller = zmq.Poller()
            poller.register(self.router, zmq.POLLIN)
            poller.register(self.listener, zmq.POLLIN)
            poller.register(self.wake_r, zmq.POLLIN)
            for connection in self.connections.values():
                poller.register(connection, zmq.POLLIN)
            for key, _ in poller.poll(1000):
                if key == self.wake_r:
                    os.read(self.wake_r, 4096)
                elif key == self.listener.fileno():
                    self._accept()
                elif key in self.connections:
                    self._attach(key)
            while self.deferred:
                self.deferred.pop(0)()
            while self.running and self.router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._request(self.router.recv_multipart())

    def _drop_all(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self.sessions.clear()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        self.connections[connection.fileno()] = connection

    def _attach(self, fd: int) -> None:
        connection = self.connections[fd]
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            connection.close()
            del self.connections[fd]
            self.sessions.pop(self.tokens.pop(fd, b""), None)
            return
        assert self.owner is not None
        try:
            request = decode_attach(data)
        except KvdError as error:
            connection.send(encode_attach_error(error.code, str(error)))
            return
        scripted = self.attach_script(request)
        if scripted is not None:
            connection.send(scripted)
            return
        self.attached += 1
        token, public_id = os.urandom(16), os.urandom(16)
        self.sessions[token] = -1
        self.tokens[fd] = token
        arenas: tuple[ArenaTold, ...] = ()
        fds: list[int] = []
        if request.maps_memory:
            owner = self.owner
            arenas = (ArenaTold(0, owner.id, owner.size, owner.slab_size),)
            lock = owner.session_lock_create(public_id)
            fds = [owner.fd_arena, owner.fd_table, lock]
        reply = AttachReply(
            token,
            public_id,
            self.instance,
            self.owner.epoch,
            "default",
            True,
            arenas,
            time.monotonic_ns(),
        )
        socket.send_fds(connection, [encode_attach_reply(reply)], fds)
        for mine in fds[2:]:
            os.close(mine)

    def _request(self, parts: list[bytes]) -> None:
        route, data, *payload = parts
        assert self.owner is not None
        frame = decode_frame(data, self.limits)
        key = (frame.session, frame.request)
        op = Op(frame.op)

        def answer(body: bytes, flags: int = 0, frames: list[bytes] | None = None) -> list[bytes]:
            assert self.owner is not None
            extra = frames or []
            head = encode_frame(
                op,
                body,
                flags=int(FrameFlag.REPLY) | flags,
                session=frame.session,
                request=frame.request,
                epoch=self.owner.epoch,
                frames=len(extra),
            )
            return [route, head, *extra]

        def fail(error: KvdError) -> list[bytes]:
            return answer(m.encode_error(error.code, str(error)), int(FrameFlag.ERROR))

        if key in self.replies:
            self.router.send_multipart([route, *self.replies[key][1:]])
            return
        try:
            message = m.decode_request(frame.op, frame.body, self.limits)
        except KvdError as error:
            self.router.send_multipart(fail(error))
            return
        seen = Seen(
            frame.session, frame.request, frame.ack, message, frame.deadline, frame.trace_id
        )
        self.seen.append(seen)
        if frame.session not in self.sessions:
            self.router.send_multipart(fail(UnknownSession("no such session")))
            return
        verdict = self.script(seen)
        if isinstance(verdict, KvdError):
            reply = fail(verdict)
        elif isinstance(verdict, bytes):  # an error with this body
            reply = answer(verdict, int(FrameFlag.ERROR))
        else:
            try:
                result, frames = self._carry_out(message, payload)
                reply = answer(m.encode_reply(result), 0, frames)
            except KvdError as error:
                reply = fail(error)
            self.executed.append(seen)
        self.replies[key] = reply
        if verdict is SWALLOW:
            return
        if isinstance(verdict, Hold):
            verdict.send = lambda: self.call(lambda: self.router.send_multipart(reply))
            verdict.arrived.set()
            return
        self.router.send_multipart(reply)

    # -- a store of sorts ------------------------------------------------------------------

    def _carry_out(self, message: Any, payload: list[bytes]) -> tuple[Any, list[bytes]]:
        frames: list[bytes] = []
        result: Any = m.DoneReply()
        if isinstance(message, m.Hello):
            result = m.HelloReply(
                self.instance,
                "0.0-fake",
                self.features,
                time.monotonic_ns(),
                self.limits,
                "default",
                True,
                30_000_000_000,
                b"\0" * 16,
            )
        elif isinstance(message, m.RegisterSpec):
            result = m.SpecReply(KVSpec.decode(message.spec).digest)
        elif isinstance(message, m.Reserve):
            result = self._reserve(message)
        elif isinstance(message, (m.Commit, m.Abort)):
            result = self._end_write(message)
        elif isinstance(message, m.Lookup):
            result = self._lookup(message)
        elif isinstance(message, m.Prefetch):
            result = m.OutcomesReply(
                bytes(
                    Outcome.OK if all((h, s) in self.chunks for s in message.shards) else
                    Outcome.MISS for h in split(message.hashes)
                )
            )  # fmt: skip
        elif isinstance(message, m.Load):
            result = self._load(message.lease, message.items)
        elif isinstance(message, m.Wait):
            lease = self.transfers[message.transfer]
            done = self._load_now(lease, None)
            items = b"".join(i.to_bytes(4, "little") for i in range(len(done.outcomes)))
            result = m.WaitReply(items, done.outcomes, done.refs, len(done.outcomes), True)
        elif isinstance(message, (m.Renew, m.Release)):
            if message.lease not in self.leases:
                raise UnknownHandle(f"no lease {message.lease}")
            count = len(self.leases[message.lease])
            if isinstance(message, m.Release):
                del self.leases[message.lease]
                result = m.LeaseReply(0, count)
            else:
                result = m.LeaseReply(time.monotonic_ns() + message.lease_ns, count)
        elif isinstance(message, m.Put):
            result, _ = self._put(message, payload), None
        elif isinstance(message, m.Get):
            found = [self.chunks.get((h, s)) for h in split(message.hashes) for s in message.shards]
            frames = [bytes(self._bytes(ref)) for ref in found if ref is not None]
            result = m.OutcomesReply(bytes([Outcome.OK if r else Outcome.MISS for r in found]))
        elif isinstance(message, m.Stat):
            result = m.StatReply({"instance": self.instance, "chunks": len(self.chunks)})
        elif isinstance(message, m.List):
            rows = [{"hash": h.hex()} for h, _ in sorted(self.chunks)]
            page = rows[message.cursor : message.cursor + message.limit]
            end = message.cursor + len(page)
            result = m.ListReply(page, end if end < len(rows) else None)
        elif isinstance(message, m.Evict):
            keys = sorted(self.chunks)[: message.limit]
            for key in keys:
                del self.chunks[key]
            cursor = 1 if self.chunks else None
            result = m.EvictReply(len(keys), len(keys), 0, 0, SLOT * len(keys), [], cursor)
        elif not isinstance(message, (m.Heartbeat, m.Cancel, m.Bye)):
            raise ProtocolError(f"the fake has no {type(message).__name__}")
        return result, frames

    def _bytes(self, ref: SlotRef) -> Any:
        assert self.owner is not None
        return self.owner.view[ref.offset : ref.offset + ref.length]

    def _next(self) -> int:
        self.handle += 1
        return self.handle

    def _slot(self) -> SlotRef:
        self.slot += 1
        assert self.owner is not None
        geometry_records = self.owner.slab_size // 4096
        per_slab = self.owner.slab_size // SLOT
        slab, index = divmod(self.slot - 1, per_slab)
        return SlotRef(
            0,
            slab * geometry_records + index,
            slab * self.owner.slab_size + index * SLOT,
            SLOT,
            0,
        )

    def _reserve(self, message: m.Reserve | m.Put) -> m.ReserveReply:
        outcomes, granted = [], {}
        for key in split(message.hashes):
            for shard in message.shards:
                if (key, shard) in self.chunks:
                    outcomes.append(Outcome.EXISTS)
                elif self.free_run <= 0:
                    outcomes.append(Outcome.OVER_QUOTA)
                else:
                    self.free_run -= 1
                    granted[len(outcomes)] = ((key, shard), self._slot())
                    outcomes.append(Outcome.GRANTED)
        write = self._next() if granted else 0
        if granted:
            self.writes[write] = granted
        refs = pack_refs([ref for _, ref in granted.values()])
        return m.ReserveReply(write, bytes(outcomes), refs, time.monotonic_ns() + message_ttl)

    def _end_write(self, message: m.Commit | m.Abort) -> m.OutcomesReply:
        granted = self.writes.get(message.write)
        if granted is None:
            raise UnknownHandle(f"no write {message.write}")
        items = sorted(granted)
        if message.items is not None:
            items = [
                int.from_bytes(message.items[i : i + 4], "little")
                for i in range(0, len(message.items), 4)
            ]
        said = []
        for item in items:
            key, ref = granted.pop(item)
            self.free_run += 1
            if isinstance(message, m.Commit):
                self.chunks[key] = ref
                said.append(Outcome.OK)
            else:
                said.append(Outcome.ABORTED)
        if not granted:
            del self.writes[message.write]
        return m.OutcomesReply(bytes(said))

    def _lookup(self, message: m.Lookup) -> m.LookupReply:
        outcomes: list[Outcome] = []
        refs: list[SlotRef | None] = []
        leading = 0
        run = True
        for key in split(message.hashes):
            found = [self.chunks.get((key, shard)) for shard in message.shards]
            if not run and not message.flags & LookupFlag.EVERY:
                outcomes.append(Outcome.SKIPPED)
            elif all(found):
                outcomes.append(Outcome.OK)
                refs += found
                leading += run
            else:
                outcomes.append(Outcome.MISS)
                run = False
        lease, expiry = 0, 0
        load: m.LoadReply | None = None
        reserved: m.ReserveReply | None = None
        if message.flags & LookupFlag.LEASE and refs:
            lease = self._next()
            self.leases[lease] = refs
            expiry = time.monotonic_ns() + (self.lease_ns or message.lease_ns)
            if message.flags & LookupFlag.LOAD:
                load = self._load(lease, None)
        if message.flags & LookupFlag.RESERVE_MISSES and leading < len(outcomes):
            assert message.fingerprints is not None
            reserved = self._reserve(
                m.Reserve(
                    message.spec,
                    message.kind,
                    message.shards,
                    message.hashes[32 * leading :],
                    message.parent,
                    message.index0 + leading,
                    message.fingerprints[16 * leading :],
                    None,
                    None,
                    0,
                    message.ttl,
                )
            )
        return m.LookupReply(bytes(outcomes), leading, lease, expiry, load, reserved)

    def _load(self, lease: int, items: bytes | None) -> m.LoadReply:
        if self.pending_load:
            transfer = self._next()
            self.transfers[transfer] = lease
            return m.LoadReply(transfer, bytes(len(self.leases[lease])), b"", False)
        return self._load_now(lease, items)

    def _load_now(self, lease: int, items: bytes | None) -> m.LoadReply:
        if lease not in self.leases:
            raise UnknownHandle(f"no lease {lease}")
        refs = [ref for ref in self.leases[lease] if ref is not None]
        if items is not None:
            chosen = [int.from_bytes(items[i : i + 4], "little") for i in range(0, len(items), 4)]
            refs = [refs[i] for i in chosen]
        return m.LoadReply(0, bytes([Outcome.OK]) * len(refs), pack_refs(refs), True)

    def _put(self, message: m.Put, payload: list[bytes]) -> m.OutcomesReply:
        reply = self._reserve(message)
        said = bytearray(reply.outcomes)
        for place, (index, (key, ref)) in enumerate(self.writes.pop(reply.write, {}).items()):
            self._bytes(ref)[:] = payload[index if len(payload) > place else place]
            self.chunks[key] = ref
            said[index] = Outcome.OK
        return m.OutcomesReply(bytes(said))


message_ttl = 30_000_000_000


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


def keys(count: int, start: int = 0) -> list[bytes]:
    """Distinct hashes."""
    return [(start + i).to_bytes(4, "big") * 8 for i in range(count)]


def readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def in_child(what: Callable[[], object], *, leave: Callable[[int], None] = os._exit) -> int:
    """Run in a forked child; its exit code (0 if `what` returned)."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            what()
            code = 0
        finally:
            leave(code)
    end = time.monotonic() + 30
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
