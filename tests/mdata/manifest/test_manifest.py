"""Manifests: round trips, identity, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from mdata.errors import DamageError, UsageError
from mdata.manifest import io, types
from mdata.manifest.ids import blend_id, checksum, corpus_id, sealed
from mdata.manifest.io import load_manifest, parse_manifest, save_manifest
from mdata.util.canonical_json import canonical
from scripts.manifest_schema import schema_text
from tests.helpers.manifests import assert_valid, some_blend, some_corpus

HASH = "ab" * 32


@pytest.mark.parametrize("make", [some_corpus, some_blend])
def test_a_saved_manifest_loads_equal_and_fits_the_schema(tmp_path, make):
    saved = save_manifest(make(), tmp_path / "x.json")
    assert load_manifest(tmp_path / "x.json") == saved
    assert len(saved.id) == len(saved.checksum) == 64
    assert_valid(tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text()
    assert list(json.loads(text)) == sorted(json.loads(text))


@pytest.mark.parametrize("make", [some_corpus, some_blend])
def test_the_fast_way_takes_what_the_slow_one_takes_and_judges_nothing_else(tmp_path, make):
    notes = {"text": '\x00\x1f\x7f\u2028"\\/\b\f\n\r\t caf\u00e9 \U0001f600', "n": [2**63 - 1, -1, True, None, {}]}
    saved = save_manifest(msgspec.structs.replace(make(), notes=notes), tmp_path / "x.json")
    text = (tmp_path / "x.json").read_bytes()
    assert io._sound(text) == io._checked(text, "x") == saved
    for change in ((b'"n":', b'"m":'), (b"mdata-manifest", b"other"), (b'"version": 1', b'"version": 2'), (b"{", b"[")):
        altered = text.replace(*change, 1)
        assert altered != text and io._sound(altered) is None
    # A float has no one text, so it is refused even where the checksum would fit.
    value = json.loads(text)
    value["notes"] = {"x": 0.5}
    value["checksum"] = ""
    compact = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    value["checksum"] = blake3(compact).hexdigest()
    assert io._sound(json.dumps(value).encode()) is None


def test_schema_file_is_what_the_structs_give():
    assert (Path(types.__file__).parent / "schema.json").read_text() == schema_text()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int32"},
        {"level": "sentence"},
        {"tokenizer": None},
        {"shards": [msgspec.structs.replace(some_corpus().shards[0], idx_hash="12" * 32)]},
        {"shards": [msgspec.structs.replace(some_corpus().shards[0], blocks=None)]},
    ],
)
def test_corpus_id_covers_what_decides_the_tokens(change):
    assert corpus_id(msgspec.structs.replace(some_corpus(), **change)) != corpus_id(some_corpus())


@pytest.mark.parametrize(
    "change",
    [
        {"notes": {"made for": "a test"}},
        {"provenance": None},
        {"statistics": None},
        {"shards": [msgspec.structs.replace(some_corpus().shards[0], path="elsewhere/x")]},
    ],
)
def test_corpus_id_leaves_out_names_and_history(change):
    changed = msgspec.structs.replace(some_corpus(), **change)
    assert corpus_id(changed) == corpus_id(some_corpus())
    assert checksum(changed) != checksum(some_corpus())


def test_blend_id_is_that_of_the_mixture():
    blend = some_blend()

    def with_parts(**changes):
        parts = [msgspec.structs.replace(part, **changes) for part in blend.components]
        return blend_id(msgspec.structs.replace(blend, components=parts))

    assert with_parts(name="other", path="moved.json") == blend_id(blend)
    assert with_parts(share="0.5") != blend_id(blend)
    assert with_parts(id=HASH) != blend_id(blend)
    doubled = [msgspec.structs.replace(p, share=s) for p, s in zip(blend.components, ["7", "3"], strict=True)]
    assert blend_id(msgspec.structs.replace(blend, components=doubled)) == blend_id(blend)


def test_ids_do_not_change_between_versions_of_this_code():
    """If this fails, every id that users have stored is lost: raise the manifest's version instead."""
    assert sealed(some_corpus()).id == "62ea38b2a800c4a69787df9e5ca4286de802fe2f466f2101141f7840367fc4dc"
    assert sealed(some_blend()).id == "fb9375202d33775c7e0434604493f490e7aee15b74af1cf2d6d7941dd606ce5f"


