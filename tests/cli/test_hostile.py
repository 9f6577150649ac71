"""No input gives exit code 1 (a bug): altered files, hostile words, deep nesting, huge numbers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cli import mdata as mdata_command
from cli import mtrain as mtrain_command
from mdata.manifest import ids
from mdata.manifest.types import Manifest
from tests.helpers.examples import examples
from tests.helpers.failing_calls import commands, make_world

DEEP = 30_000
LONG = "9" * 5000  # more digits than Python reads
NUMBERS = (0, -1, 1, 7, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**30, 1e308, 0.5)
TEXTS = ("", "a\0b", "\ud800", "x" * 5000, "x/" * 3000, "--", "[", "{", "\n", "1/0", "1e999", "nan", "-inf", "-1", "0")
TEXTS += (LONG, str(1 << 63), "0x10", "1_0", "\u0663", "$\\frac{1}{$", "<b>&", "\x1b[31m", ":", "a:b:c", "0:0", "%s")
LEAVES = (*NUMBERS, *TEXTS, None, True, [], {}, [[]], {"": None})
KNOWN = (0, 2, 3, 4, 5)
READING = ("--sequence-length", "16")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Corpora, a blend, inputs, a run's TOML (tests/helpers/failing_calls.py)."""
    folder = tmp_path_factory.mktemp("hostile") / "world"
    make_world(folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What a hostile word names lies in a folder of its own; nothing comes from stdin."""
    monkeypatch.chdir(tmp_path)
    before = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    yield
    os.dup2(before, 0)
    os.close(before)
    os.close(nothing)


def run(words: list[str]) -> int:
    program = mtrain_command if words[0] == "check" else mdata_command
    return program.main(words)


def readers(manifest: str, out: Path) -> Iterator[list[str]]:
    """Commands that read a manifest."""
    cache = ["--cache", str(out / "cache")]
    yield ["inspect", manifest]
    yield ["verify", manifest]
    yield ["cat", manifest, "--documents", "0:2"]
    yield ["cat", manifest, "--origin", "web.jsonl:3"]
    yield ["blend", "1", manifest, "-o", str(out / "made.json")]
    yield ["trace", manifest, *READING, "--sample", "3", "--text"]
    yield ["trace", manifest, *READING, "--sample", "3", "--option", "shuffle_block=4"]
    yield ["trace", manifest, *READING, "--document", "1"]
    yield ["build", manifest, *READING, "--kind", "packed", *cache]
    yield ["build", manifest, *READING, "--order", "megatron", "--train-samples", "20", *cache]
    yield ["report", manifest, "-o", str(out / "page.html")]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def altered(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with something else in one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = altered(value[path[0]], path[1:], new)
    return copy


def sealed(value: Any) -> bytes:
    """The manifest's text, with a checksum and an id that fit where it can have them: altered by who knows how."""
    try:
        return ids.text_of(ids.sealed(msgspec.convert(value, Manifest)))
    except (TypeError, ValueError, OverflowError):
        return json.dumps(value).encode()


@pytest.mark.parametrize("name", ["web_text_document.json", "mix.json"])
@examples(15)
@given(data=st.data())
def test_altered_manifests(world, name, data):
    value = json.loads((world / name).read_bytes())
    path = data.draw(st.sampled_from(list(places(value))[1:]))
    path_and_leaf = path, data.draw(st.sampled_from(LEAVES))
    manifest = world / "altered.json"
    manifest.write_bytes(sealed(altered(value, *path_and_leaf)))
    words = data.draw(st.sampled_from(list(readers(str(manifest), world / "out"))))
    assert run(words) in KNOWN


def test_a_token_id_beyond_64_bits_is_refused(world):
    value = json.loads((world / "web_text_document.json").read_bytes())
    value["tokenizer"]["eod"] = 1 << 63
    (world / "altered.json").write_bytes(sealed(value))
    assert run(["trace", str(world / "altered.json"), *READING, "--sample", "0"]) == 4


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("option", ["shuffle_block=1", "shuffle_block=7", "shuffle_block=100", "document_masks=true"])
def test_a_manifest_that_is_wrong_about_the_order_of_sequences(world, contiguous, option):
    """Pointers that run backwards, an index whose hash fits, and a manifest that calls them contiguous, or not."""
    index = bytearray((world / "bare.idx").read_bytes())
    count = struct.unpack_from("<Q", index, 18)[0]
    at = 34 + 4 * count
    pointers = [index[at + 8 * i : at + 8 * (i + 1)] for i in range(count)]
    index[at : at + 8 * count] = b"".join(reversed(pointers))
    (world / "back.idx").write_bytes(index)
    (world / "back.bin").write_bytes((world / "bare.bin").read_bytes())
    value = json.loads((world / "web_text_document.json").read_bytes())
    shard = {**value["shards"][0], "path": "back", "contiguous": contiguous, "idx_hash": blake3(index).hexdigest()}
    (world / "altered.json").write_bytes(sealed({**value, "shards": [shard]}))
    codes = [
        run(["trace", str(world / "altered.json"), *READING, what, number, "--option", option, "--text"])
        for what, number in (("--sample", "0"), ("--sample", "50"), ("--document", "3"))
    ]
    assert set(codes) <= {0, 2, 4}
    if option != "document_masks=true":
        assert set(codes) == ({4} if contiguous else {2})


@pytest.mark.parametrize("inputs", [[], None])
def test_origins_that_name_no_input(world, inputs, capsys):
    value = json.loads((world / "web_text_document.json").read_bytes())
    provenance = {**value["provenance"], "inputs": inputs} if inputs is not None else value["provenance"]
    (world / "altered.json").write_bytes(sealed({**value, "provenance": provenance}))
    if inputs is None:
        origins = bytearray((world / "web_text_document.origins").read_bytes())
        origins[24 + 8 : 24 + 16] = (7).to_bytes(8, "little")
        (world / "web_text_document.origins").write_bytes(origins)
    for words in (["cat", "--documents", "0:2"], ["trace", *READING, "--sample", "3"]):
        assert run([words[0], str(world / "altered.json"), *words[1:]]) == 4
        assert "comes from input" in capsys.readouterr().err


TOMLS = {
    "nested": "a = " + "[" * DEEP + "]" * DEEP,
    "inline": "a = " + "{a=" * 2000 + "1" + "}" * 2000,
    "dotted": "a" + ".a" * 500 + " = 1",
    "digits": f"a = {LONG}",
    "65 bits": f"a = {1 << 64}",
    "NUL": '[[component]]\npath = "a\\u0000b"\nweight = 1\n',
    "weight": f'[[component]]\npath = "x"\nweight = {LONG}\n',
}


@pytest.mark.parametrize("name", TOMLS)
def test_nested_and_huge_toml(world, tmp_path, capsys, name):
    (tmp_path / "x.toml").write_text(TOMLS[name])
    assert run(["blend", "x.toml", "-o", "made.json"]) == 2
    assert run(["check", "x.toml"]) == 2
    assert name == "NUL" or "x.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * DEEP + "]" * DEEP, LONG, f'{{"train": {LONG}}}', '{"train": ' + "[" * 70 + "]" * 70]
)
def test_nested_and_huge_json(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert run(["blend", "--per-split-data-args-path", "x.json", "-o", "made.json"]) == 2
    for words in readers(str(tmp_path / "x.json"), tmp_path):
        assert run(words) in (2, 4)


TEMPLATES = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if true %}" * 500 + "{{ messages }}" + "{% endif %}" * 500,
    "digits": f"{{{{ {LONG} }}}}{{{{ messages }}}}",
    "for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{{ messages }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_nested_and_huge_templates(world, tmp_path, name):
    (tmp_path / "template").write_text(TEMPLATES[name])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    words = ["preprocess", "--chat", "--input", "chats.jsonl", "--output-prefix", "o", "--chat-template", "template"]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(world / "tokenizer")]
    assert run([*words, *tokenizer, "--workers", "1"]) == (3 if name == "for ever" else 2)


