"""One call to S3, tried until it works, is hopeless, or its time is over.

The law of this module: every way in which a request can end becomes a Refused with a reason, and
the reason decides: what passes by itself is tried again, with a growing, jittered pause and never
beyond the deadline; what does not pass is told at once and once. No message holds a secret.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import NEVER, Answer, Reason
from kvd.tiers.s3.guard import Guard
from kvd.tiers.tally import Tally

T = TypeVar("T")
SECOND = 1_000_000_000
_FIRST_PAUSE = 0.05
_MOST_PAUSE = 5.0

_RETRIED = {
    Reason.IO,
    Reason.SHORT,
    Reason.THROTTLED,
    Reason.SLOW,
    Reason.UNREACHABLE,
    Reason.CONFLICT,
}
# Of the server, and not of what was asked for.
AWAY = {
    Reason.CREDENTIALS,
    Reason.NOT_FOUND,
    Reason.SKEW,
    Reason.SLOW,
    Reason.THROTTLED,
    Reason.UNREACHABLE,
}
_UNTOLD = {Reason.IO, Reason.SHORT, Reason.SLOW}
_CODES = {
    "SignatureDoesNotMatch": Reason.CREDENTIALS,
    "InvalidAccessKeyId": Reason.CREDENTIALS,
    "InvalidToken": Reason.CREDENTIALS,
    "ExpiredToken": Reason.CREDENTIALS,
    "InvalidSecurity": Reason.CREDENTIALS,
    "AccountProblem": Reason.DENIED,
    "AccessDenied": Reason.DENIED,
    "AllAccessDisabled": Reason.DENIED,
    "RequestTimeTooSkewed": Reason.SKEW,
    "NoSuchBucket": Reason.NOT_FOUND,
    "PermanentRedirect": Reason.REGION,
    "AuthorizationHeaderMalformed": Reason.REGION,
    "IllegalLocationConstraintException": Reason.REGION,
    "SlowDown": Reason.THROTTLED,
    "Throttling": Reason.THROTTLED,
    "TooManyRequests": Reason.THROTTLED,
    "RequestTimeout": Reason.SLOW,
    "QuotaExceeded": Reason.SPACE,
    "XMinioStorageFull": Reason.SPACE,
    "OperationAborted": Reason.CONFLICT,
    "ConditionalRequestConflict": Reason.CONFLICT,
}
_STATUS = {
    301: Reason.REGION,
    307: Reason.REGION,
    401: Reason.CREDENTIALS,
    403: Reason.DENIED,
    409: Reason.CONFLICT,
    429: Reason.THROTTLED,
    501: Reason.OTHER,  # it will not be so the next time
    503: Reason.THROTTLED,
    507: Reason.SPACE,
}
_PERMANENT = {Reason.CREDENTIALS, Reason.DENIED, Reason.SKEW, Reason.NOT_FOUND, Reason.REGION}


class PreconditionFailed(Exception):
    """412: what the request was conditional on is not so. `unsure`: an attempt before may have been
    carried out, and then that is why."""

    def __init__(self, *, unsure: bool = False) -> None:
        super().__init__("what it was conditional on is not so")
        self.unsure = unsure


class NotThere(Refused):
    """The server says that there is no such object."""

    def __init__(self, what: str) -> None:
        super().__init__(Answer.MISS, detail=f"{what}: not there")


class Calls:
    """From any thread. Counts what it does in `notes`."""

    def __init__(self, attempts: int, guard: Guard) -> None:
        self._attempts = attempts
        self.guard = guard
        self.notes = Tally()
        self.closed = threading.Event()

    def run(self, what: str, call: Callable[[], T], deadline: int = NEVER) -> T:
        """The call's result. Refused (MISS for an object that is not there), PreconditionFailed."""
        pause = _FIRST_PAUSE
        for attempt in range(1, self._attempts + 1):
            if time.monotonic_ns() >= deadline:
                raise Refused(Answer.TIMEOUT, Reason.SLOW, f"{what}: its deadline passed")
            self.notes.add("requests")
            self.guard.deadline(deadline)
            try:
                return call()
            except PreconditionFailed:
                raise
            except Refused as refused:
                last = refused
            except Exception as error:
                meaning = explain(what, error)
                if meaning is None:
                    raise
                last = meaning
            if last.answer is not Answer.FAILED or last.reason not in _RETRIED:
                raise last
            if time.monotonic_ns() >= deadline:
                raise Refused(Answer.TIMEOUT, Reason.SLOW, f"{what}: its deadline passed") from last
            wait = pause * random.uniform(0.5, 1.0)
            over = time.monotonic_ns() + int(wait * SECOND) >= deadline
            if attempt == self._attempts or over or self.closed.is_set():
                raise last
            self.notes.add("retries")
            self.closed.wait(wait)
            pause = min(
                2 * pause if last.reason is not Reason.THROTTLED else 4 * pause, _MOST_PAUSE
            )
        raise failed(Reason.OTHER, f"{what} was not tried")


