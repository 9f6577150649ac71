"""A job of `dedup`: its options, its files, and where each stage leaves what the next one reads.

Everything before the result lies in `OUTPUT/.work/JOB`, where JOB is a hash of options and inputs, so files of another
job are never mistaken for its own. A task of a stage has a done-file, `sign-00003-of-00064.json`, written last.

With `keep_signatures` the sorted runs of `sign` stay in `OUTPUT/signatures/JOB`, described by signatures.json: a later
job compares with them instead of the texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import _core
from mdata.dedup.row_set import FACTS, path_of
from mdata.errors import DamageError, UsageError
from mdata.object_storage.address import is_address
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import STDIN, SourceFile, find_inputs
from mdata.sources.record_batch import ReadSpec
from mdata.sources.sections import PartNumber, files_of_part

WORK, LOCK, CLUSTERS, TEXT, SUBSTRING = ".work", ".lock", "clusters.jsonl", "text", "substring.json"
SIGNATURES, SIGNED = "signatures", "signatures.json"
BLOCK_BYTES = 1 << 22  # of a chunk, as in preprocess
_PRIME = (1 << 61) - 1
_SEED = 1  # of the permutations, as datatrove's

Keys = npt.NDArray[np.uint64]
Stage = Literal["sign", "match", "sets", "verify", "group", "drop", "substring"]
Unit = Literal["words", "characters", "given", "raw"]
Hash = Literal["xxhash64", "sha1-64", "sha1-32", "murmur3"]
Jaccard = Literal["union", "min", "max"]
COMPATIBLE: Mapping[str, Mapping[str, Any]] = {
    "datatrove": {"bands": 14, "rows": 8, "join_equal": False},
    "megatron": {"bands": 10, "rows": 10, "unit": "raw", "hash": "murmur3", "verify": 0.7, "join_equal": False},
}
"""Options that find what another program does: datatrove's minhash, Megatron-LM's tools/openwebtext."""
_MEGATRONS_SEED = 1234
ALL = PartNumber(1, 1)


@dataclass(frozen=True, kw_only=True)
class DedupOptions:
    """Options of `dedup`.

    Args:
        input: files, folders or patterns of texts, as for `preprocess`.
        output: a folder for the result.
        against: texts that are always kept, or folders of earlier results with their signatures; documents of `input`
            that repeat them are removed.
        include, exclude: patterns for files in folders.
        json_key: the key or column that holds the text. input_format: "auto" decides by name and content.
        text_documents: a document of plain text is a file, or a paragraph.
        bands, rows: of a signature; documents with an equal band are near-duplicates. bands 0: only equal texts are.
        ngram: units of an n-gram. unit: words or characters of the normal form, words of the text between single
            blanks, or the raw text.
        hash: of an n-gram; SHA-1 as in datatrove, or murmur3 of raw text as in Megatron.
        verify: near-duplicates share at least this part of their distinct n-grams; 0: they are not compared.
        jaccard: as a part of the union of their n-grams, or of the smaller or larger set.
        join_equal: equal texts are duplicates even if they are shorter than an n-gram.
        substring: instead of all this, cut out repeats of at least this many bytes within a part, see
            mdata/dedup/substrings.py; 0: off.
        write_text: also write the rows that stay, see mdata/dedup/dropping.py.
        keep_signatures: leave them in the result, for the `against` of later jobs.
        workers: threads; the result is the same.
        shard: which task of a stage, "3/64". parts, ranges: number of tasks of `sign` and of `match`, for later stages;
            0: as many as there are.
    """

    input: str | Path | Sequence[str | Path]
    output: str | Path
    against: Sequence[str | Path] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    json_key: str = "text"
    input_format: Any = "auto"
    text_documents: Any = "file"
    bands: int = 14
    rows: int = 8
    ngram: int = 5
    unit: Unit = "words"
    hash: Hash = "xxhash64"
    verify: float = 0
    jaccard: Jaccard = "union"
    join_equal: bool = True
    write_text: bool = False
    substring: int = 0
    keep_signatures: bool = False
    workers: int = 0
    shard: PartNumber = ALL
    parts: int = 0
    ranges: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("bands", 0, 256), ("rows", 1, 256), ("ngram", 1, 64), ("verify", 0, 1)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}", expected=f"{least} to {most}")
        for name, allowed in (("unit", get_args(Unit)), ("hash", get_args(Hash)), ("jaccard", get_args(Jaccard))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} is {getattr(self, name)!r}", expected=", ".join(allowed))
        if (self.unit == "raw") != (self.hash == "murmur3"):
            raise UsageError(f"unit is {self.unit}, hash is {self.hash}", expected="raw with murmur3, or neither")
        if self.substring and (self.substring < 16 or self.against):
            found = f"substring is {self.substring}" if self.substring < 16 else "substring with against"
            raise UsageError(found, expected="at least 16 bytes, and no --against: a part is compared with itself")
        if self.substring and self.keep_signatures:
            raise UsageError("substring makes no signatures", fix="leave keep_signatures out")
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}", expected="at least 1, or 0 for all cores")
        for name in ("parts", "ranges"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}", expected="at least 1, or 0 for all that are there")

    @cached_property
    def inputs(self) -> tuple[str | Path, ...]:
        """`input` as a sequence."""
        return (self.input,) if isinstance(self.input, str | Path) else tuple(self.input)

    @property
    def content(self) -> dict[str, Any]:
        """The options that decide the result."""
        near = ("rows", "ngram", "unit", "hash", "jaccard", "join_equal") if self.bands else ("unit",)
        names = ("json_key", "input_format", "text_documents", "bands", *near)
        verify = {"verify": float(self.verify)} if self.bands else {}
        substring = {"substring": self.substring} if self.substring else {}
        return {**{name: getattr(self, name) for name in names}, **verify, **substring}

    @property
    def signature(self) -> dict[str, Any]:
        """The options that decide the signature of a text."""
        names = ("bands", "rows", "ngram", "unit", "hash") if self.bands else ("bands", "unit")
        return {**{name: getattr(self, name) for name in names}, "unicode": _core.text_classes_unicode()}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the job, in order."""
        if self.substring:
            return ("substring",)
        compared: tuple[Stage, ...] = ("sets", "verify") if self.bands and self.verify else ()
        written: tuple[Stage, ...] = ("drop",) if self.write_text else ()
        return ("sign", "match", *compared, "group", *written)