# A search through all of a file system, or 2^63 parts of a corpus, are the user's word.
NOT_TRIED = {
    "report": "its words are drawn",
    "mtrain check": "tests/trainer/config/test_config.py",
    "train-tokenizer": "slow",
}


@examples(60)
@given(data=st.data())
def test_hostile_words(world, data):
    known = {name: words for name, words in commands(world).items() if name not in NOT_TRIED}
    words = list(known[data.draw(st.sampled_from(sorted(known)))])
    place = data.draw(st.integers(1, len(words) - 1))
    words[place] = data.draw(st.sampled_from(TEXTS))
    assert run(words) in KNOWN


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, "x/" * 3000, "loop"])
def test_paths_that_no_system_takes(world, tmp_path, path):
    (tmp_path / "loop").symlink_to("loop")
    corpus, tokenizer = str(world / "web_text_document.json"), ["--tokenizer-type", "ByteTokenizer"]
    text = str(world / "web.jsonl")
    for words in (
        *readers(path, tmp_path),
        ["adopt", path],
        ["blend", "1", corpus, "-o", path],
        ["report", corpus, "-o", path],
        ["build", corpus, *READING, "--order", "megatron", "--train-samples", "20", "--cache", path],
        ["preprocess", "--input", path, "--output-prefix", "o", *tokenizer],
        ["preprocess", "--input", text, "--output-prefix", f"{path}/o", *tokenizer, "--workers", "1"],
        ["preprocess", "--input", text, "--output-prefix", "o", *tokenizer, "--on-error", "quarantine", path],
        ["preprocess", "--input", text, "--output-prefix", "o", *tokenizer, "--split-sentences", "--nltk-data", path],
        ["preprocess", "--input", text, "--output-prefix", "o", *HUGGING_FACE, "--tokenizer-model", path],
        ["preprocess", "--input", text, "--output-prefix", "o", *GPT2, "--vocab-file", path, "--merge-file", path],
        ["train-tokenizer", "--input", path, "--output", "t", "--vocab-size", "300"],
        ["check", path],
    ):
        assert run(words) == 2 or (path == "\ud800" and "o" in words[-1]), words[:4]


HUGGING_FACE = ("--tokenizer-type", "HuggingFaceTokenizer")
GPT2 = ("--tokenizer-type", "GPT2BPETokenizer")
