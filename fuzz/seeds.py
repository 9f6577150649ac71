"""Make the first inputs of each corpus anew: `python fuzz/seeds.py`. They only give the fuzzers a place to start.

Every input here is written out or packed by this file. What fuzzing adds later (`run.py --keep`) lies beside them under
its hash.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zstandard

CORPUS = Path(__file__).resolve().parent / "corpus"
sys.path.insert(0, str(CORPUS.parents[1]))
LINES = (  # each element is one chunk of several lines
    b'{"text": "a", "b": ["x", "y"], "meta": {"text": "z"}}\n{"text": []}\r\n\n'
    b'{"text": "\\ud83d\\ude00"}\r{"text": "b"}',
    b'{"text": NaN}\n{"text": "\\ud800"}\n{"text": "\xff"}\n[1e999]\n'
    b'{"meta.text": "q", "text": 1, "b": "r"}\n{"b": [null]}',
    b'\xef\xbb\xbf{"text": "a"}\n{"text": "a\x01"}\n' + b'{"x": ' + b"[" * 30 + b"]" * 30 + b', "text": "deep"}\n',
    b'{"text": "' + b"long " * 12 + b'"}\n{"Text": "a"} {}\n' + b"1" * 50 + b"\n" + b'"\xe2\x80\xa8"',
)
TEXT = b"\xef\xbb\xbffirst\nline\n\n\r\n\rsecond \xc3\xa9\r\nline\r\n\r\n third\x0c\n \nstill third"


def index(lengths: Sequence[int], pointers: Sequence[int], boundaries: Sequence[int], *, code: int = 8) -> bytes:
    """An .idx of these tables."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(boundaries))
    numbers = [*lengths, *pointers, *boundaries]
    return header + struct.pack(f"<{len(lengths)}i{len(pointers) + len(boundaries)}q", *numbers)


def index_reader() -> dict[str, bytes]:
    """Sound pairs of several kinds, and some that are not; raw ones begin with 0 and the size of .bin."""
    pairs = {
        "empty": (index([], [], [0]), 0),
        "two": (index([3, 2], [0, 6], [0, 1, 2]), 10),
        "no-sequence": (index([], [], [0, 0, 0]), 0),
        "moved": (index([3, 0, 2], [4, 4, 0], [0, 3]), 10),
        "int32": (index([1, 2], [0, 4], [0, 2], code=4), 12),
        "float": (index([5], [0], [0, 1], code=7), 20),
        "overlap": (index([3, 3], [0, 4], [0, 2]), 12),
        "modes": (index([3, 2], [0, 6], [0, 2]) + b"\0\0", 10),
        "older": (b"TNTIDX\0\0" + bytes(40), 4),
        "short": (index([], [], [0])[:30], 0),
    }
    seeds = {name: b"\0" + struct.pack("<H", size) + idx for name, (idx, size) in pairs.items()}
    built = {"built": b"\1\x08\2\3\3\2\0\6\0\1\2\x0a\0", "built-wide": b"\1\x08\1\2\xfe\0\0\xff\1\2\0\1\4\0"}
    return seeds | built


def old_index(lengths: Sequence[int], boundaries: Sequence[int] = (), *, code: int = 8, unit: int = 2) -> bytes:
    """A TNTIDX .idx; without boundaries fairseq's."""
    num = len(lengths)
    ratio = 2 if code == 6 else 1
    table = [*range(num + 1), *(ratio * sum(lengths[:count]) for count in range(num + 1)), *lengths, *boundaries]
    counts = [num, num, *([len(boundaries)] if boundaries else [])]
    head = struct.pack(f"<8s{3 + len(counts)}Q", b"TNTIDX\0\0", 1, code, unit, *counts)
    return head + struct.pack(f"<{len(table)}q", *table)


