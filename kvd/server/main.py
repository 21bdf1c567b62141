"""`kvd`: reads the configuration, runs one Server.

The law of this module: a start that is refused says why in one line on stderr and exits with 2;
nothing else that an operator did makes a traceback. Exit codes: 0 stopped in order, 1 a fault of
ours, 2 a setting that can't be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvd import __version__
from kvd.arena import plan
from kvd.errors import ArenaError, ConfigError
from kvd.native import compiled
from kvd.server.adoption import check_arena_path, policy_of
from kvd.server.collector import plan_export
from kvd.server.config import Config, load_config
from kvd.server.recording import check_record, no_record
from kvd.server.server import Server, limits_of
from kvd.server.settings import SETTINGS
from kvd.server.shown import resolved_toml
from kvd.server.sources import nearest_flag
from kvd.server.standard import complain, hold_standard, say
from kvd.server.tcp import read_clients, read_secret_key
from kvd.server.tenancy import open_access, open_registry
from kvd.server.tenants import curve_clients
from kvd.server.tiers import check_plans, plan_tiers
from kvd.sizes import format_size
from kvd.wire.paths import attach_path, check_socket_path

__all__ = ["main"]

log = logging.getLogger("kvd")

OK, FAULT, REFUSED = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    """One line, exit code 2, and the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].partition("=")[0]
            near = nearest_flag(flag)
            hint = f"; the nearest is {near}" if near else "; `kvd --help` lists all flags"
            message = f"unknown argument {flag}{hint}"
        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="kvd",
        description="A daemon that keeps the KV cache of LLM inference engines. Each setting is "
        "read from its flag, else its environment variable, else the file, else its default.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  kvd --arena-size 8GiB\n  kvd --config /etc/kvd/kvd.toml --check\n\n"
        "exit codes: 0 stopped in order, 1 a fault, 2 a setting that can't be used",
    )
    parser.add_argument("--config", metavar="FILE", help="kvd.toml to read [KVD_CONFIG]")
    parser.add_argument(
        "--check", action="store_true", help="validate and print the configuration, then exit"
    )
    parser.add_argument("--version", action="version", version=f"kvd {__version__}")
    sections: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS:
        group = sections.get(setting.section)
        if group is None:
            group = sections[setting.section] = parser.add_argument_group(setting.section)
        shown = "" if setting.default in ("", []) else f" (default: {setting.default})"
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar=setting.metavar,
            help=f"{setting.help}{shown} [{setting.env}]".replace("%", "%%"),
        )
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """The daemon's life; its exit code."""
    hold_standard()
    try:
        arguments = vars(_parser().parse_args(argv))
        file, check = arguments.pop("config"), arguments.pop("check")
        flags = {name: value for name, value in arguments.items() if value is not None}
        config = load_config(flags=flags, file=file)
        _log_to_stderr(config.log_level)
        if check:
            _check(config)
            return OK if _shown(resolved_toml(config)) else FAULT
        server = Server(config)
        server.startup()
    except (ConfigError, ArenaError) as refused:
        complain(str(refused))
        return REFUSED
    except OSError as error:  # not a setting: descriptors, memory or threads have run out
        complain(f"can't start: {error}")
        return FAULT
    try:
        unsaid = say(start_block(server))
        if unsaid is not None:  # the daemon is of use to those who did not read it, too
            log.warning("the start block could not be written: %s", unsaid.strerror or unsaid)
        server.main_loop()
    except Exception:  # the last boundary: said once, and the sockets are cleaned up
        log.exception("the daemon can't go on")
        return FAULT
    finally:
        server.loop.deafen()  # who asks once more to stop must not make an order out of it
        server.shutdown()
    return OK


def _shown(text: str) -> bool:
    """Whether it was written; says why not, unless the reader just had enough (`| head`)."""
    unsaid = say(text)
    if unsaid is not None and not isinstance(unsaid, BrokenPipeError):
        complain(f"can't write the output: {unsaid.strerror or unsaid}")
    return unsaid is None


def _check(config: Config) -> None:
    """What can be refused without taking anything: no lock, no socket, no memory."""
    check_socket_path(config.socket)
    plan(config.arena_size, config.slab_size)
    check_arena_path(config)
    registry = open_registry(config)
    open_access(config, registry)
    check_plans(config, plan_tiers(config))
    policy_of(config)
    plan_export(config)
    if config.tcp_endpoint is not None:
        read_secret_key(config.tcp_secret_key_file or "")
        curve_clients(registry.tenants(), read_clients(config.tcp_clients_file or ""))
    if config.trace_record is not None:
        try:
            check_record(Path(config.trace_record))
        except OSError as error:
            raise no_record(config.trace_record, error) from None


def start_block(server: Server) -> str:
    """What an operator wants to see first. One block, printed once."""
    config, arena = server.config, server.arena
    limits = limits_of(config, arena.slab_size)
    adopted = server.adopted
    origin = f"new, in place of one that {arena.replaced}" if arena.replaced else "new"
    if arena.adopted:
        origin = f"adopted, {adopted.records} records in {adopted.took_s:.2f} s"
    tcp = f", {config.tcp_endpoint} (CURVE)" if config.tcp_endpoint else ""
    rows = (
        ("instance", config.instance),
        ("sockets", f"{config.socket}, {attach_path(config.socket)}{tcp}"),
        ("arena", f"{config.arena_base}, {format_size(arena.size)}, {origin}"),
        (
            "limits",
            f"chunk {format_size(limits.chunk_bytes)}, {config.max_sessions} sessions, lease "
            f"{config.lease_s:g} s (at most {config.lease_max_s:g} s)",
        ),
        ("tiers", f"dram {format_size(arena.size)}"),
        *_tiers(server),
        ("core", "compiled" if compiled() else "in Python"),
        ("eviction", policy_of(config)().name),
        ("metrics", _metrics(config)),
        ("epoch", str(arena.epoch)),
    )
    lines = [f"kvd {__version__}, pid {os.getpid()}"]
    lines += [f"  {name:<9} {value}" for name, value in rows]
    return "\n".join(lines) + "\n"


def _tiers(server: Server) -> list[tuple[str, str]]:
    """A line for each tier below DRAM: its limit, when it is written to, what was found out."""
    ladder = server.ladder
    return [
        (
            "",
            f"{plan.config.name} {format_size(plan.config.limit)}, {plan.config.policy.value}, "
            f"{report.detail}",
        )
        for plan, report in zip(ladder.plans, ladder.reports, strict=True)
    ]


def _metrics(config: Config) -> str:
    told = []
    if config.otlp_endpoint:
        told.append(f"to {config.otlp_endpoint} every {config.telemetry_interval_s:g} s")
    if config.prometheus is not None:
        told.append(f"at http://{config.prometheus}/metrics")
    return ", ".join(told) or "not exported"


def _log_to_stderr(level: str) -> None:
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    logging.basicConfig(
        level=level.upper(), format=stamp + "%(levelname)s %(name)s: %(message)s", force=True
    )


if __name__ == "__main__":
    main()