def permutations(count: int) -> tuple[Keys, Keys]:
    """a and b of the permutations (a x + b) mod (2^61 - 1), as datatrove draws them."""
    draws = np.random.RandomState(_SEED)
    a = draws.randint(1, _PRIME, dtype=np.uint64, size=count)
    return a, draws.randint(0, _PRIME, dtype=np.uint64, size=count)


def signer_of(content: Mapping[str, Any]) -> _core.MinHashSigner:
    """The signer of options, see `DedupOptions.content`."""
    rows, ngram = content.get("rows", 1), content.get("ngram", 5)
    hash, count = content.get("hash", "xxhash64"), max(1, content["bands"]) * rows
    a, b = permutations(count)
    if hash == "murmur3":
        a = b = np.random.RandomState(_MEGATRONS_SEED).randint(0, 1_000_000, size=count).astype(np.uint64)
    return _core.MinHashSigner(a, b, rows, ngram, content.get("unit", "words"), hash)


@dataclass(frozen=True)
class EarlierResult:
    """The signatures of an earlier job.

    Attributes:
        fingerprint: of all signatures. rows: of all its files, which are (path, rows).
        runs: path, the number of the first row of its part, and the counts of its hashes and bands.
        repair: what to do if one of them is damaged.
    """

    fingerprint: str
    rows: int
    files: tuple[tuple[str, int], ...]
    runs: tuple[tuple[Path, int, tuple[int, ...]], ...]
    repair: str

    @classmethod
    def load(cls, folder: Path, options: DedupOptions) -> EarlierResult:
        """Read the signatures that a result kept.

        Raises:
            UsageError: it has none, or those of other options. DamageError: they are incomplete.
        """
        path = folder / SIGNATURES / SIGNED
        repair = f"make {folder} again, or name its texts"
        facts = read_facts(path, repair) if path.exists() else {}
        if not facts or facts["job"] != finished_job(folder):
            fix = "make it with --keep-signatures, or name its texts"
            raise UsageError(f"{folder} is a result of mdata dedup without signatures", expected=str(path), fix=fix)
        if differing := [name for name, value in options.signature.items() if facts["signed"].get(name) != value]:
            raise UsageError(
                f"{folder} has signatures of other options",
                found=", ".join(f"{name}={options.signature[name]}" for name in differing),
                expected=", ".join(f"{name}={facts['signed'].get(name)}" for name in differing),
                fix="give the same options, or name its texts",
            )
        if options.verify:
            raise UsageError(
                f"verify={options.verify} compares texts, and {folder} has signatures",
                fix="name its texts, or leave --verify out",
            )
        runs = tuple((path.parent / name, base, tuple(counts)) for name, base, counts in facts["runs"])
        for run, _, counts in runs:
            size, expected = run.stat().st_size if run.exists() else 0, 24 * counts[0] + 16 * sum(counts[1:])
            if size != expected:
                raise DamageError(f"{run} is torn", found=f"{size} bytes", expected=f"{expected} bytes", fix=repair)
        fingerprint = blake3(path.read_bytes()).hexdigest(length=16)
        return cls(fingerprint, facts["rows"], tuple((name, rows) for name, rows in facts["files"]), runs, repair)