def legacy_reader() -> dict[str, bytes]:
    """Sound pairs of the three layouts, a merged one, and some that are not sound; as for the index reader."""
    pairs = {
        "megatron": (old_index([3, 2], [0, 1, 1, 2]), 10),
        "merged": (old_index([3, 2], [0]), 10),
        "float": (old_index([3, 2], [0, 2], code=6, unit=4), 40),
        "empty": (old_index([], [0]), 0),
        "fairseq": (old_index([3, 2]), 10),
        "fairseq-mmap": (index([3, 2], [0, 6], [])[:26] + index([3, 2], [0, 6], [])[34:], 10),
        "short": (old_index([3, 2], [0, 2])[:-8], 10),
        "header": (old_index([])[:40], 0),
        "mmididx": (index([3, 2], [0, 6], [0, 1, 2]), 10),
    }
    seeds = {name: b"\0" + struct.pack("<H", size) + idx for name, (idx, size) in pairs.items()}
    built = {f"built-{kind}": bytes([1, kind, 8, 2, 3, 3, 2, 0, 1, 2, 5, 10, 0]) for kind in range(6)}
    return seeds | built


def record_lines() -> dict[str, bytes]:
    """Lines good and bad under each choice of keys and limits, and plain text."""
    seeds = {
        f"lines-{number}-{choice}": bytes([choice]) + lines
        for number, lines in enumerate(LINES)
        for choice in (0, 1, 4, 12)
    }
    return seeds | {f"text-{choice}": bytes([choice]) + TEXT for choice in (2, 3, 6, 7)}


def gzip_without_time(data: bytes) -> bytes:
    """The same bytes every day."""
    return gzip.compress(data, mtime=0)


def packed_text() -> dict[str, bytes]:
    """Files of each packing, whole, of two members, cut and with a tail; and texts to be packed."""
    zstd = zstandard.ZstdCompressor(write_checksum=True).compress
    packers = {"gzip": gzip_without_time, "zstd": zstd, "bzip2": bz2.compress, "xz": lzma.compress}
    seeds: dict[str, bytes] = {}
    for name, pack in packers.items():
        good = pack(LINES[0])
        whole = {
            "whole": good,
            "two": good + pack(b""),
            "cut": good[:-5],
            "tail": good + b"tail",
            "zeros": good + bytes(9),
        }
        seeds |= {f"{name}-{kind}": b"\1" + data for kind, data in whole.items()}
    seeds["zstd-skippable"] = b"\1\x5a\x2a\x4d\x18\3\0\0\0abc" + zstd(LINES[0])
    seeds["plain"] = b"\1" + LINES[1]
    for choice in (0, 2, 4, 6, 8, 0x30, 0x1A, 0x24):
        seeds[f"friendly-{choice:02x}"] = bytes([choice, 20, 6]) + (TEXT if choice & 8 else LINES[0])
    return seeds


def gather() -> dict[str, bytes]:
    """Two shards, two rows of three runs, then two sound tables and a request of each kind, then a row to finish."""
    rows = b"\2" + b"\x28" + b"\x1e" + b"\x14" + b"\3" + b"\3\0\x20\5" + b"\3\5\x0c\0" + b"\2\2\3" + b"\2\1\0"
    tables = b"\2\1" + b"\1\3\4\5\6" + b"\1\2\0\7"
    requests = b"\2\0\5" + b"\2\x0f\x0c" + b"\3\0\2\1" + b"\4\0\1\2\2" + b"\1" + b"\2\0\3"
    finished = b"\6\1\2\3\0\1\2\0" + b"\2\1\4" + b"\1\1\x0f\2\1" + b"\5"
    return {"empty": b"", "sound": rows + tables + requests + finished}


def native_rows() -> dict[str, bytes]:
    """A sound index of six sequences, read with and without it, permuted blocks and rules; and one of any content."""
    tables = b"\1\6" + b"\5\x0b\0\7\x0f\4"
    any_tables = b"\0\2" + b"\5\0\0" + b"\4\5\1" + b"\x09"
    seeds = {"empty": b""}
    for flags in (0, 1, 2, 3):
        for rules in (0, 0x60, 0x67, 0x7F):
            asked = bytes([flags, 4, 7, 0, 6, 2]) + b"\3\x0a\x0c\x0b" + b"\x0a\3\7" + b"\5\6" + bytes([rules, 3, 5])
            seeds[f"sound-{flags}-{rules}"] = tables + asked
            seeds[f"any-{flags}-{rules}"] = any_tables + b"\x2a" + asked
    return seeds


