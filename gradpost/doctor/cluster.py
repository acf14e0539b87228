"""Checks of the cluster that the settings name: versions, addresses, each pserver from here, clocks, disks, links."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import urlsplit

from ps_protocol.hosts import is_loopback
from ps_protocol.messages import ClusterStatus, PserverStatus, Software
from ps_protocol.software import this_software

from ..output import count
from ..status import Connection
from .finding import Finding
from .links import check_links
from .local import MIN_FREE_SHARE
from .reach import Reached, reach_all

SLOW_BYTES_PER_SECOND = 12_000_000  # what a network of 100 Mbit/s gives
MAX_CLOCK_SECONDS = 2.0


def examine_cluster(connection: Connection, status: ClusterStatus, *, with_speed: bool) -> list[Finding]:
    """All checks; takes seconds, however slow or dead the members are."""
    coordinator, reached = asyncio.run(reach_all(connection, status.pservers, with_speed=with_speed))
    pairs = list(zip(status.pservers, reached, strict=True))
    return [
        *check_run(status),
        check_versions(status),
        *check_addresses(connection.address, status.pservers),
        *(check_pserver(pserver, one, status, with_speed=with_speed) for pserver, one in pairs),
        check_clocks([("coordinator", coordinator), *((f"pserver {p.index}", one) for p, one in pairs)]),
        check_disks(pairs),
        *check_links(status),
    ]


def check_run(status: ClusterStatus) -> list[Finding]:
    """Whether the run goes on; nothing if it does."""
    if status.failure:
        detail = f"it has failed: {status.failure.get('detail')} ({status.failure.get('code')})"
        return [Finding("run", "broken", detail, "gradpost events tells what came before", "nobody trains any more")]
    if status.state == "training" and (status.waiting_for or status.prospects):
        detail = "; ".join([f"waits for {', '.join(status.waiting_for)}", *status.prospects])
        advice = "look at the machine and the output of who is missing"
        return [Finding("run", "warning", detail, advice, "no round ends without all members")]
    return []


def check_versions(status: ClusterStatus) -> Finding:
    """Whether all members, and this machine, run the same."""
    members: dict[str, Software | None] = {"this machine": this_software(), "coordinator": status.software}
    members |= {f"pserver {p.index}": p.software for p in status.pservers}
    members |= {f"trainer {t.rank}": t.software for t in status.trainers if t.state in ("joined", "declared")}
    different = []
    for package in ("gradpost", "torch", "python"):
        who: defaultdict[str, list[str]] = defaultdict(list)
        for member, software in members.items():
            if software is not None:
                who[getattr(software, package)].append(member)
        if len(who) > 1:
            by_version = "; ".join(f"{version} ({', '.join(names)})" for version, names in sorted(who.items()))
            different.append(f"{package} {by_version}")
    if different:
        return Finding(
            "versions", "warning", ". ".join(different), "install the same everywhere, as requirements.lock has it",
            "another torch may round otherwise, so that runs do not repeat bit for bit; another gradpost may lack what "
            "the others expect",
        )  # fmt: skip
    known = [software for software in members.values() if software is not None]
    here = known[0]
    detail = (
        f"gradpost {here.gradpost}, torch {here.torch}, python {here.python}: {count(len(known), 'process')[:-1]}es"
    )
    return Finding("versions", "ok", detail)


def check_addresses(coordinator: str, pservers: Sequence[PserverStatus]) -> list[Finding]:
    """Whether the addresses that pservers tell trainers can be right."""
    findings = []
    loopback = [p for p in pservers if is_loopback(urlsplit(p.address).hostname or "")]
    if loopback and not (len(loopback) == len(pservers) and is_loopback(urlsplit(coordinator).hostname or "")):
        named = ", ".join(f"pserver {p.index} ({p.address})" for p in loopback)
        findings.append(
            Finding(
                "addresses",
                "broken",
                f"{named} told the coordinator an address of loopback, and others are elsewhere",
                "start it with --host and an address of its machine, or say --advertise-address",
                "a trainer on another machine that goes there meets itself",
            )
        )
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for pserver in pservers:
        holders[pserver.address].append(pserver.index)
    for address, indices in holders.items():
        if len(indices) > 1:
            named = " and ".join(f"pserver {index}" for index in indices)
            findings.append(
                Finding(
                    "addresses",
                    "broken",
                    f"{named} tell the same address, {address}",
                    "give each its own: --host, --port, --advertise-address",
                    "one of them is never asked, and the run stands still",
                )
            )
    if not findings and pservers:
        where = "all on loopback: a cluster on one machine" if loopback else "none is loopback"
        findings.append(Finding("addresses", "ok", f"{count(len(pservers), 'pserver')}, {where}"))
    return findings


def check_pserver(pserver: PserverStatus, one: Reached, status: ClusterStatus, *, with_speed: bool) -> Finding:
    """Whether this machine reaches it, it is that very pserver, and tensors travel well."""
    name = f"pserver {pserver.index}"
    if one.state is None:
        users = [t.rank for t in status.trainers if pserver.index in t.links and pserver.index not in t.unreachable]
        detail = f"{one.address} is not reached from here: {one.trouble}"
        if users and pserver.heartbeat_age_seconds < 10:
            return Finding(
                name, "warning", detail, "run gradpost doctor on the machine of a trainer",
                f"trainer {users[0]} does reach it, so this machine is outside of their network, or its token or "
                "certificates are not theirs; nothing can be said of it from here",
            )  # fmt: skip
        return Finding(
            name, "broken", detail,
            "look whether it runs, whether its --host and --advertise-address are right, at the firewall between, and "
            "at the token and certificates that are used here",
            "a trainer on this machine could not train",
        )  # fmt: skip
    if (one.state.index, one.state.incarnation) != (pserver.index, pserver.incarnation):
        return Finding(
            name, "broken",
            f"{one.address} answers as pserver {one.state.index} in life {one.state.incarnation}, and should be "
            f"{name} in life {pserver.incarnation}",
            "correct --advertise-address, or what forwards that address; a pserver that has just been started again "
            "is right a second later",
            "tensors would go to another process, which refuses them",
        )  # fmt: skip
    facts = [f"{one.address} is it", f"{(one.round_trip_seconds or 0) * 1e3:.1f} ms", one.http_version]
    if one.speed_to and one.speed_from:
        facts.append(f"{one.speed_to / 1e6:.0f} MB/s there, {one.speed_from / 1e6:.0f} MB/s back")
    elif with_speed and not one.trouble:
        facts.append("speed not measured, for all together took too long")
    if one.trouble:
        return Finding(
            name, "broken", ", ".join([*filter(None, facts), f"but tensors do not get through: {one.trouble}"]),
            "look at what is between (proxies, firewalls, the MTU of tunnels), and whether it is of this version",
            "small messages come through, so that members look alive, and rounds hang",
        )  # fmt: skip
    text = ", ".join(facts)
    if pserver.http2 and not one.http_version.startswith("HTTP/2"):
        return Finding(
            name, "broken", f"{text}, but tensors do not get through over HTTP/2",
            "let no proxy between speak HTTP/1.1 alone, or start it with GRADPOST_HTTP2=false",
            "it tells trainers to use HTTP/2, and rounds hang",
        )  # fmt: skip
    if not pserver.http2:
        return Finding(
            name, "warning", text, "start it without GRADPOST_HTTP2=false, unless a proxy between needs that",
            "over HTTP/1.1 every request that waits holds a connection of its own",
        )  # fmt: skip
    slow = min(one.speed_to or SLOW_BYTES_PER_SECOND, one.speed_from or SLOW_BYTES_PER_SECOND)
    if slow < SLOW_BYTES_PER_SECOND:
        shard = status.parameter_bytes / max(status.num_pservers, 1)
        return Finding(
            name, "warning", text, "use a faster network, more pservers, or local steps (docs/modes.md)",
            f"a round moves {2 * shard / 1e6:.1f} MB between a trainer and each pserver, {2 * shard / slow:.1f} s at "
            "that speed" if shard else "every round waits for its tensors",
        )  # fmt: skip
    return Finding(name, "ok", text)


def check_clocks(services: Sequence[tuple[str, Reached]]) -> Finding:
    """Whether clocks agree, to about a second."""
    known = [(name, one.clock_seconds) for name, one in services if one.clock_seconds is not None]
    if not known:
        return Finding("clocks", "skipped", "nobody has told the time")
    wrong = [
        f"{name} is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
        for name, seconds in known
        if abs(seconds) > MAX_CLOCK_SECONDS
    ]
    if wrong:
        return Finding(
            "clocks", "warning", ", ".join(wrong) + " of this machine", "run an NTP client on all machines",
            "logs, events and curves do not fit together, and certificates may seem not valid yet; training itself "
            "does not go by clocks",
        )  # fmt: skip
    return Finding("clocks", "ok", f"{count(len(known), 'service')} and this machine agree, to about a second")


def check_disks(pairs: Sequence[tuple[PserverStatus, Reached]]) -> Finding:
    """Whether the pservers have room for their logs and state."""
    known = [(pserver.index, *one.disk) for pserver, one in pairs if one.disk is not None]
    if not known:
        return Finding("pserver disks", "skipped", "no pserver keeps anything on a disk, or none was reached")
    full = [
        f"pserver {index} has {free / 1e9:.1f} GB left of {size / 1e9:.0f} GB"
        for index, free, size in known
        if free < MIN_FREE_SHARE * size
    ]
    if full:
        return Finding(
            "pserver disks", "warning", ", ".join(full),
            "make room, or start it with a --state-dir on another disk; --max-log-bytes of the coordinator makes logs "
            "shorter",
            "a round that cannot be logged waits until there is room, and in the end the run fails",
        )  # fmt: skip
    least = min(free for _, free, _ in known)
    return Finding("pserver disks", "ok", f"{least / 1e9:.1f} GB or more are free on each of {len(known)}")