def test_an_id_is_what_the_page_says():
    """docs/reference/formats.md, in three lines of plain JSON and BLAKE3."""
    corpus = sealed(some_corpus())
    shards = [[shard.idx_hash, shard.blocks.hash] for shard in corpus.shards]
    content = {"format": "mdata-manifest", "version": 1, "kind": "corpus", "dtype": "uint16", "level": "document"}
    content |= {"shards": shards, "tokenizer": corpus.tokenizer.fingerprint}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert corpus.id == blake3(text.encode()).hexdigest()


def broken(path: Path, change) -> Path:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.update(surprise=1), "Object contains unknown field `surprise`"),
        (lambda v: v["shards"][0].update(x=1), "Object contains unknown field `x` - at `$.shards[0]`"),
        (lambda v: v["shards"][0].update(tokens="9"), "Expected `int`, got `str` - at `$.shards[0].tokens`"),
        (lambda v: v["shards"][0].update(tokens=-9), "`$.shards[0].tokens`"),
        (lambda v: v["shards"][0].update(path="/abs"), "`$.shards[0].path`"),
        (lambda v: v.pop("dtype"), "Object missing required field `dtype`"),
        (lambda v: v.update(kind="other"), "`$.kind`"),
        (lambda v: v["shards"][0].update(tokens=10), "not what was written, at `$.checksum`"),
        (lambda v: v["notes"].update(a=1), "not what was written, at `$.checksum`"),
        (lambda v: v["notes"].update(a=1.5), "a float at $.notes.a"),
        (lambda v: v.update({"\ud800": 1}), "surrogates not allowed"),
        (lambda v: v["shards"][0].update({"\ud800": 1}), "surrogates not allowed"),
        (lambda v: v.update(kind="\ud800"), "surrogates not allowed"),
        (lambda v: v["shards"][0].update(path="\ud800"), "surrogates not allowed"),
        (lambda v: v["notes"].update(a="\ud800"), "surrogates not allowed"),
    ],
)
def test_altered_manifest_is_damage_with_its_place(tmp_path, change, text):
    save_manifest(some_corpus(), tmp_path / "x.json")
    with pytest.raises(DamageError) as caught:
        load_manifest(broken(tmp_path / "x.json", change))
    assert text in str(caught.value) and str(tmp_path / "x.json") in str(caught.value)


def test_nesting_that_python_does_not_read_is_damage(tmp_path):
    """Python 3.11 reads some hundreds of levels, 3.13 some thousands."""
    save_manifest(some_corpus(), path := tmp_path / "x.json")
    deep = '"notes": {"a": ' + "[" * 100_000 + "]" * 100_000 + ", "
    path.write_text(text := path.read_text().replace('"notes": {', deep))
    assert deep in text
    with pytest.raises(DamageError, match=r"(?s)x\.json.*recursion"):
        load_manifest(path)


def test_a_false_id_under_a_true_checksum_is_damage(tmp_path):
    false = msgspec.structs.replace(sealed(some_corpus()), id=HASH)
    false = msgspec.structs.replace(false, checksum=checksum(false))
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(false))
    with pytest.raises(DamageError, match=r"at `\$\.id`"):
        load_manifest(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (b"", UsageError, "is not a manifest"),
        (b"MMIDIDX\0\0", UsageError, "is not a manifest"),
        (b"[1]", UsageError, "is not a manifest"),
        (b'{"a": 1}', UsageError, 'expected: format "mdata-manifest"'),
        (b'{"format": "mdata-manifest", "version": 2}', UsageError, "found: version 2"),
        (b'{"format": "mdata-mani', DamageError, "truncated, or not JSON"),
        (b'{"a": ' + b"[" * 100000, DamageError, "truncated, or not JSON"),
        (b'{"a": "\xff"}', DamageError, "truncated, or not JSON"),
    ],
)
def test_what_is_no_manifest(text, kind, words):
    with pytest.raises(kind) as caught:
        parse_manifest(text, "x.json")
    assert words in str(caught.value)


def test_missing_file_is_usage(tmp_path):
    with pytest.raises(UsageError, match=r"reading a manifest: .*none\.json: No such file"):
        load_manifest(tmp_path / "none.json")


def test_white_space_and_key_order_are_free(tmp_path):
    saved = save_manifest(some_corpus(), tmp_path / "x.json")
    value = json.loads((tmp_path / "x.json").read_text())
    shuffled = json.dumps(dict(reversed(value.items())))
    assert parse_manifest(shuffled.encode(), "x") == saved


def test_canonical_json_sorts_keys_and_refuses_floats():
    assert canonical({"b": [1, None], "a": "\u00e9"}) == '{"a":"\u00e9","b":[1,null]}'.encode()
    with pytest.raises(TypeError, match=r"a float at \$\.a\[1\]"):
        canonical({"a": [1, 2.0]})
