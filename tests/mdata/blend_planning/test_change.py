"""A changed mixture for the rest of a run: earlier samples stay the same, nothing is repeated or lost."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

import mdata
from mdata import UsageError
from mdata.blend.blend import OpenBlend
from mdata.blend.compose import plan_blend
from mdata.blend_planning.change import BlendEdits, change_blend, change_table
from mdata.blend_planning.make_blend import save_blend
from mdata.manifest.ids import blend_id, sealed
from mdata.tracing.tracer import Tracer
from tests.helpers.corpora import write_pair
from tests.helpers.examples import SOAK
from tests.helpers.manifests import assert_valid
from tests.mdata.tracing.test_tracer import check_backward

S = 8


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """a, b, c, d: 1,000, 500, 250, 125 tokens in sequences of 5."""
    for name, count in (("a", 200), ("b", 100), ("c", 50), ("d", 25)):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name / f"{name}_text_document", [[5]] * count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def path(name: str) -> str:
    return f"{name}/{name}_text_document"


def entry(name: str, **facts) -> dict[str, object]:
    return {"path": path(name), **facts}


def make(*entries, **tables) -> OpenBlend:
    return mdata.make_blend({"component": list(entries), **tables}, "old.json")


def change(old: OpenBlend, at: int, spec=None, **edits) -> OpenBlend:
    (old.folder / "b" / "deeper").mkdir(parents=True, exist_ok=True)
    given = BlendEdits(**edits) if edits else None
    new = change_blend(old, at, folder=old.folder / "b" / "deeper", sequence_length=S, spec=spec, edits=given)
    saved = save_blend(new, old.folder / "b" / "deeper" / "new.json")
    assert_valid(old.folder / "b" / "deeper" / "new.json")
    assert mdata.open_blend(old.folder / "b" / "deeper" / "new.json").manifest == saved.manifest
    assert saved.continues == (old.manifest.id, at) and saved.manifest.id != old.manifest.id
    return saved


def stream(blend: OpenBlend, count: int) -> list[tuple[str, int]]:
    """(corpus, sample inside it) of the first samples, as a dataset reads them."""
    data = mdata.Dataset(blend, mdata.DatasetOptions(sequence_length=S))
    components, inside = data.locate(np.arange(count))
    return [(data.components[c].name, i) for c, i in zip(components.tolist(), inside.tolist(), strict=True)]


def assert_continues(old: OpenBlend, new: OpenBlend, at: int, count: int = 90) -> list[tuple[str, int]]:
    """The old stream up to the change; every corpus counts on, one by one; returns what comes after."""
    after = stream(new, count)
    assert after[:at] == stream(old, at)
    for name in new.names:
        inside = [i for n, i in after if n == name]
        assert inside == list(range(len(inside)))
    return after[at:]


def test_edits(corpora):
    old = make(entry("a", weight=5), entry("b", weight=3), entry("c", weight=2))
    new = change(old, 30, shares={"a": "0.5"}, add=[("1.5", path("d"))], remove=["b"])
    assert new.names == ("a", "b", "c", "d")
    rest = assert_continues(old, new, 30, 30 + 80)
    assert {name: sum(n == name for n, _ in rest) for name in "abcd"} == {"a": 10, "b": 0, "c": 40, "d": 30}
    swapped = change(old, 30, replace={"b": path("d")})
    rest = assert_continues(old, swapped, 30, 80)
    assert {name: sum(n == name for n, _ in rest) for name in "abcd"} == {"a": 25, "b": 0, "c": 10, "d": 15}


def test_a_corpus_whose_share_did_not_change_keeps_its_order_and_its_draws(corpora):
    """Not only its numbers: its rows are the same tokens, although another mixture reads them."""
    old = make(entry("a", weight=5), entry("b", weight=5))
    new = change(old, 21, remove=["b"], add=[("5", path("c"))])
    assert_continues(old, new, 21)
    before, after = (mdata.Dataset(blend, mdata.DatasetOptions(sequence_length=S)) for blend in (old, new))
    for k in range(60):
        (k_before,), (k_after,) = (data.selection.inverse([0], [k]) for data in (before, after))
        assert (before[k_before]["tokens"] == after[k_after]["tokens"]).all()


def test_a_whole_new_mixture(corpora):
    old = make(entry("a", weight=5), entry("b", weight=3))
    toml = {
        "component": [
            entry("d", weight=3, group="g"),
            entry("a", weight=1, group="g"),
            entry("c", weight=4, max_epochs=9),
        ],
        "group": {"g": 12},
        "phase": [{"samples": 16}, {"shares": {"c": 1}}],
    }
    new = change(old, 10, toml)
    assert new.names == ("a", "b", "d", "c")
    rest = assert_continues(old, new, 10, 40)
    assert [sum(n == name for n, _ in rest[:16]) for name in "abdc"] == [3, 0, 9, 4]
    assert {name for name, _ in rest[16:]} == {"c"}
    assert [part.group for part in new.manifest.components] == ["g", None, "g", None]
    assert stream(change(old, 10, ["1", path("c")]), 30)[10:] == [("c", k) for k in range(20)]


def test_amounts_count_from_the_change_and_what_is_left_of_them_stays(corpora):
    old = make(entry("a", epochs=1), entry("b", epochs=2))
    whole = mdata.Dataset(old, mdata.DatasetOptions(sequence_length=S))
    counts = whole.selection.counts(whole.num_samples)
    new = change(old, 100, add=[("1", path("c"))])
    with pytest.raises(UsageError, match=r"nothing is left for the weights\n  try: .*a complete new blend"):
        mdata.Dataset(new, mdata.DatasetOptions(sequence_length=S))
    less = change(old, 100, remove=["b"])
    with pytest.raises(UsageError, match=r"no weight takes the rest\n  try: .*--set NAME=1"):
        mdata.Dataset(less, mdata.DatasetOptions(sequence_length=S))
    assert mdata.Dataset(change(old, 100, remove=["b"], shares={"a": "1"}), mdata.DatasetOptions(sequence_length=S))
    swapped = change(old, 100, replace={"a": path("c")})
    data = mdata.Dataset(swapped, mdata.DatasetOptions(sequence_length=S))
    left = counts[0] - whole.selection.counts(100)[0]
    assert data.num_samples == whole.num_samples
    assert data.selection.counts(data.num_samples) == (counts[0] - left, counts[1], left)
    again = change(old, 100, {"component": [entry("a", epochs=1)]})
    data = mdata.Dataset(again, mdata.DatasetOptions(sequence_length=S))
    assert data.num_samples == 100 + counts[0]


PHASES = [{"samples": 20}, {"samples": 30, "shares": {"b": 1}, "ramp": True}, {"shares": {"b": 3, "a": 1}}]


def test_later_phases_stay(corpora):
    old = make(entry("a", weight=5), entry("b", weight=5), phase=[PHASES[0], PHASES[2]])
    new = change(old, 10, add=[("10", path("c"))])
    rest = assert_continues(old, new, 10)
    assert sum(name == "c" for name, _ in rest[:10]) == 5
    assert abs(sum(name == "c" for name, _ in rest[10:]) - 70 * 10 / 14) < 2
    late = change(old, 20, remove=["a"])
    assert {name for name, _ in assert_continues(old, late, 20)} == {"b"}


def test_in_a_ramp_only_a_whole_mixture_will_do(corpora):
    old = make(entry("a", weight=5), entry("b", weight=5), phase=PHASES)
    for at in (20, 35):
        with pytest.raises(UsageError, match="is inside the ramp of phase 2"):
            change(old, at, remove=["a"])
        assert_continues(old, change(old, at, ["1", path("c")]), at)
    assert_continues(old, change(old, 50, remove=["a"]), 50)


def test_changes_of_changes(corpora):
    first = make(entry("a", weight=5), entry("b", weight=5), phase=PHASES)
    second = change_blend(first, 33, folder=corpora, sequence_length=S, spec=["2", path("c"), "1", path("a")])
    third = change_blend(
        second, 60, folder=corpora, sequence_length=S, edits=BlendEdits(remove=["c"], shares={"b": "1"})
    )
    assert third.continues == (second.manifest.id, 60)
    assert_continues(first, second, 33)
    rest = assert_continues(second, third, 60, 120)
    assert sum(name == "a" for name, _ in rest) == sum(name == "b" for name, _ in rest) == 30
    with pytest.raises(UsageError, match=r"a sample from 34 to its end \(it was changed there before"):
        change(second, 33, remove=["c"])


def test_caps_count_from_the_beginning(corpora):
    old = make(entry("c", weight=5, max_epochs=1), entry("b", weight=5))
    size = mdata.preview_blend(old, sequence_length=S).rows[0].samples_per_epoch
    new = change(old, 20, shares={"b": "0", "c": "1"})
    assert mdata.Dataset(new, mdata.DatasetOptions(sequence_length=S)).num_samples == 20 + size - 10


def test_the_table_of_a_change(corpora):
    old = make(entry("c", weight=5), entry("b", weight=5))
    sizes = [row.samples_per_epoch for row in mdata.preview_blend(old, sequence_length=S).rows]
    new = change(old, 20, add=[("15", path("d"))], remove=["b"])
    c, b, d = change_table(old, new, sequence_length=S, split="100,0,0", run=None)
    assert (c.samples, b.samples, d.samples) == (10, 10, 0)
    assert (c.part_before, c.part_after, b.part_after, d.part_after) == (0.5, 0.25, 0, 0.75)
    assert (c.unread, b.unread, d.unread) == (0, sizes[1] - 10, 0)
    after = stream(new, 400)
    (_, _, size) = (row.samples_per_epoch for row in mdata.preview_blend(new, sequence_length=S).rows)
    assert after.index(("c", sizes[0])) == c.again_at
    assert after.index(("d", size)) == d.again_at  # what the change adds is read twice too
    assert b.again_at is None
    late = change(old, 4 * sizes[0], remove=["b"])  # c has been read twice by then
    assert change_table(old, late, sequence_length=S, split="100,0,0", run=None)[0].again_at == 4 * sizes[0]
    assert change_table(old, new, sequence_length=S, split="100,0,0", run=c.again_at)[0].again_at is None


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ({"remove": ["a_text_document"]}, "no component is called a_text_document; there are a, b"),
        ({"shares": {"aa": "1"}}, "no component is called aa; did you mean a?"),
        ({"shares": {"a": "-1", "b": "x"}}, r"2 problems:\n.*share of a is '-1'.*\n.*share of b is 'x'"),
        ({"shares": {"a": "1"}, "remove": ["a"]}, "a is changed twice"),
        ({"add": [("1", "none")]}, "none: neither a manifest"),
        ({"add": [("1", ".")]}, "names 4 corpora"),
        ({"add": [("x", "c/c_text_document")]}, "share of c/c_text_document is 'x'"),
        ({"add": [("c/c_text_document", "0.3")]}, r"before its corpus; .*; did you mean 0\.3 c/c_text_document\?"),
        ({"add": [("5", path("b"))]}, r"--add b/.*: that corpus is in the blend already, as b\n(.|\n)*--set b=WEIGHT"),
        ({"add": [("1", path("c")), ("2", path("c"))]}, "is in the blend already, as c"),
        ({"replace": {"a": path("b")}}, "--replace b/.*: that corpus is in the blend already, as b"),
        ({"replace": {"a": path("c"), "b": path("c")}}, "in the blend already, as c"),
        ({"remove": ["b"], "add": [("5", path("b"))]}, "in the blend already, as b"),
        ({"replace": {"a": path("b")}, "remove": ["b"]}, "in the blend already, as b"),
        ({"add": [("-1", "none"), ("x", "none")]}, r"2 problems:\n.*is '-1'.*\n.*is 'x'"),
    ],
)
def test_edits_that_cannot_be(corpora, edits, text):
    with pytest.raises(UsageError, match=text):
        change(make(entry("a", weight=1), entry("b", weight=1)), 10, **edits)


def test_a_corpus_that_is_out_may_come_back(corpora):
    old = make(entry("a", weight=1), entry("b", weight=1))
    without = change(old, 10, remove=["b"])
    back = change_blend(without, 20, folder=corpora, sequence_length=S, edits=BlendEdits(add=[("1", path("b"))]))
    rest = assert_continues(without, back, 20, 40)
    assert sum(name == "b" for name, _ in rest) == 10


def test_samples_that_cannot_be(corpora):
    endless = make(entry("a", weight=1))
    for at in (0, -3):
        with pytest.raises(UsageError, match="a sample from 1 to its end"):
            change(endless, at, remove=["a"])
    ends = make(entry("a", weight=1), samples=50)
    with pytest.raises(UsageError, match="a sample from 1 to 49"):
        change(ends, 50, ["1", path("b")])
    for both in ({}, {"spec": ["1", path("b")], "edits": BlendEdits(remove=["a"])}):
        with pytest.raises(UsageError, match="a change is either a new blend or edits of the old one"):
            change_blend(endless, 5, folder=corpora, sequence_length=S, **both)


def test_removing_a_group_and_moving_named_sets(corpora):
    old = make({"path": "a", "weight": 1}, {"path": "[bc]", "weight": 3, "name": "bc"}, valid={"v": path("d")})
    new = change(old, 10, remove=["bc"])
    assert {name for name, _ in stream(new, 40)[10:]} == {"a"}
    assert new.valid_sets["v"][0].resolve() == (corpora / path("d")).resolve()
    assert all(not isinstance(phase.groups, dict) for phase in new.manifest.phases)
    again = msgspec.structs.replace(new.manifest, valid=msgspec.UNSET)
    assert blend_id(again) == new.manifest.id


WAYS = [
    ["1.5", "a", "3.5", "b"],
    ["1.50", "a", "35e-1", "b"],
    ["1.5000001", "a", "3.5000001", "b"],
    ["3/2", "a", "7/2", "b"],
    ["1.5000000000000001", "a", "3.4999999999999999", "b"],
]


def part_of(blend: OpenBlend, name: str) -> float:
    return blend.weights[blend.names.index(name)] / sum(blend.weights)


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_a_weight_of_an_edit_counts_beside_those_that_the_user_gave_however_they_are_spelt(corpora, words):
    old = mdata.make_blend([path(word) if word in "ab" else word for word in words], "old.json")
    new = change(old, 10, add=[("0.5", path("d"))])
    assert part_of(new, "d") == pytest.approx(0.5 / 5.5, rel=1e-6)
    again = change(new, 20, add=[("0.5", path("c"))])
    assert part_of(again, "c") == part_of(again, "d") == pytest.approx(0.5 / 6, rel=1e-6)


@pytest.mark.parametrize("tables", [{}, {"alpha": "0.5"}, {"alpha": "1"}, {"alpha": "0.123"}], ids=str)
def test_a_weight_of_an_edit_counts_beside_parts_of_one_where_the_user_gave_none(corpora, tables):
    old = make(entry("a"), entry("b"), **tables)
    for blend in (old, change(old, 5, remove=["b"])):
        new = change(blend, 10, add=[("0.5", path("d"))])
        assert part_of(new, "d") == pytest.approx(1 / 3, rel=1e-3)
        again = change(new, 20, add=[("0.5", path("c"))])
        assert part_of(again, "c") == part_of(again, "d") == pytest.approx(1 / 4, rel=1e-3)


def test_a_weight_of_an_edit_counts_beside_weights_that_equal_the_tokens(corpora):
    """1,000 and 500 are tokens of a and b, and here they are weights."""
    old = mdata.make_blend(["1000", path("a"), "500", path("b")], "old.json")
    assert part_of(change(old, 10, add=[("500", path("d"))]), "d") == 1 / 4


def test_members_of_groups_keep_the_weight_that_the_user_gave_the_group(corpora):
    groups = {"x": "6", "y": "4"}
    old = make(*(entry(name, group=group) for name, group in (("a", "x"), ("b", "x"), ("c", "y"))), group=groups)
    plain = change(old, 10, add=[("10", path("d"))])
    later = change(change(old, 10, remove=["b"]), 20, add=[("10", path("d"))])
    assert part_of(plain, "d") == 1 / 2
    assert part_of(later, "d") == pytest.approx(10 / 18)


@pytest.mark.parametrize(
    ("old", "part"),
    [(["1.5", "a", "3.5", "b"], 0.5 / 5.5), (["1.5000001", "a", "3.5000001", "b"], 0.5 / 5.5), (["a", "b"], 1 / 3),
     ({"component": [entry("a"), entry("b")], "alpha": "0.123"}, 1 / 3)],
)  # fmt: skip
@pytest.mark.parametrize("note", [{}, {"alpha": "no number"}, {"alpha": 3}, {"alpha": "1e999999999"}], ids=str)
def test_an_edit_of_an_older_manifest_counts_alike(corpora, old, part, note):
    """Older manifests do not say who set a share, and their notes may say anything."""
    spec = old if isinstance(old, dict) else [path(word) if word in "ab" else word for word in old]
    made = plan_blend(spec, corpora)
    parts = [msgspec.structs.replace(part, set_by=msgspec.UNSET) for part in made.manifest.components]
    notes = {**note, **made.manifest.notes}
    old_manifest = msgspec.structs.replace(made.manifest, components=parts, notes=notes)
    aged = OpenBlend(sealed(old_manifest), made.corpora, corpora)
    assert aged.manifest.id == made.manifest.id
    assert part_of(change(aged, 10, add=[("0.5", path("d"))]), "d") == pytest.approx(part, rel=1e-3)


WEIGHTS = ("1", "2", "0.5", "1/3", "7", "1e-9", "1e6")
KINDS = ({}, {}, {"kind": mdata.Packed()}, {"kind": mdata.Document()}, {"split_shares": "90,10,0"})


def random_share(random: Random, *, amounts: bool) -> object:
    """A weight, now and then 0 or next to 0, or an amount."""
    if amounts and random.random() < 0.3:
        unit = random.choice(("samples", "tokens", "epochs"))
        return {unit: random.choice({"samples": ("1", "30"), "tokens": ("7", "200")}.get(unit, ("1", "1/2", "1.5")))}
    return random.choice((*WEIGHTS, "0"))


def random_mixture(random: Random) -> dict[str, object]:
    """Any components, some of them twice, with groups, caps and phases; about half of them can be read."""
    names = random.sample("abcd", random.randint(1, 4))
    entries = [entry(name, weight=random.choice(WEIGHTS)) for name in names]
    tables: dict[str, object] = {"component": entries}
    if random.random() < 0.2:
        entries.append({**entries[0], "weight": random.choice(WEIGHTS)})
        tables["merge_same"] = True
    if random.random() < 0.2:
        entries[0]["max_epochs"] = random.choice(("1", "20"))
    if random.random() < 0.2:
        entries[0]["group"] = entries[-1]["group"] = "g"
        tables["group"] = {"g": random.choice(WEIGHTS)}
    amounts, phases = random.random() < 0.4, list[dict[str, object]]()
    for number in range(random.choice((0, 1, 2, 3))):
        used = random.sample(names, random.randint(1, len(names)))
        phase = {"shares": {name: random_share(random, amounts=amounts) for name in used}}
        phases.append({**phase, random.choice(("samples", "tokens")): random.randint(1, 200)})
        phases[-1]["ramp"] = number > 0 and random.random() < 0.3
    if phases and random.random() < 0.7:
        del phases[-1]["samples" if "samples" in phases[-1] else "tokens"]
    return {**tables, "phase": phases} if phases else tables


def random_edits(random: Random, names: tuple[str, ...]) -> BlendEdits:
    left = random.sample(names, len(names))
    return BlendEdits(
        shares={left.pop(): random.choice((*WEIGHTS, "0"))} if random.random() < 0.6 else {},
        remove=[left.pop()] if left and random.random() < 0.4 else [],
        replace={left.pop(): path(random.choice("abcd"))} if left and random.random() < 0.2 else {},
        add=[(random.choice(WEIGHTS), path(random.choice("abcd")))] if random.random() < 0.5 else [],
    )


def check_stream(data: mdata.Dataset, *, count: int = 160) -> list[tuple[str, int]]:
    """The (corpus, sample inside it) of the first samples, which count on one by one, are counted, and are found."""
    count = min(count, count if data.num_samples is None else data.num_samples)
    components, inside = data.locate(np.arange(count))
    seen = [0] * len(data.components)
    for k, (component, sample) in enumerate(zip(components.tolist(), inside.tolist(), strict=True)):
        assert (data.selection.counts(k), sample) == (tuple(seen), seen[component])
        seen[component] += 1
    assert data.selection.inverse(components, inside).tolist() == list(range(count))
    return [(data.components[c].name, i) for c, i in zip(components.tolist(), inside.tolist(), strict=True)]


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(25 * SOAK))
def test_a_random_mixture_is_made_or_refused_and_changes_keep_what_was_read(corpora, seed):
    """Written and read again it is the same; documents and samples lead to each other; later changes lose nothing."""
    random = Random(seed)
    options = mdata.DatasetOptions(sequence_length=S, **random.choice(KINDS))
    try:
        blend = mdata.make_blend(random_mixture(random), "mix.json")
        data = mdata.Dataset(blend, options)
    except UsageError:
        return
    assert mdata.open_blend("mix.json").manifest == blend.manifest
    at, read = 0, check_stream(data)
    for number in range(3):
        at += random.randint(1, 40)
        folder = corpora / random.choice((".", "a"))
        how = (
            {"spec": random_mixture(random)} if random.random() < 0.4 else {"edits": random_edits(random, blend.names)}
        )
        try:
            changed = change_blend(blend, at, folder=folder, sequence_length=S, **how)
            new = mdata.Dataset(changed, options)
        except UsageError:
            continue
        save_blend(changed, folder / f"{number}.json")
        blend = mdata.open_blend(folder / f"{number}.json")
        assert blend.manifest == changed.manifest
        after = check_stream(new)
        assert after[: min(at, len(read))] == read[:at]
        for k in [k for k, sample in enumerate(after) if sample in read][::20]:
            assert (new.read([k]).text == data.read([read.index(after[k])]).text).all()
        data, read = new, after
    if random.random() < 0.4:
        check_backward(Tracer(data), min(len(read), 50))