class DedupJob:
    """Options with the files that they name.

    Attributes:
        earlier: results whose signatures are compared, as if before all files. earlier_rows: rows of all of them.
        files: those of `against`, `num_known` of them, then those of `input`.
        identity: what decides the result. name: a hash of it.
    """

    def __init__(self, options: DedupOptions, progress: Progress = SILENT) -> None:
        chosen = PathFilter(options.include, options.exclude)

        def find(names: Sequence[str | Path]) -> Sequence[SourceFile]:
            return find_inputs(names, format=options.input_format, filter=chosen, progress=progress).files

        results = [path for path in options.against if not is_address(path) and Path(path, FACTS).is_file()]
        self.earlier = tuple(EarlierResult.load(Path(path), options) for path in results)
        self.earlier_rows = sum(result.rows for result in self.earlier)
        texts = [path for path in options.against if path not in results]
        earlier = find(texts) if texts else ()
        self.options, self.progress = options, progress
        self.files, self.num_known = (*earlier, *find(options.inputs)), len(earlier)
        known = {path_of(file) for file in earlier}
        if both := [file for file in self.files[self.num_known :] if path_of(file) in known]:
            raise UsageError(
                f"{both[0].path} is both input and --against",
                expected="other texts: those of the input are compared with each other anyway",
                fix="leave it out of one of the two",
            )
        if any(file.path == STDIN for file in self.files):
            raise UsageError("mdata dedup cannot read standard input", fix="give files: preprocess reads them again")
        self.spec = ReadSpec(
            json_keys=(options.json_key,),
            text_documents=options.text_documents,
            sentence_lists=False,
            key_option="--json-key",
        )
        identity = {
            **options.content,
            "num_known": len(earlier),
            "inputs": [[path_of(file), file.size_bytes, file.modified_ns] for file in self.files],
        }
        if self.earlier:
            identity["earlier"] = [result.fingerprint for result in self.earlier]
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it is read back, with lists
        self.name = blake3(json.dumps(self.identity, sort_keys=True).encode()).hexdigest(length=8)
        if is_address(options.output):
            raise UsageError(f"{options.output} is in object storage", expected="a folder, for --output of mdata dedup")
        self.folder = Path(options.output)
        self.work = self.folder / WORK / self.name

    @cached_property
    def signer(self) -> _core.MinHashSigner:
        """The signer of these options."""
        return signer_of(vars(self.options))

    def files_of(self, part: PartNumber) -> list[tuple[int, SourceFile]]:
        """The files and sections of a part, each with its number among `files`."""
        number = {file.path: number for number, file in enumerate(self.files)}
        text_is_whole = self.options.text_documents == "file"
        chosen = files_of_part(
            self.files, part, chunk_bytes=BLOCK_BYTES, text_is_whole=text_is_whole, rows_are_whole=True
        )
        return [(number[file.path], file) for file in chosen]

    def is_finished(self) -> bool:
        """Whether the result exists; refuses one of another job.

        Raises:
            UsageError: the folder holds another result.
        """
        path = self.folder / SUBSTRING
        if path.exists() and read_facts(path)["job"] != self.name:
            raise UsageError(
                f"{self.folder} holds the text of another mdata dedup --substring",
                found="other input or options",
                fix="give another --output, or remove it",
            )
        path = self.folder / FACTS
        if not path.exists():
            return False
        refuse_other_result(self.folder, read_facts(path), self.identity)
        return True

    def done_path(self, stage: Stage, task: PartNumber) -> Path:
        """The done-file of a task."""
        return self.work / done_name(stage, task)

    def data_path(self, stage: Stage, task: PartNumber, name: str) -> Path:
        """A file of a task's data, described by its done-file."""
        return self.work / done_name(stage, task).removesuffix(".json") / name

    def done(self, stage: Stage, count: int = 0) -> list[dict[str, Any]]:
        """The content of the done-files of all tasks of a stage, in order.

        Args:
            count: number of its tasks; 0: that of the only division there is.

        Raises:
            UsageError: some are missing, or there are several divisions. DamageError: one cannot be read.
        """
        counts = {int(path.name[-10:-5]) for path in self.work.glob(f"{stage}-*-of-*.json")}
        if not count and len(counts) != 1:
            option = "--parts" if stage == "sign" else "--ranges"
            raise UsageError(
                f"{self.work} has no finished {stage} of this input and these options"
                if not counts
                else f"{self.work} has several divisions of {stage}",
                found=self._others() if not counts else ", ".join(map(str, sorted(counts))),
                fix=f"mdata dedup {stage} comes first" if not counts else f"choose one with {option}",
            )
        number = count or counts.pop()
        tasks = [PartNumber(place, number) for place in range(1, number + 1)]
        if missing := [task for task in tasks if not self.done_path(stage, task).exists()]:
            raise UsageError(
                f"{len(missing)} of {number} tasks of {stage} are not done",
                found=self._others(),
                expected=str(self.done_path(stage, missing[0])),
                fix=f"mdata dedup {stage} --shard {missing[0].number}/{number}, with the same input and options",
            )
        return [read_facts(self.done_path(stage, task)) for task in tasks]

    def _others(self) -> str | None:
        """The files that other jobs left in the folder, for messages."""
        others = (path for path in sorted(self.work.parent.glob("*/job.json")) if path.parent != self.work)
        differing = {name for path in others for name in _differing(read_facts(path), self.identity)}
        return f"files of a job with different {', '.join(sorted(differing))}" if differing else None


