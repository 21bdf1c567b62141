"""`kvd-cli advise`: what more room would bring, tier by tier and tenant by tenant.

The law of this module: it says what was measured. The curve is that of an LRU over the daemon's own
requests, sampled; a difference that lies within the sampling error is called none, and a curve
that stands on too little is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click

from kvd.tools.cli.console import Output
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_bytes, format_count
from kvd.tools.simulate.live import ENOUGH_KEYS, ENOUGH_USES, EVERYBODY, Curve, curves

_MORE = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the room there is
_LEAST = 1.0  # points that are worth a sentence


class Step(NamedTuple):
    """So many bytes more (or, below 0, fewer), and the hit ratio with them."""

    more_bytes: int
    hit_pct: float


class Advice(NamedTuple):
    """One tier for one tenant (`EVERYBODY`: for all together). `now_bytes`: the room there is;
    `reach_bytes`: of different chunks in this tier and those above; `measured_pct`: hits so far."""

    tier: str
    tenant: str
    now_bytes: int
    reach_bytes: int
    hit_pct: float
    margin_pct: float
    measured_pct: float | None
    steps: tuple[Step, ...]
    enough: bool
    says: str

    def row(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "tenant": self.tenant or None,
            "hit_pct": round(self.hit_pct, 2) if self.enough else None,
            "margin_pct": round(self.margin_pct, 2),
            "measured_pct": None if self.measured_pct is None else round(self.measured_pct, 2),
            "steps": [
                {"more_bytes": step.more_bytes, "hit_pct": round(step.hit_pct, 2)}
                for step in self.steps
            ],
        }


@click.command()
@connection
def advise(link: Link, output: Output) -> None:
    """Say what more room would bring, for each tier and tenant, from the daemon's own requests.

    The daemon samples the distances at which chunks are asked for again. From them follows what
    an LRU of any size would have hit; `kvd-cli simulate --from-daemon` shows the whole curve.
    Without the admin role you are told of your own namespace.

    \b
    Examples:
      kvd-cli advise
      kvd-cli advise --json | jq '.advice[] | {tier, tenant, says}'
    """
    advice = list(advise_on(link.stat()))
    if output.as_json:
        output.json(advice=[one.row() for one in advice])
        return
    if not advice:
        output.say("no lookup that leases, and no store, was seen yet: nothing to go by")
    for one in advice:
        output.say(f"{clean(one.tier)}, {clean(one.tenant) or 'all tenants'}: {clean(one.says)}")


def advise_on(stat: Mapping[str, Any]) -> Iterator[Advice]:
    """Advice on every tier, for everybody and for each tenant, as far as the answer tells."""
    for curve in curves(stat):
        apart = _apart(stat, curve.tenant)
        rooms: list[int] = []
        for tier in stat.get("tiers", []):
            room = _room(stat, tier, curve.tenant)
            if room:
                rooms.append(room)
                yield _advice(stat, tier, curve, rooms, apart)


def _apart(stat: Mapping[str, Any], tenant: str) -> float:
    """Of all copies in all tiers the part that would be left with one of each chunk: what lies
    below may lie above as well. 0 if the answer does not tell."""
    tenants = stat.get("tenants") or {}
    shown = tenants.values() if tenant == EVERYBODY else [tenants.get(tenant, {})]
    chunks = copies = 0
    for one in shown:
        chunks += int(one.get("chunks") or 0) + int(one.get("chunks_below") or 0)
        copies += sum(int(tier.get("chunks") or 0) for tier in (one.get("tiers") or {}).values())
    return min(1.0, chunks / copies) if copies else 0.0


def _reach(rooms: list[int], apart: float, more: int = 0) -> int:
    """Bytes of different chunks that fit into a tier and those above it, the tier with so many
    more: surely as many as into the largest."""
    *above, room = rooms
    return max(room + more, *above, int((sum(rooms) + more) * apart))


def _room(stat: Mapping[str, Any], tier: Mapping[str, Any], tenant: str) -> int:
    """Bytes that a tenant has in a tier, or that there are."""
    if tenant == EVERYBODY:
        return int(tier.get("limit_bytes") or 0)
    mine = (stat.get("tenants") or {}).get(tenant, {}).get("tiers") or {}
    return int(mine.get(tier.get("name"), {}).get("used_bytes") or 0)


def _advice(
    stat: Mapping[str, Any], tier: Mapping[str, Any], curve: Curve, rooms: list[int], apart: float
) -> Advice:
    room = rooms[-1]
    reach = _reach(rooms, apart)
    now = curve.hit_pct(reach)
    margin = curve.margin_pct(reach)
    steps = tuple(
        Step(more, curve.hit_pct(_reach(rooms, apart, more)))
        for more in (-(room // 2), *(int(room * part) for part in _MORE))
        if more
    )
    name = str(tier.get("name", "?"))
    says = _words(name, curve, room, now, margin, steps)
    return Advice(
        name, curve.tenant, room, reach, now, margin, _measured(stat, curve.tenant), steps,
        curve.enough, says,
    )  # fmt: skip


def _measured(stat: Mapping[str, Any], tenant: str) -> float | None:
    """Hits so far of all chunks asked for, in percent, as counted."""
    if tenant == EVERYBODY:
        counters = stat.get("counters", {})
    else:
        counters = (stat.get("tenants") or {}).get(tenant, {}).get("counters", {})
    asked = counters.get("chunks_asked", 0)
    return 100.0 * counters.get("chunks_hit", 0) / asked if asked else None


def _words(
    tier: str, curve: Curve, room: int, now: float, margin: float, steps: tuple[Step, ...]
) -> str:
    if not curve.enough and curve.sampled >= ENOUGH_USES and curve.followed >= ENOUGH_KEYS:
        return "nothing of what was seen was used a second time: no room would have brought a hit"
    if not curve.enough:
        return (
            f"too little was seen to tell: {format_count(curve.sampled)} sampled uses of"
            f" {format_count(curve.followed)} chunks, {format_count(ENOUGH_USES)} uses of"
            f" {ENOUGH_KEYS} chunks are the least"
        )
    least = max(_LEAST, margin)
    gains = [step for step in steps if step.more_bytes > 0 and step.hit_pct - now >= least]
    about = f" (give or take {margin:.1f} points)" if margin >= 0.05 else ""
    if gains:
        best = max(gains, key=lambda step: (step.hit_pct - now) / step.more_bytes)
        said = (
            f"{format_bytes(best.more_bytes)} more would lift the hit ratio from {now:.0f} %"
            f" to {best.hit_pct:.0f} %{about}"
        )
        most = max(gains, key=lambda step: step.hit_pct)
        if most.hit_pct - best.hit_pct >= least:
            said += f", {format_bytes(most.more_bytes)} more to {most.hit_pct:.0f} %"
        return said
    most_more = max((step.more_bytes for step in steps), default=0)
    said = (
        f"up to {format_bytes(most_more)} more would not lift the hit ratio of {now:.0f} %{about}"
    )
    fewer = next((step for step in steps if step.more_bytes < 0), None)
    if fewer is not None and now - fewer.hit_pct < least:
        said += f"; {format_bytes(room + fewer.more_bytes)} would do as well"
    return said