def fim() -> dict[str, bytes]:
    """Three documents at several rates, with and without fragments and a beginning that stays as it is."""
    text = bytes([1, 2, 3, 0, 4, 5, 15, 6, 7, 15, 15, 8, 0, 0, 9, 10, 11])
    row = bytes([40, 30, len(text)]) + text
    seeds = {"empty": b""}
    for kind in (b"\1\0\0", b"\1\0\1\x0f", b"\0\1\2\3\0\0", b"\0\1\1\3\1\1\x0f"):
        for rates in (b"\0\0\0", b"\x64\x64\x64", b"\xc8\xc8\xc8", b"\xfa\xff\x7f\xf8" + bytes(6)):
            for untouched in (b"\0", b"\1\1"):
                seeds[f"rule-{kind.hex()}-{rates.hex()}-{len(untouched)}"] = (
                    kind + untouched + rates + b"\5\7\1" + row * 2
                )
    return seeds


def megatron_order() -> dict[str, bytes]:
    """Documents with and without tokens in each type of numbers, a sequence length of 1, and the largest lengths."""
    order = b"\x08" + bytes([0, 3, 1, 2, 4, 4, 0, 1])
    small, large = b"\5" + bytes([3, 0, 7, 1, 4]), b"\5" + (b"\xfd" + bytes(4) + b"\x7f\xff\xff\xff") * 3 + b"\0\2"
    seeds = {"empty": b""}
    for kind in range(6):
        for q in (b"\1", b"\4", b"\xfd\x1f" + b"\xff" * 7):
            seeds[f"small-{kind}-{len(q)}-{q[0]}"] = bytes([kind]) + small + order + q + bytes([kind & 1, 20, 1, 2])
        seeds[f"large-{kind}"] = bytes([kind]) + large + order + b"\xfd" + bytes(4) + b"\x40\0\0\0" + b"\1\x1e\1\3"
    return seeds


def masked() -> dict[str, bytes]:
    """Sentences to be mapped, lengths to be packed, and rows for samples under several rules, forms and generators."""
    largest = b"\xfd\x7f" + b"\xff" * 7
    sizes = b"\x09" + b"\x05\x03\x08\x04\x06\x02\x07\x05\x01"
    mapped = sizes + b"\1" + b"\4\0\3\5\x09" + b"\x06\3\1" + b"\1\2\3\4" + b"\5\x20"
    packed = b"\x0a" + b"\x03\x20\x07\0\x10\x0b\x01\x05\x05\x0f" + b"\x10\1\2\7"
    tokens = bytes(7 + number * 5 % 50 for number in range(41))
    rows = b"\1" + sizes + tokens + b"\3\2\5\x09" + b"\1\2\3" + b"\x08\x0a\x06"
    ids = b"\2\3\4" + b"\5\x0a\x0b\x0c\x0d\x0e" + b"\x1e" + b"\0\0\1\0\0\1" * 5
    seeds = {
        "empty": b"",
        "mapped": b"\0" + mapped,
        "mapped-large": b"\0" + b"\2" + largest * 2 + b"\1\2\0\2" + largest * 8,
        "mapped-outside": b"\0" + sizes + b"\0" + b"\3\0\x0b" + largest,
        "packed": b"\1" + packed,
        "packed-negative": b"\1\2\3\xfd" + b"\xff" * 8 + b"\x10\0\1\7",
        "packed-overlap": b"\1\4\xc8\x63\x0b\x09\x0a\6\5\0",
    }
    for flags in range(8):
        form = bytes([flags]) + b"\0\x0b\x10\x0c\x05\x06" + b"\3\x3c\x3d\x3e"
        for kind in (0, 1, 2, 4, 8):
            seeds[f"samples-{flags}-{kind}"] = b"\2" + rows + form + ids + bytes([40 + 20 * flags, 0, 0, 2, kind])
    form = b"\0\0\x77\x77\x30\5\6" + b"\3\x3c\x3d\x3e" + ids + bytes([40, 0, 0, 2, 0])
    for kind, more in (("short", b"\0" + tokens[:40]), ("fit", b"\1" + tokens), ("long", b"\2" + tokens + b"\x09")):
        seeds[f"samples-{kind}"] = b"\2\0" + sizes + more + b"\1\x09" + b"\1\1\5\x64" + form
    return seeds | {"samples-unfit": b"\2\0" + rows[1:] + b"\0" * 40}


