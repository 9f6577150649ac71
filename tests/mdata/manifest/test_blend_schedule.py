"""The schedule in a blend manifest, and how its id depends on it."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest

from mdata.errors import DamageError, UsageError
from mdata.manifest.blend_schedule import caps_of, schedules_of
from mdata.manifest.ids import blend_id, checksum, sealed
from mdata.manifest.io import load_manifest, save_manifest
from mdata.manifest.types import EarlierPhases, NamedSet, StoredPhase, StoredShare
from mdata.mixing.shares import Share
from tests.helpers.manifests import assert_valid, some_blend

replace = msgspec.structs.replace


def with_components(blend, *changes):
    parts = [replace(part, **change) for part, change in zip(blend.components, changes, strict=True)]
    return replace(blend, components=parts)


def phase(*shares: str, **facts) -> StoredPhase:
    return StoredPhase(**{"samples": None, "shares": list(shares), **facts})


def test_without_phases_there_is_one():
    (schedule,) = schedules_of(some_blend())
    assert some_blend().is_plain
    assert [p.shares for p in schedule.phases] == [(Share("0.7", set_by=None), Share("0.3", set_by=None))]
    assert schedule.phases[0].endless
    mixed = with_components(some_blend(), {"unit": "epochs", "share": "2", "cap": "5/2"}, {"group": "web"})
    mixed = replace(mixed, groups={"web": StoredShare(share="9", unit="tokens")})
    (schedule,) = schedules_of(mixed)
    assert [(share.amount, share.unit) for share in schedule.phases[0].shares] == [(2, "epochs"), (9, "tokens")]
    assert caps_of(mixed) == (Fraction(5, 2), None)


def test_a_full_blend_is_written_and_read(tmp_path):
    phases = [
        phase("1", "2", samples=10),
        phase("1", "0", tokens=80, ramp=True),
        phase("1", "9", units=["epochs", "weight"], samples=50, groups={"g": StoredShare(share="1")}),
    ]
    blend = replace(
        with_components(some_blend(), {}, {"group": "g"}),
        phases=phases,
        earlier=[EarlierPhases(until=7, phases=phases[:1])],
        parent="ab" * 32,
        valid=[NamedSet(name="books", path="b.json", id="cd" * 32)],
    )
    saved = save_manifest(blend, tmp_path / "mix.json")
    assert_valid(tmp_path / "mix.json")
    assert load_manifest(tmp_path / "mix.json") == saved
    earlier, now = schedules_of(saved)
    assert (earlier.until, now.until) == (7, None)
    assert [(p.samples, p.tokens, p.ramp) for p in now.phases] == [
        (10, None, False),
        (None, 80, True),
        (50, None, False),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"phases": [phase("0.7", "0.2")]},
        {"phases": [phase("0.7", "0.3", samples=9)]},
        {"phases": [phase("0.7", "0.3", tokens=9)]},
        {"phases": [phase("0.7", "0.3", units=["epochs", "epochs"])]},
        {"phases": [phase("0.7", "0.3")], "earlier": [EarlierPhases(until=7, phases=[phase("1", "0")])]},
        {"phases": [phase("0.7", "0.3")], "earlier": [EarlierPhases(until=8, phases=[phase("1", "0")])]},
    ],
)
def test_the_id_covers_what_decides_the_samples(change):
    plain = replace(some_blend(), phases=[phase("0.7", "0.3")])
    ids = {blend_id(replace(some_blend(), **change)) for change in ({}, {"phases": plain.phases}, change)}
    assert len(ids) == 3


def test_the_id_leaves_out_names_and_ways_of_writing():
    one = replace(some_blend(), phases=[phase("0.7", "0.3")])
    same = replace(
        with_components(one, {"share": "5", "name": "x", "group": "heading"}, {"path": "y.json"}),
        phases=[phase("14", "6", units=["weight", "weight"])],
        valid=[NamedSet(name="books", path="b.json", id="cd" * 32)],
    )
    assert blend_id(one) == blend_id(same)
    capped = with_components(one, {"cap": "2"}, {})
    assert blend_id(capped) != blend_id(one)
    assert blend_id(with_components(one, {"cap": "2.0"}, {})) == blend_id(capped)


def test_ids_of_phases_do_not_change_between_versions_of_this_code():
    """As for plain blends: users have stored them."""
    blend = replace(some_blend(), phases=[phase("0.7", "0.3", samples=9), phase("1", "2", tokens=80, ramp=True)])
    assert sealed(blend).id == "c527b6ccc4c1165bc52ba762a42a705854a77b3250653dcc74ab35e46eb4a7fd"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"phases": [phase("1")]}, "phase 1 does not fit the blend"),
        ({"phases": [phase("1", "1", units=["weight"])]}, "phase 1 does not fit the blend"),
        ({"phases": [phase("1", "1", set_by=["user"])]}, "phase 1 does not fit the blend"),
        ({"phases": [phase("1", "1", samples=1, tokens=1)]}, "samples 1, tokens 1"),
        ({"phases": [phase("1/0", "1")]}, "a share is not a number"),
    ],
)
def test_phases_that_do_not_fit(tmp_path, change, text):
    blend = replace(some_blend(), **change)
    with pytest.raises(UsageError, match=text):
        schedules_of(blend)
    written = replace(sealed(some_blend()), **change)
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(replace(written, checksum=checksum(written))))
    with pytest.raises(DamageError, match=text):
        load_manifest(tmp_path / "x.json")
