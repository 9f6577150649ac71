"""Ranks that are slow, set up differently or whose clocks are off are named before step 1, with host and device."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdata import ResourceError
from tests.helpers.ranks import run_ranks
from tests.trainer.run.one_rank import alone, curve, events
from tests.trainer.run.test_end_time import run_in
from trainer.config.sections import RunConfig
from trainer.parallel.mesh import Mesh
from trainer.run import health
from trainer.run.excluded_hosts import EXCLUDED
from trainer.run.health import FIGURES, RankHealth, findings, medians_of
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


def healthy(count: int = 8, **changed: Any) -> list[RankHealth]:
    """Ranks on hosts of four; `changed`: those of rank 5."""
    ranks = [
        RankHealth(
            rank=rank,
            host=f"gpu{rank // 4}",
            device=f"cuda:{rank % 4}",
            kind="H100",
            clock_s=1000.0 + rank / 100,
            figures={"matrix_tflops": 604.0, "copy_gbps": 50.0, "link_gbps": 300.0, "free_gib": 78.0},
            setup={"torch": "2.11", "data id": "abc"},
        )
        for rank in range(count)
    ]
    if "figures" in changed:
        changed["figures"] = {**ranks[5].figures, **changed["figures"]}
    return [*ranks[:5], replace(ranks[5], **changed), *ranks[6:]]


def test_healthy_ranks_have_no_findings():
    assert findings(healthy(), {}) == []
    assert findings(healthy(), {"H100": medians_of(healthy())["H100"], "A100": {"copy_gbps": 1e9}}) == []


@pytest.mark.parametrize(
    ("changed", "text", "far"),
    [
        ({"figures": {"matrix_tflops": 530.0}}, "530 TFLOP/s in matrix products, 12% below the median, 604", False),
        ({"figures": {"matrix_tflops": 400.0}}, "400 TFLOP/s in matrix products, 34% below the median, 604", True),
        ({"figures": {"copy_gbps": 44.0}}, "44 GB/s from its host, 12% below the median, 50", False),
        ({"figures": {"free_gib": 20.0}}, "20 GiB of free memory, 74% below the median, 78", True),
        ({"clock_s": 1004.0}, "its clock is 4.0 s ahead of the median", False),
        ({"clock_s": 900.0}, "its clock is 100.0 s behind the median", True),
        ({"setup": {"torch": "2.10", "data id": "abc"}}, "torch 2.10, and 2.11 on most ranks", True),
        ({"setup": {"torch": "2.11", "data id": "abd"}}, "data id abd, and abc on most ranks", True),
    ],
)
def test_a_rank_that_is_off_is_named(changed, text, far):
    (finding,) = findings(healthy(**changed), {})
    assert finding == health.Finding(f"rank 5 on gpu1, cuda:1: {text}", far, "gpu1")


def test_all_ranks_are_compared_with_earlier_starts():
    stored = {"H100": {"matrix_tflops": 700.0, "link_gbps": 450.0, "free_gib": 900.0}}
    texts = [(finding.text, finding.far, finding.host) for finding in findings(healthy(), stored)]
    assert texts == [
        ("H100: 300 GB/s of an all-reduce over all ranks, 33% below an earlier start's 450", True, None),
        ("H100: 604 TFLOP/s in matrix products, 14% below an earlier start's 700", False, None),
    ]


def linked(rates: dict[tuple[int, int], float], num_ranks: int = 4) -> list[RankHealth]:
    """Ranks on hosts of their own."""
    links = [
        {other: rate for pair, rate in rates.items() if rank in pair for other in pair if other != rank}
        for rank in range(num_ranks)
    ]
    return [replace(healthy()[0], rank=rank, host=f"gpu{rank}", links=links[rank]) for rank in range(num_ranks)]


def test_slow_links_are_named_the_slowest_three_first():
    rates = dict.fromkeys(itertools.combinations(range(8), 2), 48.0)
    assert findings(linked(rates, 8), {}) == []
    rates |= {(0, 1): 20.0, (2, 3): 12.0, (4, 5): 40.0, (6, 7): 42.0}
    two = "rank {} on gpu{}, cuda:0 and rank {} on gpu{}, cuda:0: "
    assert [(finding.text, finding.far, finding.host) for finding in findings(linked(rates, 8), {})] == [
        (two.format(2, 2, 3, 3) + "12 GB/s between them, 75% below the median of 28 pairs, 48", True, None),
        (two.format(0, 0, 1, 1) + "20 GB/s between them, 58% below the median of 28 pairs, 48", True, None),
        (two.format(4, 4, 5, 5) + "40 GB/s between them, 17% below the median of 28 pairs, 48", False, None),
    ]
    assert findings(linked({(0, 1): 1.0}, 2), {}) == [], "nothing to compare it with"


def test_a_host_that_is_slow_with_all_others_is_to_be_excluded():
    rates = {pair: 10.0 if 2 in pair else 48.0 for pair in itertools.combinations(range(6), 2)}
    *pairs, host = [finding for finding in findings(linked(rates, 6), {}) if finding.far]
    assert len(pairs) == health.SLOWEST and all(pair.host is None for pair in pairs)
    assert host == health.Finding("gpu2: at most 10 GB/s with any other host", True, "gpu2")


@pytest.mark.parametrize("num_hosts", range(2, 10))
def test_each_host_meets_each_other_once(num_hosts):
    turns = [health.host_pairs(num_hosts, turn) for turn in range(num_hosts - 1 + num_hosts % 2)]
    for pairs in turns:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs) == num_hosts - num_hosts % 2
    assert sorted(itertools.chain(*turns)) == list(itertools.combinations(range(num_hosts), 2))


def _links(context: Any, hosts: list[str], delay_s: float) -> dict[int, float]:
    """Messages between ranks 1 and 2 take longer."""
    real = health.exchange

    def delayed(x: Any, *, peer: int, group: Any) -> Any:
        if {context.rank, peer} == {1, 2}:
            time.sleep(delay_s)
        return real(x, peer=peer, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "exchange", delayed)
        patch.setattr(health, "LINK_BYTES", 1 << 16)
        return health.measure_links(context.join(Mesh(context.world)), hosts)


def test_a_slow_link_between_two_hosts_is_found():
    links = run_ranks(_links, 4, ["a", "b", "c", "d"], 0.2)
    assert [sorted(rates) for rates in links] == [[other for other in range(4) if other != rank] for rank in range(4)]
    slowest = min((rate, sorted((rank, other))) for rank, rates in enumerate(links) for other, rate in rates.items())
    assert slowest[1] == [1, 2] and slowest[0] < (1 << 16) / 1e9 / 0.2
    same_rank_of_the_other_host = [[2], [3], [0], [1]]
    assert [sorted(rates) for rates in run_ranks(_links, 4, ["a", "a", "b", "b"], 0.0)] == same_rank_of_the_other_host


def _off(context: Any, config: RunConfig, clock_s: float) -> None:
    """Rank 1 measures itself slow, with another clock."""
    real = health.measure

    def measured(*given: Any, **more: Any) -> RankHealth:
        rank = real(*given, **more)
        slow = context.rank == 1
        figures = {"matrix_tflops": 100.0 if slow else 600.0}
        return replace(rank, host=f"host{rank.rank}", figures=figures, clock_s=rank.clock_s - clock_s * slow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "measure", measured)
        try:
            train(config, context.join(Mesh(context.world)))
        except ResourceError as error:
            Path(config.run.folder, f"error-{context.rank}").write_text(str(error))


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_slow_rank_is_told_or_ends_all_ranks_and_its_host_is_written_down(policy, tmp_path):
    config = run_in(tmp_path / "run", health=policy)
    folder = tmp_path / "run"
    run_ranks(_off, 2, config, 30.0)
    assert (folder / EXCLUDED).read_text() == "host1\n"
    assert json.loads((folder / FIGURES).read_text()) == {"cpu": {"matrix_tflops": 600.0}}
    slow = "rank 1 on host1, cpu: 100 TFLOP/s in matrix products, 83% below the median, 600"
    if policy == "warn":
        notes = [event["text"] for event in events(config, "note")]
        assert f"health: {slow}" in notes and any("its clock is 30." in note for note in notes)
        assert len(curve(config)) == 6
        return
    texts = [(folder / f"error-{rank}").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1] and slow in texts[0]
    assert f"exclude host1 ({folder / EXCLUDED} has all)" in texts[0]
    assert not (folder / "metrics.jsonl").exists()


def test_a_healthy_run_says_nothing_and_excludes_none_of_its_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "host1")
    (tmp_path / EXCLUDED).write_text("host1\nhost9\n")
    (tmp_path / FIGURES).write_text("no JSON")
    config = run_in(tmp_path, health="stop")
    assert not [line for line in alone(config).lines if "health" in line]
    assert (tmp_path / EXCLUDED).read_text() == "host9\n"
    monkeypatch.setenv("SLURMD_NODENAME", "host9")
    alone(replace(config, train=replace(config.train, steps=9), optimizer=replace(config.optimizer, decay_steps=9)))
    assert not (tmp_path / EXCLUDED).exists()
    monkeypatch.setattr(health, "measure", None)
    alone(run_in(tmp_path / "off", health="off"))


def _measured(context: Any) -> dict[str, float]:
    """What a GPU is asked, by a CPU; the times are not those of events."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_SIDE", 8),
            ("_BYTES", 64),
            ("_seconds", lambda work, device: 1e-3 if work() is not None else 0),
        ):
            patch.setattr(health, name, value)
        return health._rates(context.join(Mesh(context.world)))


def test_the_rates_are_those_of_the_work():
    rates = run_ranks(_measured, 2)
    assert rates[0] == rates[1] == pytest.approx({"matrix_tflops": 10.24e-6, "copy_gbps": 64e-6, "link_gbps": 64e-6})