def parquet_rows() -> dict[str, bytes]:
    """The sound files under each choice of keys, some patches near the footer, and bytes that are no footer."""
    seeds = {f"sound-{choice:02x}": bytes([choice]) for choice in (1, 3, 5, 7, 0x09, 0x13, 0x1D, 0x23)}
    for number in range(4):
        for place in (4, 8, 40, 90, 300, 700):
            seeds[f"patched-{number}-{place}"] = bytes([1 | number << 1]) + place.to_bytes(3, "little") + b"\x7f"
    return seeds | {"raw": b"\0footer\x06\0\0\0", "raw-long": b"\0\xff\xff\xff\x7f", "raw-empty": b"\0"}


def arrow_rows() -> dict[str, bytes]:
    """The sound files under each choice of keys, patches of metadata and offsets, and bytes that are no message."""
    seeds = {f"sound-{choice:02x}": bytes([choice]) for choice in (1, 3, 5, 7, 0x09, 0x13, 0x1D, 0x23, 0x41)}
    for number in range(4):
        for place in (4, 40, 300, 700, 1000, 1200, 1500):
            seeds[f"patched-{number}-{place}"] = bytes([1 | number << 1]) + place.to_bytes(3, "little") + b"\x7f"
    return seeds | {"raw": b"\0\x10\0\0\0schema", "raw-file": b"\2ARROW1", "raw-empty": b"\0"}


def warc_records() -> dict[str, bytes]:
    """Records of every kind, line ends of both, folded lines, wrong sizes, and a block that looks like a record."""
    head = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain; charset=x\r\nContent-Length: %d\r\n\r\n"
    one, nested = head % 3 + b"one\r\n\r\n", head % 60 + (head % 3)[:60] + b"\r\n\r\n"
    other = one.replace(b"conversion", b"response")
    folded = one.replace(b"text/plain;", b"text/plain;\r\n\t")
    texts = {
        "one": one, "two": one + other, "unix": (one + one).replace(b"\r\n", b"\n"), "folded": folded + one,
        "nested": nested + one, "bytes": head % 2 + b"\xff\xfe\r\n\r\n", "cut": one[:-6], "junk": one + b"junk",
        "large": head % 10**15 + b"x", "none": b"\r\n", "empty": head % 0 + b"\r\n\r\n" + one,
    }  # fmt: skip
    return {f"{name}-{choice:02x}": bytes([choice]) + text for name, text in texts.items() for choice in (0x18, 0x0B)}


def other_rows() -> dict[str, bytes]:
    """Quotes in every place, archives of several members, pages of a dump, and each of these cut."""
    tables = {
        "plain": b"text,n\na,1\nb,2\n",
        "quoted": b'n,text\r\n1,"a ""b"" , c\n d"\r\n2,"e"\r\n',
        "open": b'text\n"a\nb\n',
        "inside": b'text,n\na"b,1\n\n"c" d,2\n,\n',
        "fields": b"text,n\n1\n1,2,3\n\xff,1\n",
    }
    seeds = {name: b"\x3c" + data for name, data in tables.items()}
    seeds |= {f"{name}-tabs": b"\x35" + data.replace(b",", b"\t") for name, data in tables.items()}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("a.jsonl", b'{"text": "a"}\n\n'), ("b.json", b'{"n":\n1}'), ("b.txt", b"b\xc3\xa9")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    page = b"<page><title>A</title><ns>0</ns><revision><text>a &lt; b</text></revision></page>\n"
    dump = b'<mediawiki xml:lang="de"><siteinfo/>\n' + page + b"<page>b</page>\n" + page + b"</mediawiki>\n"
    for kind, data in ((b"\x3e", made.getvalue()[:4096]), (b"\x3b", dump), (b"\x1f", dump)):
        seeds |= {f"{kind.hex()}-{cut}": kind + data[: len(data) - cut] for cut in (0, 1, 40, 700)}
    return seeds


