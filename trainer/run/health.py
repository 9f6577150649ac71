"""A short check of every rank before step 1: does its device answer, is it as fast as others, is its setup the same.

Each rank measures itself (`measure`), all are gathered, and `findings`, a pure function, compares them with the median
of the same kind of device and with the best median that this run folder has seen (health.json). Devices are timed on
GPUs only: a CPU is shared with other work, and its rate says little. An all-reduce over all ranks is one figure, which
is as slow as the slowest link, and is compared with earlier starts; each host also exchanges messages with some others,
pair by pair, which shows the link. A device that does not answer holds its rank here, and the watchdog names it.

A rank that is far off is named with host and device. Its host goes into exclude_hosts.txt in the run folder, for the
next start's scheduler; run.health = "stop" also ends the run.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from mdata import ResourceError, __version__
from mdata.errors import counted
from mdata.util import atomic_io
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.errors import host_name, out_of_memory_in
from trainer.parallel.collectives import all_reduce_, exchange, gather_objects
from trainer.parallel.world import World
from trainer.run.excluded_hosts import EXCLUDED, excluded_hosts
from trainer.run.log_text import device_text

FIGURES = "health.json"
WARN, STOP = 0.90, 0.75  # of the median, or of the stored figure
SKEW_S = (2.0, 60.0)  # of a clock, from the median
SHOWN = 8  # findings
_SIDE, _BYTES, _TIMES = 4096, 64 << 20, 5
# Each GPU sends this much to one of each of so many other hosts; connections cost NCCL memory, some MiB each.
LINK_BYTES, LINK_ROUNDS, LINKS_S = 16 << 20, 4, 3.0  # and no new round begins after this time
SLOWEST = 3  # pairs that are named
_NAMES = {
    "matrix_tflops": ("TFLOP/s in matrix products", "TFLOP/s in matrix products"),
    "copy_gbps": ("GB/s from its host", "GB/s from hosts to devices"),
    "link_gbps": ("", "GB/s of an all-reduce over all ranks"),
    "pair_gbps": ("", "GB/s between two hosts"),
    "free_gib": ("GiB of free memory", ""),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHealth:
    """The measurements of a rank.

    Args:
        device: "cuda:0 (NVIDIA H200)". kind: "NVIDIA H200"; those of one kind are compared.
        clock_s: seconds since 1970, read by all ranks at about the same moment.
        figures: by the names of `_NAMES`; empty on a CPU.
        links: GB/s to and from ranks of other hosts, by rank.
        setup: versions and hashes of files, by name, which must be the same on all ranks.
    """

    rank: int
    host: str
    device: str
    kind: str
    clock_s: float
    figures: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[int, float] = field(default_factory=dict)
    setup: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank} on {self.host}, {self.device}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem; `far`: whether it is far off. `host`: the one to exclude; None if it is not a single one."""

    text: str
    far: bool
    host: str | None = None


