"""The files of packaging/ are what systemd and the daemon accept."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path

from kvd.server.settings import SETTINGS

PACKAGING = Path(__file__).resolve().parent.parent / "packaging"


def _unit() -> ConfigParser:
    unit = ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(PACKAGING / "kvd.service")
    return unit


def test_the_unit_starts_the_daemon_with_flags_that_it_has() -> None:
    flags = set(re.findall(r"--[a-z-]+", _unit()["Service"]["ExecStart"]))
    assert flags - {"--config"} <= {setting.flag for setting in SETTINGS}


def test_the_unit_keeps_what_a_warm_restart_needs() -> None:
    service = _unit()["Service"]
    assert service["Type"] == "notify"
    # systemd would empty /dev/shm of this user's files at each stop
    assert service["RemoveIPC"] == "no"
    assert "DynamicUser" not in service
    # a refusal is not tried again for ever
    assert service["RestartPreventExitStatus"] == "2"
    drain = next(s for s in SETTINGS if s.name == "daemon.drain_s")
    assert float(service["TimeoutStopSec"]) > float(str(drain.default))


def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    """systemd-analyze exits with 0 on unknown keys: what counts is that it has nothing to say."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # a machine without systemd can't tell; the other tests still hold
        return
    unit = tmp_path / "kvd.service"
    program = tmp_path / "kvd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit.write_text(
        (PACKAGING / "kvd.service").read_text().replace("/opt/kvd/bin/kvd", str(program))
    )
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if "kvd.service" in line]
    assert not said, "\n".join(said)


def test_the_example_configuration_names_only_settings() -> None:
    document = tomllib.loads((PACKAGING / "kvd.toml").read_text())
    known = {setting.name for setting in SETTINGS}
    for section, content in document.items():
        names = [f"{section}.{key}" for key in content] if isinstance(content, dict) else [section]
        assert set(names) <= known
