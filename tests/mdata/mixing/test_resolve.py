"""From shares to samples: every unit exact, lengths that fit, caps that hold, all problems at once."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.mixing.native_blend import NativeBlend
from mdata.mixing.resolve import Sizes, Targets, resolve, round_targets
from mdata.mixing.schedule import BlendSchedule, Phase, blend_error, canonical, divide_groups
from mdata.mixing.shares import Share
from tests.helpers.examples import examples
from tests.reference import phases as twin

S = 8


def sizes(*epochs: int, caps=None) -> Sizes:
    names = tuple("abcdefghij"[: len(epochs)])
    return Sizes(names, epochs, S, caps or (None,) * len(epochs))


def shares_of(*texts: str) -> tuple[Share, ...]:
    """ "3" is a weight, "5 tokens" an amount."""
    return tuple(Share(*text.split()) for text in texts)


def phase(*shares: str, **facts) -> Phase:
    return Phase(shares_of(*shares), **facts)


def dealt(*phases: Phase, of: Sizes):
    return resolve([BlendSchedule(phases)], of)


def test_weights_alone_are_the_native_blend():
    blend = dealt(phase("0.7", "0.3"), of=sizes(5, 5))
    assert blend.num_samples is None
    for ours, plain in zip(blend.locate(range(50)), NativeBlend((7, 3)).locate(range(50)), strict=True):
        assert (ours == plain).all()


@pytest.mark.parametrize(
    ("shares", "length", "counts"),
    [
        (("1 epochs", "1 epochs", "1 epochs"), {}, (50, 7, 3)),  # everything once
        (("3/2 epochs", "10 samples", "0"), {}, (75, 10, 0)),
        (("80 tokens", "81 tokens", "0"), {}, (10, 11, 0)),
        (("20 samples", "3", "1"), {"samples": 60}, (20, 30, 10)),
        (("2", "3", "1"), {"tokens": 6 * S}, (2, 3, 1)),
        (("2", "3", "1"), {"tokens": 6 * S - 1}, (2, 3, 1)),
        (("1", "1", "1"), {"samples": 2}, (1, 1, 0)),
    ],
)
def test_amounts_come_out_exact(shares, length, counts):
    blend = dealt(phase(*shares, **length), of=sizes(50, 7, 3))
    assert blend.num_samples == sum(counts)
    assert blend.counts(sum(counts)) == counts


def test_three_phases_meet_their_shares_at_each_end():
    plan = [("7", "2", "1"), ("1", "1", "1"), ("0", "5/7", "2/7")]
    lengths = [101, 1000, 37]
    blend = dealt(*(phase(*p, samples=n) for p, n in zip(plan, lengths, strict=True)), of=sizes(9, 9, 9))
    target, end = [Fraction(0)] * 3, 0
    for shares, length in zip(plan, lengths, strict=True):
        exact = [Fraction(share) for share in shares]
        target = [t + length * e / sum(exact) for t, e in zip(target, exact, strict=True)]
        end += length
        assert all(abs(count - t) < 1 for count, t in zip(blend.counts(end), target, strict=True))
    assert blend.num_samples == end


@examples(60)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(1, 300),
                          st.booleans()), min_size=1, max_size=4))  # fmt: skip
@example([([0, 1, 1], 1, False), ([0, 1, 4], 1, False), ([0, 1, 2], 1, True), ([0, 1, 0], 1, False)])
def test_phases_and_ramps_meet_their_shares(drawn):
    plan = [Phase(shares_of(*map(str, w)), samples=n, ramp=ramp and i > 0) for i, (w, n, ramp) in enumerate(drawn)]
    blend = dealt(*plan, of=sizes(9, 9, 9))
    target, end, before = [Fraction(0)] * 3, 0, None
    for p in plan:
        parts = [share.amount / sum(s.amount for s in p.shares) for share in p.shares]
        start = before if p.ramp else parts
        target = [t + p.samples * (a + b) / 2 for t, a, b in zip(target, start, parts, strict=True)]
        end, before = end + p.samples, parts
        assert all(abs(count - t) < 1 for count, t in zip(blend.counts(end), target, strict=True))


def test_a_ramp_goes_in_a_line():
    blend = dealt(
        phase("1", "0", samples=10), phase("0", "1", samples=4000, ramp=True), phase("0", "1"), of=sizes(1, 1)
    )
    assert len(blend.segments) == 1002
    for part in (0, 1, 500, 1000, 2718, 4000):
        exact = Fraction(part * part, 2 * 4000)  # the integral of k / 4000
        assert abs(blend.counts(10 + part)[1] - exact) < Fraction(268, 100)
    assert blend.counts(5010)[1] == 2000 + 1000


def test_a_schedule_that_was_left_does_not_change():
    old = (phase("1", "2", samples=100), phase("1", "0", samples=50, ramp=True), phase("5", "2"))
    of = sizes(9, 9)
    before = dealt(*old, of=of)
    for at in (1, 99, 100, 120, 150, 1000):
        for last in (phase("1", "9"), phase("2 epochs", "1 epochs")):
            after = resolve([BlendSchedule(old, until=at), BlendSchedule((last,))], of)
            assert after.counts(at) == before.counts(at)
            assert [x.tolist() for x in after.locate(range(at))] == [x.tolist() for x in before.locate(range(at))]
            if last.shares[0].unit == "epochs":
                assert np.subtract(after.counts(at + 27), after.counts(at)).tolist() == [18, 9]


PHASES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(1, 80), st.booleans()),
    min_size=1,
    max_size=3,
)


@examples(60)
@given(st.lists(PHASES, min_size=2, max_size=4), st.data())
def test_changes_of_changes_repeat_and_lose_nothing(plans, data):
    """Any schedules, each left anywhere before its end: every prefix stays, every component counts on."""
    of, kept, at, before = sizes(9, 9, 9), [], 0, None
    for drawn in plans:
        phases = tuple(
            Phase(shares_of(*map(str, w)), samples=n, ramp=ramp and i > 0) for i, (w, n, ramp) in enumerate(drawn)
        )
        blend = resolve([*kept, BlendSchedule(phases)], of)
        if before is not None:
            assert [x.tolist() for x in blend.locate(range(at))] == [x.tolist() for x in before.locate(range(at))]
        components, inside = blend.locate(range(blend.num_samples))
        for component in range(3):
            assert inside[components == component].tolist() == list(range((components == component).sum()))
        at = data.draw(st.integers(at + 1, blend.num_samples))
        kept, before = [*kept, BlendSchedule(phases, until=at)], blend


def test_a_cap_that_binds_in_a_bounded_blend_is_refused_with_numbers():
    of = sizes(10, 100, caps=(Fraction(3, 2), None))
    assert dealt(phase("15 samples", "1 samples"), of=of).num_samples == 16
    with pytest.raises(UsageError, match=r"a may be read 3/2 times \(15 samples\), .*16 samples \(1\.6 epochs\)"):
        dealt(phase("16 samples", "1 samples"), of=of)
    with pytest.raises(UsageError, match="redistribute = true"):
        dealt(phase("1", "1", samples=40), phase("0", "1"), of=of)


@pytest.mark.parametrize("cap", [Fraction(0), Fraction(1, 11)])
def test_a_cap_below_one_sample_is_refused(cap):
    with pytest.raises(UsageError, match=rf"a may be read {cap} times, less than one sample"):
        dealt(phase("1", "1"), of=sizes(10, 100, caps=(cap, None)))


def test_a_blend_without_end_ends_where_a_cap_is_reached():
    blend = dealt(phase("1", "1"), of=sizes(10, 100, caps=(Fraction(2), Fraction(9))))
    end = blend.num_samples
    assert blend.counts(end)[0] == 20
    uncapped = dealt(phase("1", "1"), of=sizes(10, 100))
    assert uncapped.counts(end + 1)[0] == 21
    rare = dealt(phase("1", str(2**61)), of=sizes(10, 100, caps=(Fraction(2), None)))
    assert rare.num_samples is None


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ([phase("1 epochs", "1")], "weights beside amounts, .* need the length"),
        ([phase("1", "1"), phase("1", "1")], "phase 1: weights beside amounts, or before another phase"),
        ([phase("0", "0")], "no component has a share"),
        ([phase("9 samples", "1", samples=9)], r"ask for 9 samples \(72 tokens\), its length is 9 .*nothing is left"),
        ([phase("9 samples", "0", samples=8)], r"ask for 9 samples \(72 tokens\), its length is 8 samples"),
        ([phase("9 samples", "0", samples=12)], r"amounts give 9 .*, its length is 12 .*no weight takes the rest"),
        ([phase("1", "1", ramp=True, samples=5)], "a ramp goes from the weights"),
        ([phase("1 epochs", "0"), phase("0", "1", ramp=True, samples=5)], "phase 2: a ramp goes from"),
        ([phase("1", "1", samples=5), phase("1", "1", ramp=True)], "phase 2: a ramp needs a length"),
        ([phase("0", "0", samples=5), phase("1", "1", ramp=True, samples=5)], "^phase 1: no component has a share$"),
        ([phase("0 tokens", "0"), phase("1", "1", ramp=True, samples=5)], "^phase 1: no component has a share$"),
        ([phase("1", "1", samples=2**62), phase("1", "1", samples=1)], "can be counted"),
        ([phase("0 samples", "0", samples=0)], "no component has a share"),
        ([phase("1", "0", samples=0)], "its length is 0"),
    ],
)
def test_what_cannot_be_met_is_said_with_numbers(phases, text):
    with pytest.raises(UsageError, match=text):
        dealt(*phases, of=sizes(9, 9))


def test_all_problems_at_once():
    with pytest.raises(UsageError) as caught:
        dealt(phase("1 epochs", "1"), phase("0", "0", samples=3), phase("1", "1"), of=sizes(9, 9))
    assert "the blend has 2 problems" in str(caught.value)
    with pytest.raises(UsageError, match=r"a has no sample in this split\n.*b has no sample"):
        dealt(phase("1", "1"), of=sizes(0, 0))


def test_lines_of_a_problem_stay_below_it():
    said = str(blend_error(["a: not there\n  expected: a.json\n  try: b", "c"]))
    assert said == "the blend has 2 problems:\n  - a: not there\n      expected: a.json\n      try: b\n  - c"


def test_a_change_after_the_end_is_refused():
    with pytest.raises(UsageError, match="changes at sample 12, 3 samples after its end"):
        resolve([BlendSchedule((phase("1 epochs"),), until=12), BlendSchedule((phase("1"),))], sizes(9))


def test_groups_divide_their_share():
    members = ("web", "web", None, "label")
    divided = divide_groups(phase("1", "3", "40", "7", by_name={"web": Share("60")}), members, names="abcd")
    assert divided == phase("15", "45", "40", "7")
    tokens = phase("1", "3", by_name={"web": Share("100", "tokens")})
    assert divide_groups(tokens, ("web", "web"), names="ab") == phase("25 tokens", "75 tokens")
    with pytest.raises(UsageError, match="a has a share in epochs"):
        divide_groups(phase("1 epochs", by_name={"web": Share("1")}), ("web",), names="a")
    for share, whole in (("1", "1 epochs"), ("0", "1")):
        with pytest.raises(UsageError, match="the group web cannot be given its share"):
            divide_groups(phase(share, by_name={"web": shares_of(whole)[0]}), ("web",), names="a")


def test_the_id_knows_weights_as_parts():
    assert canonical(phase("7", "3")) == canonical(phase("0.7", "0.3")) != canonical(phase("7", "2"))
    assert canonical(phase("7", "0 tokens")) == canonical(phase("1", "0"))
    assert canonical(phase("7 tokens", "1")) != canonical(phase("8 tokens", "1"))


def test_1000_components_in_a_ramp_stay_within_one_sample():
    weights = [str(1 + i % 7) for i in range(1000)]
    back = weights[::-1]
    of = Sizes(tuple(map(str, range(1000))), (10**6,) * 1000, S, (None,) * 1000)
    blend = dealt(phase(*weights, samples=999), phase(*back, samples=30_001, ramp=True), of=of)
    first = [Fraction(int(w), sum(map(int, weights))) for w in weights]
    exact = [999 * p + Fraction(30_001, 2) * (p + q) for p, q in zip(first, first[::-1], strict=True)]
    assert all(math.floor(e) <= n <= math.ceil(e) for e, n in zip(exact, blend.counts(31_000), strict=True))


SHARES = st.integers(0, 5) | st.integers(0, 10**6) | st.integers(0, 2**70)


@st.composite
def increments(draw):
    """What each component is to get in each piece."""
    number, pieces = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    rows = []
    for _ in range(pieces):
        weights = draw(st.lists(SHARES, min_size=number, max_size=number).filter(any))
        length = draw(st.fractions(0, 20, max_denominator=7))
        rows.append([length * weight / sum(weights) for weight in weights])
    return rows


def given_at(rows: list[list[Fraction]]) -> tuple[list[list[Fraction]], list[list[int]]]:
    """(targets at every end, samples given at every end)."""
    targets = [[sum(column[: i + 1], Fraction(0)) for column in zip(*rows, strict=True)] for i in range(len(rows))]
    denominator = math.lcm(*(value.denominator for row in targets for value in row))
    numerators = [np.array([int(value * denominator) for value in row], object) for row in targets]
    counts = round_targets(Targets(len(rows), len(rows[0]), denominator, lambda: iter(numerators)))
    assert (counts >= 0).all()
    return targets, np.cumsum(counts, axis=0).tolist()


@examples(80)
@given(increments())
def test_within_one_sample_and_equal_to_the_twin(rows):
    targets, given_ = given_at(rows)
    for target, have in zip(targets, given_, strict=True):
        assert sum(have) == math.ceil(sum(target))
        for exact, count in zip(target, have, strict=True):
            assert math.floor(exact) <= count <= math.ceil(exact)
    assert given_ == twin.round_targets(targets)


def test_largest_remainders_alone_would_not_do():
    """Ten are rounded up by 0.9 and rest; ninety are then due 0.9999 + 0.0112 each, and 82 samples would not reach."""
    first = [Fraction(1, 10)] * 10 + [Fraction(999, 10_000)] * 90 + [10 - 1 - Fraction(999 * 90, 10_000)]
    second = [Fraction(0)] * 10 + [Fraction(82, 90)] * 90 + [Fraction(0)]
    targets, given_ = given_at([first, second])
    for target, have in zip(targets, given_, strict=True):
        assert all(abs(exact - count) < 1 for exact, count in zip(target, have, strict=True))
    assert sum(given_[0][:10]) == 0


def test_remainders_that_differ_by_less_than_two_to_the_minus_62_are_equal():
    small = Fraction(1, 2**70)
    assert given_at([[Fraction(1, 3), Fraction(1, 3) + small, Fraction(1, 3) - small]])[1] == [[1, 0, 0]]
    more = Fraction(1, 2**60)
    assert given_at([[Fraction(1, 3), Fraction(1, 3) + more, Fraction(1, 3) - more]])[1] == [[0, 1, 0]]


def test_one_piece_is_plain_largest_remainder():
    assert given_at([[Fraction(5, 2), Fraction(13, 10), Fraction(6, 5)]])[1] == [[3, 1, 1]]
    assert given_at([[Fraction(1, 2)] * 2])[1] == [[1, 0]]
