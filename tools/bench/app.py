"""The command line of kvd-bench: options in, a table or one JSON object out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from kvd.errors import KvdError
from kvd.tools.bench import machine
from kvd.tools.bench.daemon import BenchError
from kvd.tools.ranges import Range

_EPILOG = """\b
Examples:
  kvd-bench data                   stores and loads beside np.copyto
  kvd-bench control --json         round trips and lookups, as JSON
  kvd-bench index                  the index alone, at a million chunks
  kvd-bench policy --json          what a touch and a chunk cost each eviction policy
  kvd-bench death --gib 2          a killed client: when is all that it held free
  kvd-bench engine --json          what the connector costs vLLM, and what it saves
  kvd-bench data --quick           whether it runs at all; its figures mean nothing

Each measurement starts a daemon of its own, on temporary paths, unless --socket names one.
"""

_PIPE_WIDTH = 110
Result = TypeVar("Result")

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
_quick = click.option("--quick", is_flag=True, help="Seconds instead of minutes; rough figures.")
_socket = click.option("--socket", metavar="PATH", help="Measure the daemon at this socket.")


@click.group(
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def bench() -> None:
    """Measure kvd beside the limit of the machine, both in the same run.

    Figures are medians of rounds in which limit and product take turns over the same bytes. The
    machine's facts go to standard error.
    """


@bench.command()
@_json
@_quick
@_socket
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds a case (default: 7).")
def data(as_json: bool, quick: bool, socket: str | None, rounds: int | None) -> None:
    """Stores and loads: 16 x 2 MiB and 4 x 32 MiB a request, contiguous and paged.

    The limit of a store and of a load is np.copyto of the same bytes into warm shared memory; for
    the paged layout it is the same gather into aligned warm private memory. cpu_s_per_gb is the
    CPU of client and daemon together for each GB that was moved.
    """
    from kvd.tools.bench.data import run_data

    _run(as_json, lambda: run_data(socket, quick=quick, rounds=rounds), _data_tables)


@bench.command()
@_json
@_quick
@_socket
def control(as_json: bool, quick: bool, socket: str | None) -> None:
    """Lookups of 1, 32 and 512 keys, pipelined lookups, and bare ZMQ beside them."""
    from kvd.tools.bench.control import run_control

    _run(as_json, lambda: run_control(socket, quick=quick), _control_tables)


@bench.command()
@_json
@_quick
def index(as_json: bool, quick: bool) -> None:
    """The core in this process, at 10,000 and at 1,000,000 chunks: memory, lookups, adoption."""
    from kvd.tools.bench.index import run_index

    _run(as_json, lambda: run_index(quick=quick), _index_tables)


@bench.command()
@_json
@_quick
@_socket
@click.option("--requests", type=click.IntRange(min=4), help="Requests without reuse (60).")
def engine(as_json: bool, quick: bool, socket: str | None, requests: int | None) -> None:
    """vLLM with and without the connector, in turns: what it costs, and what it saves.

    Needs vLLM (make bench-engine brings it) and the demo's model. The cost is CPU time in the
    connector's hooks and transfer threads over that of the engine; the gain is the time to first
    token with 2,000 tokens reused.
    """
    from kvd.tools.bench.engine import run_engine

    _run(as_json, lambda: run_engine(socket, quick=quick, requests=requests), _engine_tables)


@bench.command()
@_json
@_quick
@click.option("--dir", "directory", metavar="DIR", help="On the disk to measure (default: TMPDIR).")
def tiers(as_json: bool, quick: bool, directory: str | None) -> None:
    """NVMe against plain O_DIRECT, and the daemon's ladder: first chunk, warm start, lookups."""
    from kvd.tools.bench.tiers import run_tiers

    _run(as_json, lambda: run_tiers(directory, quick=quick), _tiers_tables)


@bench.command()
@_json
@_quick
@click.option("--policy", "-p", "names", multiple=True, metavar="NAME", help="Only these.")
def policy(as_json: bool, quick: bool, names: tuple[str, ...]) -> None:
    """Each eviction policy at 1,000,000 chunks: CPU time a touch, bytes a chunk."""
    from kvd.tools.bench.policy import run_policy

    _run(as_json, lambda: run_policy(names, quick=quick), _policy_tables)


@bench.command()
@_json
@_quick
@click.option(
    "--trace", metavar="FILE", help="The victim's requests (default: a real hour's third)."
)
@click.option("--dir", "directory", metavar="DIR", help="On the disk to measure (default: TMPDIR).")
@click.option("--plot", metavar="FILE.png", help="Also draw the victim's hits over time.")
def isolation(
    as_json: bool, quick: bool, trace: str | None, directory: str | None, plot: str | None
) -> None:
    """What a neighbour can do to a tenant: a scan, a burst, a loop, one that wakes up late.

    The victim's index is its hits over those that it has alone on its share; the control is one
    pool, where the coldest goes. Loads from NVMe beside a flood are held against those alone
    (p99_load_ratio), and against those beside a process that copies for as much processor time as
    the flood takes, and does not touch that tier (p99_load_ratio_same_cpu).
    """
    from kvd.tools.bench.isolation import run_isolation

    _run(
        as_json,
        lambda: run_isolation(trace, directory, quick=quick, plot=plot),
        _isolation_tables,
    )