def findings(ranks: Sequence[RankHealth], stored: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    """The problems, the worst first. A pure function.

    Args:
        ranks: all of the run. stored: the best medians of earlier starts, by kind of device.
    """
    all_findings = [*_different_setups(ranks), *_skewed_clocks(ranks), *_slow_links(ranks)]
    for kind, medians in medians_of(ranks).items():
        for name, median in medians.items():
            alone, together = _NAMES[name]
            for rank in ranks if alone else ():
                if rank.kind == kind and (value := rank.figures.get(name, median)) < WARN * median:
                    text = f"{rank.place}: {value:.4g} {alone}, {1 - value / median:.0%} below the median, {median:.4g}"
                    all_findings.append(Finding(text, value < STOP * median, rank.host))
            best = stored.get(kind, {}).get(name)
            if together and best and median < WARN * best:
                text = f"{kind}: {median:.4g} {together}, {1 - median / best:.0%} below an earlier start's {best:.4g}"
                all_findings.append(Finding(text, median < STOP * best))
    return sorted(all_findings, key=lambda finding: not finding.far)


def medians_of(ranks: Sequence[RankHealth]) -> dict[str, dict[str, float]]:
    """The median of each figure by kind of device; of two values the larger one. A pure function."""
    values: dict[str, dict[str, list[float]]] = {}
    for rank in ranks:
        for name, value in rank.figures.items():
            values.setdefault(rank.kind, {}).setdefault(name, []).append(value)
    return {
        kind: {name: statistics.median_high(of_ranks) for name, of_ranks in figures.items()}
        for kind, figures in values.items()
    }


def _different_setups(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    for name in ranks[0].setup:
        values = [rank.setup.get(name, "nothing") for rank in ranks]
        usual = statistics.mode(values)
        for rank, value in zip(ranks, values, strict=True):
            if value != usual:
                yield Finding(f"{rank.place}: {name} {value}, and {usual} on most ranks", True, rank.host)


def _skewed_clocks(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    median = statistics.median_high(rank.clock_s for rank in ranks)
    for rank in ranks:
        skew = rank.clock_s - median
        if abs(skew) > SKEW_S[0]:
            way = "ahead of" if skew > 0 else "behind"
            text = f"{rank.place}: its clock is {abs(skew):.1f} s {way} the median"
            yield Finding(text, abs(skew) > SKEW_S[1], rank.host)


def _slow_links(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    """The slowest pairs, and hosts that are slow with each of several others."""
    at = {rank.rank: rank for rank in ranks}
    links = {
        (rank.rank, other): min(rate, at[other].links.get(rank.rank, rate))
        for rank in ranks
        for other, rate in rank.links.items()
        if rank.rank < other
    }
    if len(links) < 2:
        return
    median = statistics.median_high(links.values())
    slow = sorted((rate, pair) for pair, rate in links.items() if rate < WARN * median)
    for rate, (first, second) in slow[:SLOWEST]:
        text = f"{at[first].place} and {at[second].place}: {rate:.4g} GB/s between them, {1 - rate / median:.0%} below"
        yield Finding(f"{text} the median of {len(links)} pairs, {median:.4g}", rate < STOP * median)
    for host in dict.fromkeys(rank.host for rank in ranks):
        with_others = dict[str, float]()
        for pair, rate in links.items():
            hosts = {at[number].host for number in pair}
            if host in hosts:
                other_host = max(hosts - {host}, default=host)
                with_others[other_host] = max(rate, with_others.get(other_host, 0.0))
        if len(with_others) > 1 and max(with_others.values()) < STOP * median:
            yield Finding(f"{host}: at most {max(with_others.values()):.4g} GB/s with any other host", True, host)


def host_pairs(num_hosts: int, turn: int) -> list[tuple[int, int]]:
    """Disjoint pairs of hosts; in num_hosts turns (one less for an even number) each meets each. A pure function."""
    last = num_hosts - 1 + num_hosts % 2
    pairs = [((turn + step) % last, (turn - step) % last) for step in range(1, (last + 1) // 2)]
    pairs += [(last, turn % last)] if num_hosts > last else []
    return [(min(pair), max(pair)) for pair in pairs]


@out_of_memory_in("looking at the device before the first step", fix='end other programs on it, or run.health="off"')
def measure(config: RunConfig, world: World, *, data_id: str) -> RankHealth:
    """Measure this rank; all ranks call it together."""
    device, everyone = world.device, world.groups["world"]
    figures = {}
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        figures = {"free_gib": free / 2**30, **_rates(world)}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # metrics have the memory of the run
    shared = replace(config, run=replace(config.run, folder=""))  # without a common disk each machine has its own
    answer = torch.ones(2, device=device).sum().item()
    assert answer == 2.0, f"{device} adds 1 and 1 to {answer}"
    host = host_name()  # Slurm excludes by its own names
    hosts = gather_objects(host, everyone)
    links = measure_links(world, hosts) if device.type == "cuda" else {}
    if links:
        figures["pair_gbps"] = statistics.median_high(links.values())
    gather_objects(None, everyone)  # so that all read their clocks at one moment
    return RankHealth(
        rank=world.rank,
        host=host,
        device=device_text(device) if device.type == "cuda" else "cpu",
        kind=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        clock_s=time.time(),
        figures=figures,
        links=links,
        setup={
            "mtrain": __version__,
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "program files": _hash_of_program(),
            "configuration": blake3(dump_config(shared).encode()).hexdigest()[:12],
            "data id": data_id[:12],
        },
    )


def measure_links(world: World, hosts: Sequence[str]) -> dict[int, float]:
    """GB/s between this rank and ranks of some other hosts, each way at once; all ranks call it together.

    All ranks of two hosts exchange messages at the same time, as in training.
    """
    ranks_of = {host: [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
    names, everyone, began_s = list(ranks_of), world.groups["world"], time.monotonic()
    values = torch.zeros(LINK_BYTES // 4, device=world.device)
    rates = {}
    for turn in range(min(LINK_ROUNDS, len(names) - 1 + len(names) % 2) if len(names) > 1 else 0):
        if gather_objects(time.monotonic() - began_s, everyone)[0] > LINKS_S:
            break
        pairs = [(names[first], names[second]) for first, second in host_pairs(len(names), turn)]
        peer_of = {
            own: other
            for first, second in (*pairs, *((second, first) for first, second in pairs))
            for own, other in zip(ranks_of[first], ranks_of[second], strict=False)
        }
        if (peer := peer_of.get(world.rank)) is not None:
            send = partial(exchange, values, peer=peer, group=everyone)
            rates[peer] = LINK_BYTES / 1e9 / _seconds(send, world.device)
    return rates


def _rates(world: World) -> dict[str, float]:
    """Rates of a GPU, each the median of some tries; random numbers are not touched."""
    device = world.device
    a = torch.full((_SIDE, _SIDE), 0.01, dtype=torch.bfloat16, device=device)
    out, on_host = torch.empty_like(a), torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    products_s = _seconds(lambda: [torch.mm(a, a, out=out) for _ in range(10)], device)
    rates = {
        "matrix_tflops": 10 * 2 * _SIDE**3 / 1e12 / products_s,
        "copy_gbps": _BYTES / 1e9 / _seconds(lambda: there.copy_(on_host, non_blocking=True), device),
    }
    if world.world_size > 1:
        values = torch.zeros(_BYTES // 4, device=device)
        rates["link_gbps"] = _BYTES / 1e9 / _seconds(lambda: all_reduce_(values, world.groups["world"]), device)
    return rates


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median time of some work, after a first try."""
    times = []
    for _ in range(1 + _TIMES):
        if device.type == "cpu":
            began_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - began_s)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def _hash_of_program() -> str:
    """A hash of the Python files of trainer and mdata: machines may have different installations of one version."""
    hasher, root = blake3(), Path(__file__).resolve().parents[2]
    for path in sorted(path for room in ("trainer", "mdata") for path in (root / room).rglob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]


def check_health(config: RunConfig, world: World, *, data_id: str) -> list[str]:
    """Check all ranks according to run.health; returns the findings as text, the same on all ranks.

    Rank 0 keeps the figures and the hosts to exclude in the run folder.

    Raises:
        ResourceError: something is far off and run.health is "stop"; on all ranks.
    """
    if config.run.health == "off":
        return []
    everyone, folder = world.groups["world"], Path(config.run.folder)
    ranks = gather_objects(measure(config, world, data_id=data_id), everyone)
    stored = gather_objects(_stored(folder) if world.is_main else {}, everyone)[0]
    all_findings = findings(ranks, stored)
    if world.is_main:
        _keep(folder, ranks, stored, all_findings)
    shown = [finding.text for finding in all_findings[:SHOWN]]
    shown += [f"and {counted(len(all_findings) - SHOWN, 'more finding')}"] if len(all_findings) > SHOWN else []
    if config.run.health == "stop" and any(finding.far for finding in all_findings):
        hosts = sorted({finding.host for finding in all_findings if finding.far and finding.host})
        raise ResourceError(
            'the ranks failed the health check, and run.health is "stop"',
            found="; ".join(shown),
            expected=f"at least {STOP:.0%} of the usual rates, clocks within {SKEW_S[1]:.0f} s, and one installation",
            fix=f"exclude {', '.join(hosts[:SHOWN])} ({folder / EXCLUDED} has all), or repair them"
            if hosts
            else 'find what slows all ranks, or set run.health="warn" to train anyway',
        )
    return [f"health: {text}" for text in shown]


def _stored(folder: Path) -> dict[str, dict[str, float]]:
    """The figures of earlier starts; none if they cannot be read."""
    with suppress(OSError, ValueError):
        kinds = json.loads((folder / FIGURES).read_bytes())
        if isinstance(kinds, dict) and all(isinstance(figures, dict) for figures in kinds.values()):
            return kinds
    return {}


def _keep(
    folder: Path,
    ranks: Sequence[RankHealth],
    stored: Mapping[str, Mapping[str, float]],
    all_findings: Sequence[Finding],
) -> None:
    best = {kind: dict(figures) for kind, figures in stored.items()}
    for kind, medians in medians_of(ranks).items():
        for name, median in medians.items():
            best.setdefault(kind, {})[name] = max(median, best.get(kind, {}).get(name, 0.0))
    if best != stored:
        atomic_io.atomic_write(folder / FIGURES, (json.dumps(best, indent=1) + "\n").encode())
    # A host that does not take part was not found fit: it may have been excluded.
    absent = {*excluded_hosts(folder)} - {rank.host for rank in ranks}
    hosts = sorted(absent | {finding.host for finding in all_findings if finding.far and finding.host})
    if hosts:
        atomic_io.atomic_write(folder / EXCLUDED, "".join(f"{host}\n" for host in hosts).encode())
    else:
        (folder / EXCLUDED).unlink(missing_ok=True)
