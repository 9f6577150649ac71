"""`python -m tests.oracles.webtext FOLDER`: compare a folder of the form of oracle/webtext with the product.

FOLDER holds corpus.jsonl and its results, or folders that do. A line for each kind, then `N of M cases equal`; exit
code 0 only if all are. An unknown kind, a case that cannot be read and an empty folder are failures.

Words are our own, so results that depend on datatrove's are compared by the share of equal rows: kept rows by
LEAST_KEPT, verdicts of filters by LEAST_VERDICTS.

Cleanup needs ftfy and langdetect, URLs need tldextract: the extra [web]. GPT-2's vocabulary is read from the oracle
folder (MDATA_ORACLES).

Options: `--kind NAME` (may be repeated) compares only that kind.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdata import _core
from mdata.cleaning import openwebtext, rules
from mdata.cleaning.decontaminate import DecontaminateRules, decontaminate, load_item_sets
from mdata.cleaning.languages import load_identifier
from mdata.cleaning.openwebtext_ngrams import OpenWebTextNgrams
from mdata.cleaning.text_job import TextJobOptions
from mdata.cleaning.urls import UrlFilter, UrlRules
from mdata.dedup.dedup import dedup
from mdata.dedup.plan import COMPATIBLE, DedupOptions, signer_of
from mdata.dedup.row_set import RowSet
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.conftest import oracle_folder
from tests.oracles.frame import MALFORMED, Case, Program, unknown, unreadable

LEAST_KEPT, LEAST_VERDICTS = 0.97, 0.98
KINDS = ("kept", "groups", "filters", "ngrams", "urls", "cleanup")
_MINHASH = re.compile(r"minhash_(sha1_32|sha1_64|xxhash64)_(\d+)x(\d+)(?:_n(\d+))?")


class Folder:
    """A corpus with its results."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The documents. Lone surrogates, which are no text, become question marks."""
        lines = (self.root / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [{**row, "text": row["text"].encode(errors="replace").decode()} for row in rows]

    @property
    def texts(self) -> list[str]:
        return [row["text"] for row in self.rows]

    @functools.cached_property
    def megatron(self) -> dict[str, Any]:
        """megatron.json."""
        return self.json("megatron.json")

    def json(self, name: str) -> Any:
        return json.loads((self.root / name).read_text(encoding="utf-8"))


# ---- documents that dedup keeps


def kept(folder: Folder, path: Path) -> Iterator[Case]:
    yield Case("kept", f"{folder.root.name}/{path.stem}", functools.partial(_kept, folder, path))


def _kept(folder: Folder, path: Path) -> str:
    match = _MINHASH.fullmatch(path.stem)
    if match is None:
        raise ValueError(f"the name {path.stem} names no hash, bands and rows")
    wanted = set(folder.json(path.name)["kept"])
    changes = {"hash": match[1].replace("_", "-"), "bands": int(match[2]), "rows": int(match[3])}
    options = {**COMPATIBLE["datatrove"], **changes, "ngram": int(match[4] or 5)}
    with tempfile.TemporaryDirectory() as work:
        dedup(DedupOptions(input=_written(folder.texts, Path(work)), output=Path(work) / "out", workers=1, **options))
        found = ~RowSet.open(Path(work) / "out").removed[0]
    return _share_of_equal(found.tolist(), [row["url"] in wanted for row in folder.rows], LEAST_KEPT)


def _written(texts: Sequence[str], folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def groups(folder: Folder, name: str) -> Iterator[Case]:
    yield Case("groups", f"{folder.root.name}/{name}", functools.partial(_groups, folder, name))


def _groups(folder: Folder, name: str) -> str:
    """Groups and pairs of the rows that cleanup keeps; of `deduped`, whose survivors are chance, how many it has."""
    rows = {row["row"]: row.get("text", folder.texts[row["row"]]) for row in folder.megatron["cleanup"] if row["kept"]}
    told, (kind, *parts) = folder.megatron[name], name.split("_")
    if kind in ("lsh", "fingerprints"):
        return _fingerprints(folder, rows)
    measure, least = (parts[0], float(parts[2]) if kind == "groups" else 0.5) if parts else ("union", 0.7)
    changes = {**COMPATIBLE["megatron"], "jaccard": measure, "verify": least}
    with tempfile.TemporaryDirectory() as work:
        texts = _written(list(rows.values()), Path(work))
        dedup(DedupOptions(input=texts, output=Path(work) / "out", workers=1, **changes))
        lines = [json.loads(line) for line in (Path(work) / "out/clusters.jsonl").read_text().splitlines()]
    numbers = list(rows)
    found = sorted(sorted(numbers[row - 1] for _, row in (line["kept"], *line["removed"])) for line in lines)
    if kind == "deduped":
        return _differing(len(rows) - sum(len(group) - 1 for group in found), len(told))
    if kind == "pairs":  # each one is found again as a group, joined
        parents = np.arange(1 + max(rows))
        pairs = np.array([pair[:2] for pair in told], np.uint64).reshape(-1, 2)
        _core.join_groups(parents, pairs)
        while not np.array_equal(above := parents[parents], parents):
            parents = above
        joined = dict[int, list[int]]()
        for row in rows:
            joined.setdefault(int(parents[row]), []).append(row)
        told = [group for group in joined.values() if len(group) > 1]
    return _differing(found, sorted(sorted(group) for group in told))


def _differing(found: Any, wanted: Any) -> str:
    return "" if found == wanted else f"{str(found)[:200]} instead of {str(wanted)[:200]}"


def _fingerprints(folder: Folder, rows: Mapping[int, str]) -> str:
    """Minima of the first rows, whose hashes depend on the seeds."""
    signer = signer_of({"bands": 100, "rows": 1, "unit": "raw", "hash": "murmur3"})
    told = folder.megatron["fingerprints"]
    keys = signer.sign([rows[int(row)] for row in told])[2]
    for row, found, hexadecimal in zip(told, keys.tolist(), told.values(), strict=True):
        minima = np.frombuffer(bytes.fromhex(hexadecimal), "<u4").astype(np.uint64)
        if found != [_core.xxh64(value.tobytes()) for value in minima]:
            return f"row {row}: other minima"
    return ""


def _share_of_equal(found: Sequence[Any], wanted: Sequence[Any], least: float) -> str:
    """What differs, if more rows do than may."""
    if len(found) != len(wanted):
        return f"{len(found)} rows instead of {len(wanted)}"
    unequal = [row for row, (mine, theirs) in enumerate(zip(found, wanted, strict=True)) if mine != theirs]
    share = 1 - len(unequal) / max(1, len(wanted))
    if wanted and share >= least:
        return ""
    row = unequal[0] if unequal else 0
    return f"{share:.1%} of rows equal; row {row}: {found[row] if found else 'no rows'}" + (
        f" instead of {wanted[row]}" if wanted else ""
    )


# ---- filters

# Our thresholds by datatrove's names; what else it calls a reason is the name of the threshold of an n-gram.
_REASONS: Mapping[str, str] = {
    "": "",
    "gopher-min-words": "gopher_short_doc",
    "gopher-max-words": "gopher_long_doc",
    "gopher-min-mean-length": "gopher_below_avg_threshold",
    "gopher-max-mean-length": "gopher_above_avg_threshold",
    "gopher-max-hashes": "gopher_too_many_hashes",
    "gopher-max-ellipses": "gopher_too_many_ellipsis",
    "gopher-max-bullet-lines": "gopher_too_many_bullets",
    "gopher-max-ellipsis-lines": "gopher_too_many_end_ellipsis",
    "gopher-min-alpha": "gopher_below_alpha_threshold",
    "gopher-min-stop-words": "gopher_enough_stop_words",
    "gopher-repetition-empty": "empty",
    "gopher-repetition-max-paragraphs": "dup_para_frac",
    "gopher-repetition-max-paragraph-characters": "dup_para_char_frac",
    "gopher-repetition-max-lines": "dup_line_frac",
    "gopher-repetition-max-line-characters": "dup_line_char_frac",
    **{f"gopher-repetition-max-top-{n}": f"top_{n}_gram" for n in (2, 3, 4)},
    **{f"gopher-repetition-max-all-{n}": f"duplicated_{n}_n_grams" for n in range(5, 11)},
    "fineweb-empty": "empty",
    "fineweb-min-stopped-lines": "line_punct_ratio",
    "fineweb-max-short-lines": "short_line_ratio",
    "fineweb-max-repeated": "char_dup_ratio",
    "fineweb-max-newlines": "list_ratio",
    "paragraphs-min-characters": "< 3 paragraphs",
    "c4-lorem-ipsum": "lorem_ipsum",
    "c4-curly-bracket": "curly_bracket",
    "c4-min-sentences": "too_few_sentences",
}
_FILTERS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "gopher_quality": lambda texts: rules.gopher_reasons(texts, rules.GopherRules()),
    "gopher_repetition": lambda texts: rules.repetition_reasons(texts, rules.RepetitionRules()),
    "fineweb": lambda texts: rules.fineweb_reasons(texts, rules.FineWebRules()),
    "c4_paragraph": lambda texts: rules.paragraph_reasons(texts, rules.ParagraphRules()),
}
_C4: Mapping[str, rules.C4Rules] = {
    "c4_quality": rules.C4Rules(),
    "c4_quality_no_sentences": rules.C4Rules(min_sentences=-1),
}


def filters(folder: Folder, path: Path) -> Iterator[Case]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("row", "kind"))
    for name in names:
        base = name.removesuffix("_sha256").removesuffix("_text")
        if name not in _FILTERS and base not in _C4:
            yield Case("filters", f"{folder.root.name}/{name}", functools.partial(unknown, name))
        elif name == base:
            yield Case("filters", f"{folder.root.name}/{name}", functools.partial(_verdicts, folder, name, rows))


