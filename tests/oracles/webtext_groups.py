"""Kind `groups` of the webtext oracle: find_duplicates.py and group_duplicate_url.py of Megatron-LM's openwebtext.

For tests/oracles/webtext.py: `differs(key, told, texts)` gives what differs, "" if nothing does. `told` is
megatron.json and `texts` the corpus. Pairs: ours are all pairs of a bucket, and Megatron compares a random main
document with the others, so its pairs must be among ours with equal similarity. The survivors of groups depended on
hash seeds: one of each group at 0.7 must stay, and nothing else of it.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdata import _core
from mdata.dedup.dedup import dedup
from mdata.dedup.plan import CLUSTERS, COMPATIBLE, DedupOptions, signer_of

_SIMILAR = re.compile(r"(pairs|groups)_(union|min|max)_-?1(?:_(0\.[79]))?")
_LEAST, _OF_GROUPS = 0.5, 0.7


def differs(key: str, told: Mapping[str, Any], texts: Sequence[str]) -> str:
    """What differs in one entry of megatron.json."""
    kept = {row["row"]: row.get("text", texts[row["row"]]) for row in told["cleanup"] if row["kept"]}
    if key == "lsh_seeds":
        seeds = np.random.RandomState(1234).randint(0, 1_000_000, size=100)
        return "" if seeds.tolist() == told[key] else "other seeds"
    if key == "fingerprints":
        return _fingerprints(told[key], kept)
    if key == "deduped":
        groups, stay = _groups(kept, "union", _OF_GROUPS), set(told[key])
        wrong = [group for group in groups if len(group & stay) != 1] or [{*kept} - stay - set().union(*groups)]
        return f"not one of {sorted(wrong[0])} stays" if wrong[0] else ""
    match = _SIMILAR.fullmatch(key)
    if match is None:
        return f"unknown kind: {key}"
    if match[1] == "groups":
        ours, theirs = _groups(kept, match[2], float(match[3])), {frozenset(group) for group in told[key]}
        return "" if ours == theirs else f"groups {sorted(map(sorted, ours ^ theirs))[:3]}"
    pairs = _pairs(kept, match[2])
    wrong_pairs = [pair for *pair, share in told[key] if abs(pairs.get(frozenset(pair), 0) - share) > 1e-6]
    return f"pair {wrong_pairs[0]}: {pairs.get(frozenset(wrong_pairs[0]))}" if wrong_pairs else ""


def _fingerprints(told: Mapping[str, str], kept: Mapping[int, str]) -> str:
    signer = signer_of({**COMPATIBLE["megatron"], "bands": 100, "rows": 1})
    keys = signer.sign([kept[int(row)] for row in told])[2]
    for row, found, text in zip(told, keys.tolist(), told.values(), strict=True):
        minima = np.frombuffer(bytes.fromhex(text), "<u4").astype(np.uint64)
        if found != [_core.xxh64(value.tobytes()) for value in minima]:
            return f"the fingerprint of row {row}"
    return ""


def _groups(kept: Mapping[int, str], jaccard: Any, least: float) -> set[frozenset[int]]:
    """The groups of `dedup --compat megatron`."""
    rows = list(kept)
    with tempfile.TemporaryDirectory() as work:
        path, out = Path(work, "texts.jsonl"), Path(work, "out")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept.values()))
        changes = {**COMPATIBLE["megatron"], "jaccard": jaccard, "verify": least}
        dedup(DedupOptions(input=path, output=out, workers=1, **changes))
        lines = [json.loads(line) for line in (out / CLUSTERS).read_text().splitlines()]
    return {frozenset(rows[row - 1] for _, row in (line["kept"], *line["removed"])) for line in lines}


def _pairs(kept: Mapping[int, str], jaccard: str) -> dict[frozenset[int], float]:
    """The similarity of each pair that shares a bucket and has more than half in common."""
    rows, signer = list(kept), signer_of(COMPATIBLE["megatron"])
    keys = signer.sign(list(kept.values()))[2]
    hashes, ends = signer.ngram_sets(list(kept.values()))
    sets = [set(part.tolist()) for part in np.split(hashes, ends[:-1])]
    candidates = set[tuple[int, int]]()
    for band in keys.T.tolist():
        buckets: dict[int, list[int]] = {}
        for number, key in enumerate(band):
            buckets.setdefault(key, []).append(number)
        candidates |= {pair for members in buckets.values() for pair in itertools.combinations(members, 2)}
    pairs: dict[frozenset[int], float] = {}
    for one, other in candidates:
        sizes = len(sets[one]), len(sets[other])
        common = len(sets[one] & sets[other])
        of = {"union": sum(sizes) - common, "min": min(sizes), "max": max(sizes)}[jaccard]
        if of and common / of > _LEAST:
            pairs[frozenset((rows[one], rows[other]))] = common / of
    return pairs