@bench.command()
@_json
@_quick
@click.option("--gib", type=Range(0.125, 1024), help="Only this size (default: 1, 4, 8).")
def death(as_json: bool, quick: bool, gib: float | None) -> None:
    """A client is killed that has the whole arena mapped: how long what it held stays taken.

    It holds leases and unfinished writes over half of the arena, which needs that much memory.
    """
    from kvd.tools.bench.death import run_death

    _run(as_json, lambda: run_death(quick=quick, gib=gib), _death_tables)


@bench.command()
@_json
@_quick
@click.option("--seconds", type=Range(0.5, 3600), help="Of lookups (default: 60).")
def telemetry(as_json: bool, quick: bool, seconds: float | None) -> None:
    """Lookups, memory and a stop with a collector that is mute, or away, beside none."""
    from kvd.tools.bench.telemetry import run_telemetry

    _run(as_json, lambda: run_telemetry(quick=quick, seconds=seconds), _telemetry_tables)


def run(argv: Sequence[str]) -> int:
    """Run kvd-bench with these arguments: 0 done, 1 failed, 2 usage, 130 or 143 told to end."""
    # told to end by whatever signal, it still ends its daemon and removes the arena
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        bench.main(args=list(argv), prog_name="kvd-bench", standalone_mode=False)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except (click.Abort, KeyboardInterrupt):
        print("kvd-bench: interrupted", file=sys.stderr)
        return 130
    except click.UsageError as error:
        print(f"kvd-bench: {error.format_message()} (see: kvd-bench --help)", file=sys.stderr)
        return 2
    except (BenchError, KvdError, MemoryError, OSError) as error:
        print(f"kvd-bench: {error or type(error).__name__}", file=sys.stderr)
        return 1


def _run(
    as_json: bool,
    measure: Callable[[], Result],
    tables: Callable[[Result], list[Table]],
) -> None:
    machine.say()
    result = measure()
    if as_json:
        print(json.dumps(result, indent=2))
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for table in tables(result):
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if right else "left", no_wrap=True
        )
    return table


def _data_tables(result: dict[str, Any]) -> list[Table]:
    table = _table(
        "data", "request", "layout", "mode", ">limit GB/s", ">store GB/s", ">ratio",
        ">load GB/s", ">ratio", ">cpu-s/GB",
    )  # fmt: skip
    for case in result["cases"]:
        table.add_row(
            f"{case['chunks']} x {case['chunk_bytes'] >> 20} MiB",
            case["layout"],
            case["mode"],
            *(
                "-" if case[name] is None else f"{case[name]:.2f}"
                for name in ("limit_gbps", "store_gbps", "store_ratio", "load_gbps", "load_ratio")
            ),
            f"{case['cpu_s_per_gb']:.3f}",
        )
    daemon = _table("the daemon's CPU while 1 GB/s is stored", "", ">% of a core")
    for name, key in (
        ("without sealing", "daemon_cpu_pct_at_1gbps"),
        ("with sealing", "daemon_cpu_pct_sealing"),
        ("the digests of 1 GB/s alone", "digest_alone_pct"),
    ):
        daemon.add_row(name, "-" if result[key] is None else f"{result[key]:.1f}")
    return [table, daemon]


def _control_tables(result: dict[str, Any]) -> list[Table]:
    table = _table("lookups", ">keys", "found", ">p50 ms", ">p99 ms")
    for row in result["lookup"]:
        table.add_row(
            str(row["keys"]),
            "all" if row["hit"] else "none",
            f"{row['p50_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
        )
    table.add_row(
        "-", "bare ZMQ", f"{result['zmq_rtt_p50_ms']:.3f}", f"{result['zmq_rtt_p99_ms']:.3f}"
    )
    rates = _table("pipelined, a second", "", ">")
    rates.add_row("single-key lookups", f"{result['pipelined_lookups_per_s']:,.0f}")
    rates.add_row("bare ZMQ echo", f"{result['zmq_pipelined_per_s']:,.0f}")
    return [table, rates]


def _index_tables(result: dict[str, Any]) -> list[Table]:
    table = _table("index", "", ">")
    for key, value in result.items():
        table.add_row(key, f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}")
    return [table]


