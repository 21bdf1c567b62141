"""A server that speaks enough S3 to be wrong in every way: answers are shaped by a hook.

It keeps objects in a dict, checks no signature (a real server does, see test_s3_server), and counts
requests, connections and dates. `hook(request) -> Response | None | str`: None lets it through; a
string names a misbehaviour of the connection.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Request(NamedTuple):
    method: str
    key: str  # without the bucket; empty for the bucket itself
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Response(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


def error(status: int, code: str, more: str = "", **headers: str) -> Response:
    text = f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, text.encode(), {"Content-Type": "application/xml", **named})


Hook = Callable[[Request], "Response | str | None"]


def _iso(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(unix_s))


class FakeS3:
    def __init__(self, port: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}  # unix s, whole: as S3 tells them
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.begun: dict[str, tuple[str, float]] = {}  # an upload's key, and when it began: unix s
        self.requests: list[Request] = []
        self.accepts = 0
        self.hook: Hook = lambda request: None
        self.lock = threading.Lock()
        self.stalled = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                with fake.lock:
                    fake.accepts += 1
                super().setup()

            def log_message(self, *args: object) -> None:
                pass

            def do(self) -> None:
                fake.serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that went away

        self.server = Server(("127.0.0.1", port), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.stalled.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    # -- one request ----------------------------------------------------------------------------

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.headers.get("Expect", "").lower() == "100-continue":
            pass  # http.server has answered it already
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        split = urlsplit(handler.path)
        key = unquote(split.path).lstrip("/").partition("/")[2]
        headers = {name.lower(): value for name, value in handler.headers.items()}
        query = parse_qs(split.query, keep_blank_values=True)
        request = Request(handler.command, key, query, headers, body)
        with self.lock:
            self.requests.append(request)
        shaped = self.hook(request)
        if isinstance(shaped, Response):
            self.reply(handler, shaped)
            return
        with self.lock:
            response = self.answer(request)
        if shaped is None:
            self.reply(handler, response)
        else:
            self.misbehave(handler, response, shaped)

    def reply(self, handler: BaseHTTPRequestHandler, response: Response) -> None:
        handler.send_response(response.status)
        for name, value in response.headers.items():
            handler.send_header(name, value)
        if "Content-Length" not in response.headers:
            handler.send_header("Content-Length", str(len(response.body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(response.body)

    def misbehave(self, handler: BaseHTTPRequestHandler, response: Response, how: str) -> None:
        whole = {**response.headers, "Content-Length": str(len(response.body))}
        handler.close_connection = True
        if how == "reset":
            linger = b"\1\0\0\0\0\0\0\0"
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.connection.close()
        elif how == "silent":
            self.stalled.wait(30)
        elif how == "half":
            half = response.body[: len(response.body) // 2]
            self.reply(handler, Response(response.status, half, whole))
        elif how == "longer":
            less = {**response.headers, "Content-Length": str(len(response.body) - 100)}
            self.reply(handler, Response(response.status, response.body, less))
        elif how == "appended":
            self.reply(handler, Response(response.status, response.body + b"x", response.headers))
        elif how == "chunked":
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(response.body), response.body)
            handler.send_response(response.status)
            for name, value in response.headers.items():
                handler.send_header(name, value)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            handler.wfile.write(body)
        elif how == "gzip":
            coded = {**response.headers, "Content-Encoding": "gzip"}
            self.reply(handler, Response(response.status, response.body, coded))
        elif how == "xml":
            self.reply(handler, error(200, "InternalError"))
        elif how == "head":
            for byte in b"HTTP/1.1 200 OK\r\nETag: " + b"x" * 2_000:
                handler.wfile.write(bytes((byte,)))
                handler.wfile.flush()
                if self.stalled.wait(0.05):
                    return
        elif how == "trickle":
            self.reply(handler, Response(response.status, b"", whole))
            for at in range(len(response.body)):
                handler.wfile.write(response.body[at : at + 1])
                if self.stalled.wait(0.05):
                    return
        else:
            raise AssertionError(how)

    # -- S3 -------------------------------------------------------------------------------------

    def answer(self, r: Request) -> Response:
        if not r.key:
            if r.method == "POST" and "delete" in r.query:
                keys = [part.partition(b"</Key>")[0] for part in r.body.split(b"<Key>")[1:]]
                for key in keys:
                    self.objects.pop(key.decode(), None)
                return element("DeleteResult", "")
            return self.list_uploads(r) if "uploads" in r.query else self.list(r)
        there = self.objects.get(r.key)
        if r.method != "DELETE" and r.query.get("uploadId", [""])[0] not in ("", *self.uploads):
            return error(404, "NoSuchUpload")
        if r.method == "GET" and "uploadId" in r.query:
            parts = self.uploads[r.query["uploadId"][0]]
            rows = (f"<Part><PartNumber>{n}</PartNumber></Part>" for n in sorted(parts))
            return element("ListPartsResult", "".join(rows))
        if r.method in ("GET", "HEAD"):
            if there is None:
                return error(404, "NoSuchKey")
            return self.get(r, there)
        if r.method == "PUT" and "partNumber" in r.query:
            self.uploads[r.query["uploadId"][0]][int(r.query["partNumber"][0])] = r.body
            return Response(headers={"ETag": etag(r.body)})
        if r.method == "POST" and "uploads" in r.query:
            upload = f"u{len(self.uploads)}-{time.time_ns()}"
            self.uploads[upload] = {}
            self.begun[upload] = (r.key, time.time())
            return element("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if r.method == "DELETE" and "uploadId" in r.query:
            self.uploads.pop(r.query["uploadId"][0], None)
            return Response(204)
        if r.method == "DELETE":
            if there is not None and r.headers.get("if-match", etag(there)) != etag(there):
                return error(412, "PreconditionFailed")
            self.objects.pop(r.key, None)
            return Response(204)
        if r.headers.get("if-none-match") == "*" and there is not None:
            return error(412, "PreconditionFailed")
        wanted = r.headers.get("if-match")
        if wanted is not None and (there is None or etag(there) != wanted):
            return error(412, "PreconditionFailed") if there else error(404, "NoSuchKey")
        body = r.body
        if "uploadId" in r.query:
            parts = self.uploads.pop(r.query["uploadId"][0])
            body = b"".join(parts[n] for n in sorted(parts))
            self.objects[r.key] = body
            self.modified[r.key] = float(int(time.time()))
            return element("CompleteMultipartUploadResult", "")
        self.objects[r.key] = body
        self.modified[r.key] = float(int(time.time()))
        return Response(headers={"ETag": etag(body)})

    def _modified(self, key: str) -> float:
        """When it was put; objects that a test planted are new."""
        return self.modified.get(key, time.time())

    def get(self, r: Request, there: bytes) -> Response:
        modified = formatdate(self._modified(r.key), usegmt=True)
        headers = {"ETag": etag(there), "Last-Modified": modified}
        if r.headers.get("if-match", etag(there)) != etag(there):
            return error(412, "PreconditionFailed")
        if "range" in r.headers:
            low, high = r.headers["range"].removeprefix("bytes=").split("-")
            part = there[int(low) : int(high) + 1]
            headers["Content-Range"] = f"bytes {low}-{high}/{len(there)}"
            return Response(206, part, headers)
        if r.method == "HEAD":
            return Response(200, b"", {**headers, "Content-Length": str(len(there))})
        return Response(200, there, headers)

    def list(self, r: Request) -> Response:
        prefix = r.query.get("prefix", [""])[0]
        most = int(r.query.get("max-keys", ["1000"])[0])
        after = r.query.get("continuation-token", [""])[0]
        keys = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
        page, more = keys[:most], len(keys) > most
        rows = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.objects[k])}</Size>"
            f"<LastModified>{_iso(self._modified(k))}</LastModified>"
            f"</Contents>"
            for k in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        cut = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return element("ListBucketResult", cut + rows + token)

    def list_uploads(self, r: Request) -> Response:
        prefix = r.query.get("prefix", [""])[0]
        rows = (
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            f"<Initiated>{_iso(at)}</Initiated></Upload>"
            for upload, (key, at) in self.begun.items()
            if upload in self.uploads and key.startswith(prefix)
        )
        return element("ListMultipartUploadsResult", "".join(rows))


def element(name: str, inside: str) -> Response:
    return Response(body=f"<{name}>{inside}</{name}>".encode())


def etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'
