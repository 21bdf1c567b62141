"""The one place where a command's end becomes an exit code.

The law of this module: a user sees an answer or one line that says what is wrong, never a
traceback. Codes: 0 done, 1 failed, 2 usage, 3 daemon away, 130 interrupted (as shells expect
it). An error that nobody foresaw is 1 with its one line; KVDCLI_TRACEBACK=1 shows the rest to
whoever reports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

import click

from kvd.errors import KvdError, Unavailable
from kvd.tools.cli.console import SCHEMA, tolerant
from kvd.tools.cli.units import clean

DONE, FAILED, USAGE, AWAY, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = (
    "status", "inspect", "evict", "tenant", "tier", "advise", "simulate", "config", "ping",
    "version",
)  # fmt: skip


class Failed(click.ClickException):
    """The command did its work and the answer is no, or not all: exit 1. The message may be
    empty when the output has said it already."""

    exit_code = FAILED

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


def run(argv: Sequence[str]) -> int:
    """Run kvd-cli with these arguments and return the exit code."""
    tolerant(sys.stdout)
    tolerant(sys.stderr)
    try:
        code = _invoke(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has enough (`| head`). Say nothing, and let the interpreter's own last
        # flush go nowhere, or it would complain.
        _silence(sys.stdout)
        code = FAILED
    except OSError as error:
        _silence(sys.stdout)
        _complain(argv, "output", f"can't write the output: {error.strerror or error}")
        code = FAILED
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)
    return code


def _invoke(argv: Sequence[str]) -> int:
    from kvd.tools.cli.app import cli

    if sys.stdout is None:  # `>&-`: there is nowhere to answer to
        _complain(argv, "output", "can't write the output: standard output is closed")
        return FAILED
    try:
        outcome = cli.main(args=list(argv), prog_name="kvd-cli", standalone_mode=False)
        return outcome if isinstance(outcome, int) else DONE
    except click.exceptions.Exit as error:
        return error.exit_code
    except SystemExit as error:  # click's own answer to a broken pipe
        return error.code if isinstance(error.code, int) else FAILED
    except (click.Abort, KeyboardInterrupt):
        _complain(argv, "interrupted", "interrupted")
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "kvd-cli"
        message = error.format_message()
        _complain(argv, "usage", f"{message} (see: {where} --help)")
        return USAGE
    except click.ClickException as error:
        if error.format_message():
            _complain(argv, "failed", error.format_message())
        return error.exit_code
    except Unavailable as error:
        _complain(argv, "unavailable", _away(error))
        return AWAY
    except KvdError as error:
        _complain(argv, error.code.name.lower(), str(error) or type(error).__name__)
        return FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:  # no file: it was our own output that failed
            raise
        _complain(argv, "failed", f"{error}")
        return FAILED
    except Exception as error:  # noqa: BLE001 - the last line of defence before a user
        if os.environ.get("KVDCLI_TRACEBACK"):
            traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _complain(argv, "internal", f"{text} (set KVDCLI_TRACEBACK=1 to see where)")
        return FAILED


def _away(error: Unavailable) -> str:
    return f"{error or 'no daemon answered'} (is kvd running? --socket or KVD_SOCKET names it)"


def _complain(argv: Sequence[str], code: str, message: str) -> None:
    """One line on standard error; with --json also the error as this command's JSON object."""
    line = clean(" ".join(message.split()))
    if "--json" in argv and code not in ("output", "interrupted"):
        command = next((word for word in argv if word in COMMANDS), "")
        document = {
            "schema": SCHEMA,
            "command": command,
            "error": {"code": code, "message": line},
        }
        try:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            _silence(sys.stdout)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"kvd-cli: {line}\n")


def _silence(stream: TextIO | None) -> None:
    """Point a broken standard stream at /dev/null."""
    try:
        if stream is not None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    except (OSError, ValueError):
        return