def _policy_tables(rows: list[dict[str, Any]]) -> list[Table]:
    table = _table(
        "policies", "policy", ">chunks", ">touch us", ">alone us", ">insert us",
        ">evict, replace us", ">bytes a chunk",
    )  # fmt: skip
    times = ("touch_us", "lone_touch_us", "insert_us", "evict_us")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['chunks']:,}",
            *(f"{row[name]:.2f}" for name in times),
            str(row["bytes_per_chunk"]),
        )
    return [table]


def _tiers_tables(result: dict[str, Any]) -> list[Table]:
    table = _table(
        "nvme, s3", ">chunk", "engine", ">limit write GB/s", ">ratio", ">limit read GB/s", ">ratio"
    )
    for row in result["nvme"]:
        table.add_row(
            f"{row['chunk_bytes'] >> 20} MiB",
            row["engine"],
            f"{row['limit_write_gbps']:.2f}",
            f"{row['write_ratio']:.2f}",
            f"{row['limit_read_gbps']:.2f}",
            f"{row['read_ratio']:.2f}",
        )
    for row in result["s3"]:
        table.add_row(
            f"{row['chunk_bytes'] >> 20} MiB",
            "s3, over bare boto3",
            f"{row['limit_put_gbps']:.2f}",
            f"{row['put_ratio']:.2f}",
            f"{row['limit_get_gbps']:.2f}",
            f"{row['get_ratio']:.2f}",
        )
    warm = result["warm_start"]
    rest = _table("the ladder", "", ">")
    rest.add_row("first of many chunks, over one bare read", f"{result['first_chunk_ratio']:.2f}")
    into_huge = result["first_chunk_huge_ratio"]
    rest.add_row("the same, over one into huge pages", f"{into_huge:.2f}")
    rest.add_row(f"warm start with {warm['chunks']:,} chunks, s", f"{warm['seconds']:.1f}")
    under = result["lookup_p99_ratio_under_demotion"]
    rest.add_row("lookups' p99 under demotion, over quiet", f"{under:.2f}")
    slow, control = result["slow_tier_p99_ratio"], result["slow_tier_control_ratio"]
    rest.add_row("nvme's p99 beside a slow tier, over alone", f"{slow:.2f}")
    rest.add_row("alone over alone, for the noise", f"{control:.2f}")
    return [table, rest]


def _isolation_tables(result: dict[str, Any]) -> list[Table]:
    table = _table(
        "the victim beside a neighbour", "neighbour", ">index", ">worst window", ">below minimum",
        ">one pool", ">p99 of loads",
    )  # fmt: skip
    for row in result["scenarios"]:
        ratio = row["p99_load_ratio"]
        table.add_row(
            row["name"],
            f"{row['index']:.3f}",
            f"{row['worst_window']:.3f}",
            str(row["below_min_evictions"]),
            f"{row['control_index']:.3f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    rest = _table("beside an idle neighbour", "", ">")
    rest.add_row("of the hits with the whole pool", f"{result['work_conserving']:.3f}")
    flood = result["flood"]
    loads = _table("loads from nvme beside a flood, over those alone", "", ">p50", ">p99")
    for label, name in (
        ("beside the flood", ""), ("copies for as much of the processor", "same_cpu_"),
        ("stores at its pace, none written down", "same_pace_"),
        ("bare reads beside a bare writer", "bare_"),
    ):  # fmt: skip
        loads.add_row(label, f"{flood[f'{name}p50_ratio']:.2f}", f"{flood[f'{name}p99_ratio']:.2f}")
    return [table, rest, loads]


def _death_tables(result: dict[str, Any]) -> list[Table]:
    table = _table("death of a client", ">mapped GiB", ">held GiB", ">free s", ">worst", ">aim")
    for row in result["deaths"]:
        table.add_row(
            f"{row['mapped_bytes'] / 2**30:.2f}",
            f"{row['held_bytes'] / 2**30:.2f}",
            f"{row['free_s']:.2f}",
            f"{row['worst_s']:.2f}",
            f"{row['aim_s']:.2f}",
        )
    return [table]


def _telemetry_tables(result: dict[str, Any]) -> list[Table]:
    table = _table(
        f"an export every {result['interval_s']:g} s", "collector", ">lookups", ">p50 us",
        ">p99 us", ">ratio", ">RSS +MiB", ">failed", ">stop s",
    )  # fmt: skip
    for row in result["cases"]:
        table.add_row(
            row["collector"],
            str(row["lookups"]),
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
            f"{row['p99_ratio']:.2f}",
            f"{row['rss_growth_mib']:.1f}",
            str(row["exports"]["failed"]),
            f"{row['stop_s']:.2f}",
        )
    return [table]


def _engine_tables(result: dict[str, Any]) -> list[Table]:
    table = _table("engine", "", ">")
    for key, value in result.items():
        table.add_row(key, str(value))
    return [table]