def index_blocks() -> dict[str, bytes]:
    """Tables that agree, tables that do not, and numbers at the ends of their range."""
    largest = b"\xfd\x7f" + b"\xff" * 7
    return {
        "sound": b"\1\x0a\0\2\1\3\2\1\2\3\0\1\2\1",
        "own-pointers": b"\1\x0a\0\2\0\3\0\2\6\1\2\3\0\1\2\1",
        "large": b"\3" + largest + b"\0\2\1" + largest + b"\1\1\2\2\0\1\1",
        "negative": b"\0\x0a\0\1\0\xff" + b"\xff" * 8 + b"\0\0\1\1\0\0",
        "empty": b"",
    }


def manifest() -> dict[str, bytes]:
    """Sound ones as text, and fields that are put over those of a corpus (1) or of a blend (2)."""
    from fuzz.manifest import BLEND, CORPUS, built

    deep = b'{"notes": {"x": ' + b"[" * 600 + b"]" * 600 + b"}}"
    fields = {
        "same": b"{}",
        "notes": b'{"notes": {"x": ["a", 1, null, true]}}',
        "float": b'{"notes": {"x": 1.5}}',
        "deep": deep,
        "large": b'{"notes": {"x": ' + b"9" * 400 + b"}}",
        "surrogate": b'{"notes": {"\\ud800": "\\udfff"}}',
        "shards": b'{"shards": []}',
        "shares": b'{"components": [{"path": "a", "id": "' + b"0" * 64 + b'", "name": "a", "share": "0", "group": null,'
        b' "cap": "1/0"}]}',
        "phases": b'{"phases": [{"samples": 9, "shares": ["1e99", "2/0"], "ramp": true}, '
        b'{"samples": null, "shares": []}]}',
        "negative": b'{"version": true, "shards": [{"tokens": -1}]}',
        "no-object": b"[]",
    }
    texts = {"corpus": built(CORPUS, b"{}"), "blend": built(BLEND, b"{}")}
    more = {
        "altered": texts["corpus"].replace(b'"tokens": 9', b'"tokens": 8'),
        "cut": texts["blend"][:-30],
        "other": b'{"format": "x"}',
        "later": b'{"format": "mdata-manifest", "version": 2}',
        "none": b"",
        "bytes": b'{"\xff": 1}',
        "arrays": b'{"x": ' + b"[" * 2000,
    }
    raw = {name: b"\0" + text for name, text in (texts | more).items()}
    return raw | {f"{name}-{kind}": bytes([kind]) + text for name, text in fields.items() for kind in (1, 2)}


def origins() -> dict[str, bytes]:
    """Files with and without runs, and numbers from which runs are made."""
    head = b"\0MDORIGIN" + struct.pack("<2q", 1, 1)
    runs = struct.pack("<6q", 0, 0, 1, 5, 1, 3)
    return {
        "none": head,
        "runs": head + runs,
        "cut": head + runs[:-3],
        "fall": head + runs[24:] + runs[:24],
        "later": head.replace(b"\1", b"\2", 1) + runs,
        "short": b"\0MDORIGIN",
        "built": b"\1\2" + bytes([0, 0, 1, 3, 0, 9, 4, 1, 1]),
        "far": b"\1\1" + bytes([0, 0, 254, 0, 0, 255, 0, 1, 254, 0, 1, 200, 0, 7]),
    }


def journal() -> dict[str, bytes]:
    """Journals with whole and cut lines; lines of JSON that get their hashes."""
    from fuzz.journal import hashed

    lines = b'{"job":{"outputs":["x"]},"kind":"job"}\n{"kind":"state","rows":3,"sinks":{}}'
    return {
        "whole": b"\0" + hashed(lines),
        "cut": b"\0" + hashed(lines)[:-9],
        "altered": b"\0" + hashed(lines).replace(b"rows", b"cows"),
        "hashed": b"\1" + lines,
        "no-json": b"\1" + lines + b"\n{\n" + lines,
        "no-object": b"\1[1]\n3\nnull",
        "no-kind": b'\1{"a":1}\n{"kind":3}',
        "deep": b"\1" + b"[" * 5000 + b"]" * 5000,
        "large": b'\1{"kind":"state","rows":' + b"9" * 5000 + b"}",
        "bytes": b'\1{"kind":"\xff"}',
        "returns": b'\1{"kind":"a"}\r{"kind":"b"}',
        "none": b"\0",
    }


