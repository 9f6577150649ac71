"""Hostile input: what the reference accepts gives as many documents; all else is one message, never a hang
or a trace.
"""

from __future__ import annotations

import re

import pytest

import mdata
from mdata import BadInputError, UsageError
from tests.mdata.preprocess.test_preprocess import contents, options, run

# Slow with any engine: a word of megabytes.
SLOW = {"bomb_64mb", "million_a", "million_digits", "million_emoji_zwj", "million_periods", "million_spaces"}
# The reference reads gzip only by name and partition, zstd never; an empty file is an empty file.
# And the size of an integer under another key is not our business.
OURS_ACCEPTS = {"gzip_named_plain.jsonl": 2000, "plain_named.jsonl.gz": 2, "huge_integer_other_key.jsonl": 3}
ROW = re.compile(r"\| ((?:jsonl|compressed)/\S+) \|.*?\| (accepted, exit 0: (\d+) documents)?")


def test_every_hostile_file_is_taken_as_the_reference_does_or_named(tmp_path, oracles):
    table = (oracles / "hostile" / "table.md").read_text()
    rows = {found[1]: found[3] for line in reversed(table.splitlines()) if (found := ROW.match(line))}
    assert len(rows) > 50
    tried = 0
    for name, documents in rows.items():
        stem = name.split("/")[1]
        if stem.split(".")[0] in SLOW:
            continue
        path = oracles / "hostile" / name
        folder = tmp_path / name.replace("/", "-")
        expected = OURS_ACCEPTS.get(stem, int(documents) if documents else None)
        tried += 1
        if expected is not None:
            manifest = run(folder, input=(str(path),))
            assert manifest.shards[0].documents == expected, name
            continue
        with pytest.raises((BadInputError, UsageError)) as caught:
            mdata.preprocess(options(folder, input=(str(path),)))
        message = str(caught.value)
        assert message.startswith(str(path)) and len(message.splitlines()) <= 4, name
        assert not folder.exists() or contents(folder) == {}, name
    assert tried > 45