def done_name(stage: str, task: PartNumber) -> str:
    """The name of a done-file."""
    return f"{stage}-{task.number:05}-of-{task.count:05}.json"


def text_path(folder: Path, task: PartNumber) -> Path:
    """The file for the text of a part."""
    return folder / TEXT / f"{task.number:05}-of-{task.count:05}.jsonl.zst"


def finished_job(folder: Path) -> str | None:
    """The name of the job whose result a folder holds; None if no result can be read."""
    try:
        job = json.loads((folder / FACTS).read_bytes()).get("job")
    except (OSError, ValueError, AttributeError):
        return None
    return job if isinstance(job, str) else None


def read_facts(path: Path, repair: str = "remove it, and run the same command again") -> dict[str, Any]:
    """The JSON object in a done-file or a report; `repair` is the advice if it is damaged.

    Raises:
        DamageError: it holds none.
    """
    try:
        facts = json.loads(path.read_bytes())
        if not isinstance(facts, dict):
            raise ValueError(f"no object, but {str(facts)[:80]!r}")
    except ValueError as error:
        raise DamageError(f"{path} is damaged", found=str(error), fix=repair) from error
    return facts


def refuse_other_result(folder: Path, facts: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse a folder whose report says that its result was made of something else.

    Raises:
        UsageError: names what differs.
    """
    if differing := _differing(facts.get("made_of", {}), asked):
        raise UsageError(
            f"{folder} holds the result of other input or options",
            found="different " + ", ".join(differing),
            fix="give another --output, or remove it",
        )


def _differing(made_of: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    return [name for name in {**asked, **made_of} if made_of.get(name) != asked.get(name)]


def parse_ngram(text: str) -> tuple[Unit, int]:
    """ "words:5", "characters:5" or "5" as a unit and a number.

    Raises:
        UsageError: another form.
    """
    match = re.fullmatch(r"(?:(words|characters|given):)?([0-9]{1,4})", text)
    if match is None:
        raise UsageError(f"ngram is {text!r}", expected="a number, words:5, characters:5, or given:5")
    unit: Unit = match[1] or "words"  # type: ignore[assignment]
    return unit, int(match[2])