def run_toml() -> dict[str, bytes]:
    """Whole files, parts behind a whole one, and overrides."""
    from fuzz.run_toml import WHOLE

    texts = {
        "mesh": b"[mesh]\ntp = 2\n",
        "unknown": b"[mush]\ntp = 2\n[precision]\ndtype = 'fp8'\n",
        "twice": b"[run]\nseed = 2\n",
        "inline": b"mesh = {tp = 1, sequence_parallel = true}\n",
        "dates": b"[checkpoint]\ninterval = 2020-01-01\nkeep = [nan, inf, -0.0]\n",
        "deep": b"[mesh]\ntp = " + b"[" * 3000 + b"]" * 3000,
        "dotted": b"[mesh]\n" + b"a." * 2000 + b"b = 1\n",
        "large": b"[mesh]\ntp = " + b"9" * 5000 + b"\n",
        "hexadecimal": b"[mesh]\ntp = 0x" + b"f" * 5000 + b"\n",
        "bytes": b"[mesh]\n\xff = 1\n",
        "overrides": b"\0run.seed=5\ndata.valid=['a', 'b']\nrun.folder=3\nmodel.vocab_size = 9\n",
        "wrong": b"\0run.seed\nmodel=1\nmodel.num_layers=-1\n.=\nrun.folder=\xff\ntrain.steps=1e400",
        "far": b"\0train.steps=" + b"9" * 30 + b"\noptimizer.lr=nan\nmesh.tp=" + b"[" * 3000,
    }
    return {"whole": b"\0" + WHOLE.encode()} | {f"{name}-1": b"\1" + text for name, text in texts.items()}


def checkpoint_index() -> dict[str, bytes]:
    """Sound indexes as text, and fields that are put over those of one with hashes (1) or without (2)."""
    from fuzz.checkpoint_index import built, piece

    def tensor(shape: list[int], *slices: tuple[list[int], list[int]]) -> bytes:
        parts = [piece("weight/b", 0, start, size) for start, size in slices]
        return json.dumps({"tensors": {"weight/b": {"shape": shape, "slices": parts}}}).encode()

    fields = {
        "same": b"{}",
        "grid": tensor([4, 4], ([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 3]), ([2, 3], [2, 1])),
        "twice": tensor([4], ([0], [2]), ([0], [2])),
        "gap": tensor([4], ([0], [2]), ([3], [1])),
        "outside": tensor([4], ([0], [2]), ([2], [3])),
        "scalar": tensor([], ([], [])),
        "large": tensor([1 << 62, 1 << 62], ([0, 0], [1 << 62, 1 << 62])),
        "negative": tensor([4], ([-1], [5])),
        "away": b'{"files": {"../x": 9}}',
        "link": b'{"files": {"rank-00000.safetensors": -1}}',
        "step": b'{"run": {"step": 0, "consumed_samples": true}}',
        "samples": b'{"run": {"consumed_samples": 1e9}}',
        "config": b'{"run": {"config": "a = ' + b"[" * 900 + b'"}}',
        "digits": b'{"run": {"config": "a = ' + b"9" * 5000 + b'"}}',
        "deep": b'{"run": {"data": ' + b'{"a": ' * 300 + b"1" + b"}" * 302,
        "surrogate": b'{"run": {"data_id": "\\ud800"}}',
        "nan": b'{"run": {"data": {"x": NaN}, "measured": {"y": Infinity}}}',
    }
    texts = {"hashed": built(b"{}", hashed=True), "older": built(b"{}", hashed=False)}
    more = {"cut": texts["hashed"][:-9], "altered": texts["hashed"].replace(b"12", b"13"), "none": b"", "list": b"[1]"}
    more |= {"arrays": b'{"x": ' + b"[" * 5000, "digits": b'{"x": ' + b"9" * 5000 + b"}", "bytes": b'{"\xff": 1}'}
    raw = {name: b"\0" + text for name, text in (texts | more).items()}
    return raw | {f"{name}-{kind}": bytes([kind]) + text for name, text in fields.items() for kind in (1, 2)}