def may_have_worked(error: Exception) -> bool:
    """Whether a request that ended so may have been carried out: no answer came, or one that says
    nothing about it. What nobody can explain may."""
    try:
        meaning = error if isinstance(error, Refused) else explain("", error)
    except PreconditionFailed:
        return False
    return meaning is None or meaning.reason in _UNTOLD


def explain(what: str, error: Exception) -> Refused | None:
    """What an exception of botocore, urllib3 or the sockets means; None if it is none of theirs."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3 import exceptions as url

    if isinstance(error, boto.ClientError):
        return _of_answer(what, error.response)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return failed(
            Reason.CREDENTIALS,
            "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
            "profile or a credentials_file",
            permanent=True,
        )
    if isinstance(error, boto.CredentialRetrievalError | boto.TokenRetrievalError):
        return failed(Reason.CREDENTIALS, f"{what}: credentials could not be had", permanent=True)
    if _unsendable(error):
        return failed(
            Reason.CREDENTIALS,
            f"{what}: key or secret have characters that can't be sent: take them over again",
            permanent=True,
        )
    if isinstance(error, boto.SSLError):
        return failed(Reason.UNREACHABLE, f"{what}: TLS: {_short(error)}")
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return failed(Reason.UNREACHABLE, f"{what}: the endpoint can't be reached")
    if isinstance(error, boto.ReadTimeoutError | url.ReadTimeoutError | TimeoutError):
        return failed(Reason.SLOW, f"{what}: no answer in time")
    if isinstance(error, ResponseParserError):
        return failed(Reason.IO, f"{what}: an answer that is none of S3's")
    if isinstance(error, boto.ConnectionClosedError | boto.HTTPClientError | url.HTTPError):
        return failed(Reason.IO, f"{what}: the connection broke: {type(error).__name__}")
    if isinstance(error, boto.BotoCoreError):
        return failed(Reason.OTHER, f"{what}: {_short(error)}")
    if isinstance(error, OSError):
        return failed(Reason.IO, f"{what}: {error.strerror or type(error).__name__}")
    return None


def _unsendable(error: Exception) -> bool:
    """Whether a request could not even be written, for what it would have to say of us."""
    from botocore.exceptions import HTTPClientError

    if isinstance(error, HTTPClientError):  # a header with a line end
        return isinstance(error.kwargs.get("error"), ValueError)
    return isinstance(error, UnicodeError)


def _of_answer(what: str, response: dict[str, Any]) -> Refused:
    """A ClientError's response. PreconditionFailed is raised, not returned."""
    told = response.get("Error", {})
    meta = response.get("ResponseMetadata", {})
    code, status = str(told.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    if status == 412:
        raise PreconditionFailed
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", "NotFound")):
        return NotThere(what)
    reason = _CODES.get(code)
    if reason is None:
        reason = _STATUS.get(status, Reason.IO if status >= 500 else Reason.OTHER)
    detail = f"{what}: {code or status}"
    headers = meta.get("HTTPHeaders", {})
    if reason is Reason.REGION:
        region = headers.get("x-amz-bucket-region") or told.get("Region")
        where = f"it is in region {region}" if region else f"try endpoint {told.get('Endpoint')}"
        detail = f"{what}: the bucket is elsewhere: {where} ({code or status})"
    elif reason is Reason.SKEW:
        ours = told.get("RequestTime") or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        theirs = told.get("ServerTime") or headers.get("date", "unknown")
        detail = f"{what}: clock skew: this host says {ours}, the server {theirs}"
    elif reason is Reason.CREDENTIALS:
        detail = f"{what}: the credentials are not accepted ({code or status})"
    if reason is Reason.SPACE:
        return Refused(Answer.NO_SPACE, reason, detail)
    return failed(reason, detail, permanent=reason in _PERMANENT)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