def _verdicts(folder: Folder, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Verdicts with their reasons; of C4 also the texts, where both keep one."""
    if name in _FILTERS:
        texts, reasons = folder.texts, _FILTERS[name](folder.texts)
    else:
        texts, reasons = rules.c4_texts(folder.texts, _C4[name])
    found: list[Any] = [_REASONS[reason] for reason in reasons]
    wanted: list[Any] = ["" if row[name] is True else row[name] for row in rows]
    if len(found) == len(wanted):
        for row, told in enumerate(rows):
            if not found[row] and not wanted[row]:
                if f"{name}_text" in told:
                    found[row], wanted[row] = texts[row], told[f"{name}_text"]
                elif f"{name}_sha256" in told:
                    found[row], wanted[row] = _digest(texts[row]), told[f"{name}_sha256"]
    return _share_of_equal(found, wanted, LEAST_VERDICTS)


# ---- tools/openwebtext of Megatron-LM


def urls(folder: Folder, name: str) -> Iterator[Case]:
    yield Case("urls", f"{folder.root.name}/{name}", functools.partial(_urls, folder, name))


def _urls(folder: Folder, name: str) -> str:
    """The set of addresses that stay, or each refused one with its reason; their order depended on hash seeds."""
    labels = {
        "url-domain": "[DOMAIN BLACKLIST]", "url-ending": "[EXTENTION BLACKLIST]", "url-min-characters": "[SHORT URL]",
        "url-malformed": "[MALFORMED URL]",
    }  # fmt: skip
    filter, kept, refused = UrlFilter(UrlRules(), compat=True), set[str](), list[str]()
    for path in sorted((folder.root / "urls").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            url = line.strip()
            reason = labels.get(filter.reason(url)) or ("[DUPLICATE URL]" if url in kept else "")
            if reason:
                refused.append(f"{reason}: {url}".strip())
            else:
                kept.add(url)
    found = sorted(kept) if name == "urls_kept" else sorted(refused)
    return _share_of_equal(found, sorted(folder.megatron[name]), 1)


def cleanup(folder: Folder, name: str) -> Iterator[Case]:
    compare = _cleanup if name == "cleanup" else functools.partial(_fix, name=name)
    yield Case("cleanup", f"{folder.root.name}/{name}", functools.partial(compare, folder))


def _cleanup(folder: Folder) -> str:
    vocabulary = oracle_folder() / "vocab/gpt2"
    tokenizer = load_tokenizer(
        TokenizerSpec(
            type="GPT2BPETokenizer", vocab_file=vocabulary / "vocab.json", merge_file=vocabulary / "merges.txt"
        )
    )
    identify, _ = load_identifier("langdetect")
    texts, reasons = openwebtext.cleaned(
        folder.texts, identify, lambda some: tokenizer.encode_batch(some)[1].tolist() if some else []
    )
    found = [
        {"row": row, "kept": not reason}
        | ({"reason": reason.removeprefix("openwebtext-")} if reason else {})
        | ({"text": text} if not reason and text != folder.texts[row] else {})
        for row, (text, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    return _share_of_equal(found, folder.megatron["cleanup"], 1)


def _fix(folder: Folder, name: str) -> str:
    task, told = name.removeprefix("fix_"), folder.megatron[name]
    identify, _ = load_identifier("langdetect")
    tasks = openwebtext.TASKS if task == "all" else (task,)
    texts, reasons = openwebtext.fixed_by_tasks(folder.texts, tasks, identify)
    changed = {str(row): texts[row] for row in range(len(texts)) if texts[row] != folder.texts[row]}
    short = {row: text if len(text) <= 400 else _digest(text) for row, text in changed.items()}
    found = {
        "kept": [row for row, reason in enumerate(reasons) if not reason],
        "filtered": [row for row, reason in enumerate(reasons) if reason],
        "changed": short,
    }
    differing = sorted(key for key in {*found, *told} if found.get(key) != told.get(key))
    return f"{differing[0]}: {str(found.get(differing[0]))[:200]}" if differing else ""


# The options of each call of filter_ngrams.py.
_NGRAMS: Mapping[str, Mapping[str, int]] = {
    "ngrams": {},
    "ngrams_100": {"key_threshold": 1000},
    "ngrams_5": {"ngram": 8, "min_ngram": 3, "margin": 20, "min_characters": 50, "max_pieces": 3},
}


def ngrams(folder: Folder, name: str) -> Iterator[Case]:
    yield Case("ngrams", f"{folder.root.name}/{name}", functools.partial(_ngrams, folder, name))


def _ngrams(folder: Folder, name: str) -> str:
    """The lines of --compat openwebtext: pieces of changed rows, rows that stay whole, and the counts at its end."""
    told = folder.megatron[name]
    counting = name == "ngram_keys_below_threshold"
    rules_of_call = DecontaminateRules(
        against=(f"lambada={folder.root / 'eval.jsonl'}",), mode="split", compat="openwebtext", **_NGRAMS.get(name, {})
    )
    with tempfile.TemporaryDirectory() as work:
        options = TextJobOptions(
            input=folder.root / "corpus.jsonl", output=Path(work) / "out", on_error="skip", workers=1
        )
        result = decontaminate(options, rules_of_call)
        if counting:
            (items,) = load_item_sets(rules_of_call)
            keys = OpenWebTextNgrams.of_items(items.items, most=13, least=8).keys
            found = len(keys) - len(result.summary["frequent"])
            return "" if found == told else f"{found} n-grams instead of {told}"
        lines = (Path(work) / "out/corpus.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    pieces = dict[str, list[list[str]]]()
    for line in lines:
        record = json.loads(line)
        row = int(record["split_id"].split("-")[-2]) - 1
        pieces.setdefault(str(row), []).append([record["split_id"], record["text"]])
    texts = [row["text"] for row in folder.rows]
    whole = [row for row in pieces if [text for _, text in pieces[row]] == [texts[int(row)]]]
    many = result.removed.get("too-many-pieces", 0)
    trimmed = sum(len(parts) == 1 and row not in whole for row, parts in pieces.items())
    found = {
        "pieces": {row: parts for row, parts in pieces.items() if row not in whole},
        "unchanged": sorted(map(int, whole)),
        "last_line": f"Total docs {result.rows} splitted {sum(len(parts) > 1 for parts in pieces.values()) + many} "
        f"ignored {result.removed.get('contaminated', 0)} splits > theshold {many} trimmed {trimmed}",
    }
    differing = sorted(key for key in {*found, *told} if found.get(key) != told.get(key))
    return f"{differing[0]}: {str(found.get(differing[0]))[:300]}" if differing else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the list

# What megatron.json holds, by kind; a name that begins with one of these.
_OF_MEGATRON: Mapping[str, tuple[str, ...]] = {
    "groups": ("pairs_", "groups_", "deduped", "lsh_seeds", "fingerprints"),
    "ngrams": ("ngrams", "ngram_keys_below_threshold"),
    "urls": ("urls_kept", "urls_refused"),
    "cleanup": ("cleanup", "fix_"),
}

_COMPARED: Mapping[str, Callable[[Folder, str], Iterator[Case]]] = {
    "groups": groups,
    "urls": urls,
    "cleanup": cleanup,
    "ngrams": ngrams,
}


def cases_of(root: Path) -> Iterator[Case]:
    """Every case of a folder; what cannot be read, and what nobody knows, is a case that fails."""
    folders = [root] if (root / "corpus.jsonl").exists() else sorted(path for path in root.glob("*") if path.is_dir())
    for path in folders:
        folder = Folder(path)
        for file in sorted(path.glob("*.json*")):
            if file.name not in ("corpus.jsonl", "eval.jsonl"):
                yield from _cases(folder, file)


def _cases(folder: Folder, file: Path) -> Iterator[Case]:
    name = f"{folder.root.name}/{file.stem}"
    if file.name == "filters.jsonl":
        try:
            yield from list(filters(folder, file))
        except MALFORMED as error:
            yield Case("filters", name, functools.partial(unreadable, repr(error)))
    elif file.stem.startswith("minhash_"):
        yield from kept(folder, file)
    elif file.name != "megatron.json":
        yield Case(file.stem, name, functools.partial(unknown, file.stem))
    else:
        try:
            names = list(folder.megatron)
        except MALFORMED as error:
            yield Case("megatron", name, functools.partial(unreadable, repr(error)))
            return
        for key in names:
            kind = next((kind for kind, begins in _OF_MEGATRON.items() if key.startswith(begins)), None)
            if kind is None:
                yield Case(key, f"{folder.root.name}/{key}", functools.partial(unknown, key))
            else:
                yield from _COMPARED[kind](folder, key)


PROGRAM = Program("webtext", str(__doc__), KINDS, cases_of)
compare, main = PROGRAM.compare, PROGRAM.main


if __name__ == "__main__":
    sys.exit(main())
