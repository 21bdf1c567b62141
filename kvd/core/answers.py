"""How requests are answered: at once, or when the work that they want is done.

The law of this module: every request is answered exactly once, with a result or a typed error.
"""

from __future__ import annotations

from typing import Any

from kvd.core import actions as ac
from kvd.core.jobs import Jobs, Work
from kvd.core.store import Store
from kvd.errors import Busy, ErrorCode, KvdError


class Answers:
    """Puts answers among the actions of the event under way."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs

    def refuse(self, event: Any, error: KvdError) -> None:
        """Answer with a typed error; it is raised where nobody asked."""
        if not hasattr(event, "request"):
            raise error  # a fault of the server, not of a client
        key = ("requests_refused", error.code.name.lower())
        if key in self._store.counters.own:
            self._store.counters.own[key] += 1
        retry_ns = int(error.retry_after_s * 1e9) if isinstance(error, Busy) else 0
        self._store.out.append(
            ac.Fail(event.session, event.request, error.code, str(error), retry_ns)
        )

    def give_up(self, event: Any, error: Exception) -> None:
        """Answer a request that met a fault, unless it was answered before."""
        told = (a for a in self._store.out if isinstance(a, ac.Reply | ac.Fail))
        if not any(a.request is event.request for a in told):
            message = f"unexpected {type(error).__name__} in the daemon"
            failed = ac.Fail(event.session, event.request, ErrorCode.INTERNAL, message)
            self._store.out.append(failed)

    def reply(self, event: Any, result: ac.Result) -> None:
        """Answer a request."""
        self._store.out.append(ac.Reply(event.session, event.request, result))

    def start(self, event: Any, work: Work[Any]) -> None:
        """Carry out work in slices and reply with its result."""

        def job() -> Work[None]:
            try:
                result = yield from work
            except KvdError as error:
                self.refuse(event, error)
                return
            except Exception as error:  # it may be a Tick that met it, which nobody waits for
                self.give_up(event, error)
                raise
            if self._store.sessions.get(event.session) is not None:
                self.reply(event, result)

        self._jobs.start(job())