def foreign_pickles() -> dict[str, bytes]:
    """Files of torch.save in both formats, settings of Megatron-LM, a `.metadata`, and bombs."""
    import argparse
    import io
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    def saved(value: object, *, zipped: bool = True) -> bytes:
        out = io.BytesIO()
        torch.save(value, out, _use_new_zipfile_serialization=zipped)
        return b"\0" + out.getvalue()

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "padded_vocab_size": 16}
    common = {
        "args": argparse.Namespace(**sizes, window_size=(3, 0), swiglu=True, consumed_train_samples=6),
        "iteration": 3,
        "checkpoint_version": 3.0,
        "optimizer": {"state": {0: {"step": 3.0}}, "param_groups": [{"params": [0], "wd_mult": 1.0}]},
    }
    size = torch.Size
    metadata = Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.float32),
                size([4, 3]),
                [ChunkStorageMetadata(size([at, 0]), size([2, 3])) for at in (0, 2)],
            ),
            "o": BytesStorageMetadata(),
        },
        storage_data={
            MetadataIndex("w", size([0, 0])): _StorageInfo("__0_0.distcp", 0, 900),
            MetadataIndex("w", size([2, 0])): _StorageInfo("__0_0.distcp", 900, 900),
            MetadataIndex("o"): _StorageInfo("__0_0.distcp", 1800, 900),
        },
    )
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x06tQ"
    view = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\x02K\x03\x86K\x03K\x01\x86\x89}tR"
    bombs = {
        "tuples": b"\x80\x02N" + b"\x85" * 3000 + b".",
        "memo": b"\x80\x02Nr\xff\xff\xff\x07.",
        "bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "shared": b"\x80\x02N\x94" + b"".join(b"h%ch%c\x86\x94" % (level, level) for level in range(60)) + b".",
        "itself": b"\x80\x02]\x94h\x00a.",
    }
    pickles = {
        "common": pickle.dumps(common, 2),
        "common-5": pickle.dumps(common, 5),
        "view": b"\x80\x02}U\x01x" + view + b"s.",
        "behind": b"\x80\x02}U\x01x" + view.replace(b"K\x02K\x03\x86", b"K\x04K\x03\x86") + b"s.",
        **bombs,
    }
    return {
        "zip": saved({"a": torch.arange(6.0), "args": argparse.Namespace(a=1)}),
        "stream": saved({"a": torch.arange(6.0)}, zipped=False),
        **{f"pickle-{name}": b"\1" + text for name, text in pickles.items()},
        **{f"metadata-{protocol}": b"\2" + pickle.dumps(metadata, protocol) for protocol in (2, 4)},
        **{f"metadata-{name}": b"\2" + text for name, text in bombs.items()},
    }


def main() -> int:
    """Write them all."""
    from fuzz import tokenizer_seeds as of_tokenizers

    makers: tuple[Callable[[], dict[str, bytes]], ...] = (
        index_reader,
        legacy_reader,
        record_lines,
        packed_text,
        parquet_rows,
        arrow_rows,
        warc_records,
        other_rows,
        index_blocks,
        gather,
        native_rows,
        fim,
        megatron_order,
        masked,
        of_tokenizers.sentencepiece_model,
        of_tokenizers.gpt2_files,
        of_tokenizers.rank_files,
        of_tokenizers.tokenizer_json,
        of_tokenizers.sentencepiece_bpe,
    )
    makers += (of_tokenizers.punkt_split, of_tokenizers.punkt_tables, of_tokenizers.wordpiece)
    makers += (of_tokenizers.wordpiece_vocabulary, manifest, origins, journal, run_toml)
    makers += (checkpoint_index, foreign_pickles)
    for make in makers:
        folder = CORPUS / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in make().items():
            (folder / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
