"""The TCP endpoint: CURVE only, inline only, dead peers found by ZMTP heartbeats.

The law of this module: who connects has proved a private key whose public part stands in the
clients file, and that line names the namespace. libzmq asks us about each key (ZAP, RFC 27)
through a socket that the loop answers like any other. A session ends when its connection does:
libzmq's monitor tells which one, by the descriptor that each message carries.
"""

from __future__ import annotations

import logging
import os
import struct
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvd.errors import ConfigError
from kvd.server.doors import REMOTE_SHARE, Door, mark
from kvd.server.files import open_file
from kvd.server.respond import new_router
from kvd.wire.limits import DEFAULT_LIMITS

__all__ = ["TcpEndpoint", "read_clients", "read_secret_key"]

log = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvd"


class TcpKeys(NamedTuple):
    secret: bytes  # Z85
    clients: dict[bytes, str]  # raw public key -> namespace


class TcpEndpoint:
    """Sockets of the TCP side. Bound on construction; ConfigError if that can't be."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: TcpKeys,
        *,
        heartbeat_s: float,
        max_frame: int,
    ) -> None:
        self.clients = keys.clients
        self.added: dict[bytes, str] = {}  # keys of tenants; may be replaced while we run
        self.denied = 0
        self.zap = context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(ZAP_ADDRESS)
        self.socket = new_router(context, max_frame)
        milliseconds = max(1, int(heartbeat_s * 1000))
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, keys.secret),
            (zmq.ZAP_DOMAIN, ZAP_DOMAIN),
            (zmq.IPV6, 1 if "[" in endpoint else 0),
            (zmq.HEARTBEAT_IVL, milliseconds),
            (zmq.HEARTBEAT_TIMEOUT, 3 * milliseconds),
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            self.socket.setsockopt(option, value)
        self._endpoint = endpoint
        self.door = Door("tcp.endpoint", self.socket, mark(REMOTE_SHARE), self._bind)
        self.monitor = self.door.monitor
        try:
            self._bind()
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"tcp.endpoint: can't bind {endpoint}: {error.strerror}; "
                "see who holds the port (ss -ltnp), or choose another --tcp-endpoint"
            ) from None

    def answer_zap(self) -> None:
        """One question of libzmq: may this key connect? The user id that we answer with goes with
        each message of that connection."""
        while True:
            try:
                frames = self.zap.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request_id = frames[1] if len(frames) > 1 else b""
            key = frames[6] if len(frames) > 6 and frames[5] == b"CURVE" else b""
            namespace = self.clients.get(key) or self.added.get(key)
            if namespace is None:
                self.denied += 1
                log.warning("tcp: refused a client with an unknown key")
                reply = [b"1.0", request_id, b"400", b"unknown key", b"", b""]
            else:
                user = namespace.encode().hex().encode()  # any Unicode fits a ZAP string so
                reply = [b"1.0", request_id, b"200", b"OK", user, b""]
            self.zap.send_multipart(reply, zmq.DONTWAIT)

    def disconnected(self) -> list[int]:
        """Descriptors (as messages carry them) of connections that ended since the last call."""
        return self.door.hear()

    def _bind(self) -> None:
        self.socket.bind(self._endpoint)

    def close(self) -> None:
        self.door.close()
        self.socket.close(linger=0)
        self.zap.close(linger=0)


def namespace_of_user(user: str) -> str:
    """The namespace in a message's user id."""
    return bytes.fromhex(user).decode()


def read_secret_key(path: str) -> bytes:
    """The Z85 secret key in a file that only its owner reads. ConfigError."""
    try:
        with open_file(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            key = stream.read(256).strip()
    except OSError as error:
        raise ConfigError(f"tcp.secret_key_file {path}: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigError(f"tcp.secret_key_file {path}: open to all users; chmod o= {path}")
    _raw_key(key, f"tcp.secret_key_file {path}")
    return key


def read_clients(path: str) -> dict[bytes, str]:
    """Public key (raw) -> namespace, from lines `PUBLIC_KEY NAMESPACE`. ConfigError."""
    clients: dict[bytes, str] = {}
    try:
        with open_file(path) as stream:
            lines = stream.read().decode().splitlines()
    except OSError as error:
        raise ConfigError(f"tcp.clients_file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"tcp.clients_file {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        words = line.split(maxsplit=1)
        if not words or (words[0].startswith("#") and len(words[0]) != 40):
            continue  # 40 characters are a key, even if the first one is '#'
        where = f"tcp.clients_file {path}, line {number}"
        if len(words) != 2 or len(words[1].encode()) > DEFAULT_LIMITS.name:
            raise ConfigError(f"{where}: write PUBLIC_KEY NAMESPACE")
        key = _raw_key(words[0].encode(), where)
        if key in clients:
            raise ConfigError(f"{where}: this key stands there twice")
        clients[key] = words[1].strip()
    if not clients:
        raise ConfigError(f"tcp.clients_file {path}: names no client; add PUBLIC_KEY NAMESPACE")
    return clients


def _raw_key(key: bytes, where: str) -> bytes:
    try:
        raw: bytes = z85.decode(key) if len(key) == 40 else b""
    except (ValueError, KeyError, struct.error):
        raw = b""
    if len(raw) != 32:
        raise ConfigError(
            f"{where}: not a CURVE key of 40 Z85 characters; zmq.curve_keypair() makes a pair"
        )
    return raw
