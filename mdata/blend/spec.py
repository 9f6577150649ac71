"""A blend as the user describes it: entries with shares, groups, phases; from words, TOML, CSV or Python. Pure.

An entry names corpora (a manifest, a prefix, a folder, a pattern, another blend) and gives them a share in exactly one
unit; an entry without a share counts by its tokens. Shares stay text, so that 0.1 is 0.1: TOML numbers are read as
written. All problems of a document are reported in one error. `mdata.blend.compose` decides which corpora an entry
means.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from mdata.blend.data_path import BlendEntry, WordLike, as_words, parse_data_path, words_of_path
from mdata.blend.same_tokenizer import REFUSE, TOKENIZER_UNKNOWN
from mdata.errors import UsageError, os_errors_named
from mdata.mixing.schedule import Phase, blend_error
from mdata.mixing.shares import LARGEST_SUM, TEXT_LIMITS, Share, TooLong, Unit, fraction_of
from mdata.util.config_text import parse_toml
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendSpec:
    """The description of a blend.

    Args:
        entries: corpora and shares. groups: shares of groups. phases: empty: one phase, with the entries' shares.
        alpha: entries without a share count by tokens to this power (1: by tokens, 0: equally).
        exhaustive: read every corpus once. redistribute: tokens capped by max_epochs go to the others.
        merge_same: a corpus that several entries name becomes one component with all of their shares, not an error.
        allow_overlap: use held-out parts of folders too, and allow documents in two corpora or sets.
        samples, tokens: length of the only phase, if it mixes amounts and weights.
        valid, test: name -> path of a finite set.
        tokenizer_unknown: "ok" mixes corpora that record their tokenizer with others that do not.
        per_split: the entries are Megatron's list for the training split, which ignores the weight of a single corpus.
    """

    entries: tuple[BlendEntry, ...]
    groups: Mapping[str, Share] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    alpha: str | None = None
    exhaustive: bool = False
    redistribute: bool = False
    merge_same: bool = False
    allow_overlap: bool = False
    samples: int | None = None
    tokens: int | None = None
    valid: Mapping[str, str] = field(default_factory=dict)
    test: Mapping[str, str] = field(default_factory=dict)
    tokenizer_unknown: str = REFUSE
    per_split: bool = False


SpecLike = Sequence[WordLike] | Mapping[str, Any] | BlendSpec | str | Path


def read_spec(spec: SpecLike) -> BlendSpec:
    """Read a spec from words, a .toml or .csv file, or a mapping.

    Raises:
        UsageError: it cannot be read; lists all of its problems.
    """
    if isinstance(spec, BlendSpec):
        return spec
    if isinstance(spec, Mapping):
        return spec_of_mapping(spec)
    words = words_of_path(spec) if isinstance(spec, str | Path) else as_words(spec)
    files = [word for word in words if Path(word).suffix in (".toml", ".csv")]
    there = [word for word in files if Path(word).is_file()]
    if len(words) > 1 and there:
        raise UsageError(
            f"{there[0]} describes a whole blend and cannot be combined with others",
            found=" ".join(words[:8]) + (" ..." if len(words) > 8 else ""),
            expected="one .toml or .csv file, or weights and corpora",
            fix="put the other arguments into that file",
        )
    if len(words) != 1 or not files:
        return spec_of_words(words)
    (name,) = files
    with os_errors_named("reading a blend's description"):
        content = regular_file(name).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8", found=str(error)) from error
    return spec_of_toml(text, name) if name.endswith(".toml") else spec_of_csv(text, name)


def spec_of_words(words: Sequence[WordLike]) -> BlendSpec:
    """Read Megatron's grammar: `0.7 a 0.3 b`, or corpora alone."""
    return BlendSpec(entries=parse_data_path(as_words(words)))


def spec_of_splits(lists: Mapping[str, Sequence[WordLike] | str | None]) -> BlendSpec:
    """Read Megatron's lists per split: train is the blend; each corpus of valid and test becomes a separate set.

    Args:
        lists: "train", "valid", "test" -> words, or one string of them; an empty list counts as not given.

    Raises:
        UsageError: another key, a value that is not a list of words, or nothing to train on.
    """
    words_by_split = {key: as_words(value, f'"{key}"') for key, value in lists.items() if value is not None}
    words = {key: value for key, value in words_by_split.items() if value}
    unknown = [key for key in lists if key not in ("train", "valid", "test")]
    if unknown or "train" not in words:
        keys = f"keys {', '.join(lists)}" if lists else "nothing"
        raise UsageError("the lists per split cannot be used", found=keys, expected='"train", and "valid" and "test"')
    sets = {key: {entry.path: entry.path for entry in parse_data_path(words[key])} for key in words if key != "train"}
    entries = spec_of_words(words["train"]).entries
    return BlendSpec(entries=entries, valid=sets.get("valid", {}), test=sets.get("test", {}), per_split=True)


def spec_of_toml(text: str, name: str) -> BlendSpec:
    """Read a TOML document; configs/blend.toml shows every key.

    Raises:
        UsageError: not TOML; or lists every problem of its content.
    """
    try:
        tables = parse_toml(text, parse_float=str)
    except ValueError as error:
        raise UsageError(f"{name} is not a TOML file", found=str(error), fix="correct that line") from error
    return spec_of_mapping(tables, name)


def spec_of_mapping(tables: Mapping[str, Any], name: str = "the blend") -> BlendSpec:
    """Read the same content as TOML from a Python mapping.

    Raises:
        UsageError: lists every problem.
    """
    read = _SpecReader()
    spec = read.spec(tables)
    if read.problems:
        raise blend_error([f"{name}: {problem}" for problem in read.problems])
    return spec


def spec_of_csv(text: str, name: str) -> BlendSpec:
    """Read a table with a header: path, one of weight (or share), tokens, samples, epochs; name, group, max_epochs.

    Raises:
        UsageError: lists every problem, with its line.
    """
    import csv

    text = text.removeprefix("\ufeff")  # spreadsheets write it
    semicolons = ";" in text.partition("\n")[0]
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True, delimiter=";" if semicolons else ",")
    read, entries = _SpecReader(), []
    try:
        lines = [(rows.line_num, row) for row in rows]
    except csv.Error as error:  # a field of more than 128 KiB
        problem = f"{name}: line {rows.line_num}: {error}"
        raise UsageError(problem, fix="close the quote before it, or write shorter fields") from error
    for number, row in lines:
        extra = [value for key, value in row.items() if key is None]
        table = {key.strip(): value.strip() for key, value in row.items() if key and value and value.strip()}
        if "share" in table:
            table["weight"] = table.pop("share")
        if extra:
            read.problems.append(f"line {number}: more cells than the header has")
        entries.append(read.entry(table, f"line {number}"))
    if not entries and not read.problems:
        read.problems.append("no row names a corpus")
    if read.problems:
        raise blend_error([f"{name}: {problem}" for problem in read.problems])
    return BlendSpec(entries=tuple(entries))


class _SpecReader:
    """Turns tables into a spec and collects every problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def spec(self, tables: Mapping[str, Any]) -> BlendSpec:
        allowed = ("component", "group", "phase", "valid", "test", "alpha", *_FLAGS, *_LENGTHS, _UNKNOWN)
        self.keys(tables, allowed, "")
        entries = [self.entry(t, f"component {i + 1}") for i, t in enumerate(self.tables(tables, "component"))]
        if not entries:
            self.problems.append("no [[component]] names a corpus")
        groups = {name: self.share(value, f"group {name}") for name, value in self.table(tables, "group").items()}
        phases = [self.phase(t, f"phase {i + 1}") for i, t in enumerate(self.tables(tables, "phase"))]
        sets = {
            key: {name: self.text(path, f"{key}.{name}") for name, path in self.table(tables, key).items()}
            for key in ("valid", "test")
        }
        return BlendSpec(
            entries=tuple(entries),
            groups=groups,
            phases=tuple(phases),
            alpha=self.number(tables["alpha"], "alpha", zero=True) if "alpha" in tables else None,
            exhaustive=self.flag(tables, "exhaustive", ""),
            redistribute=self.flag(tables, "redistribute", ""),
            merge_same=self.flag(tables, "merge_same", ""),
            allow_overlap=self.flag(tables, "allow_overlap", ""),
            samples=self.whole(tables, "samples", ""),
            tokens=self.whole(tables, "tokens", ""),
            tokenizer_unknown=self.choice(tables, _UNKNOWN, TOKENIZER_UNKNOWN),
            valid=sets["valid"],
            test=sets["test"],
        )

    def entry(self, table: Mapping[str, Any], where: str) -> BlendEntry:
        self.keys(table, ("path", "name", "group", "max_epochs", *UNITS), where)
        if "path" not in table:
            self.problems.append(f"{where} has no path")
        return BlendEntry(
            path=self.text(table.get("path", ""), f"{where}: path"),
            share=self.share({unit: table[unit] for unit in UNITS if unit in table}, where, none=True),
            max_epochs=self.number(table["max_epochs"], f"{where}: max_epochs") if "max_epochs" in table else None,
            name=self.text(table["name"], f"{where}: name") if "name" in table else None,
            group=self.text(table["group"], f"{where}: group") if "group" in table else None,
        )

    def phase(self, table: Mapping[str, Any], where: str) -> Phase:
        self.keys(table, ("shares", "ramp", *_LENGTHS), where)
        shares = self.table(table, "shares") if "shares" in table else None
        return Phase(
            samples=self.whole(table, "samples", where),
            tokens=self.whole(table, "tokens", where),
            by_name=None
            if shares is None
            else {name: self.share(value, f"{where}: {name}", zero=True) for name, value in shares.items()},
            ramp=self.flag(table, "ramp", where),
        )

    def share(self, value: Any, where: str, *, none: bool = False, zero: bool = False) -> Any:
        """A `Share` from a number (a weight) or a table with one unit; None for an empty one, if that is allowed."""
        if not isinstance(value, Mapping):
            return Share(self.number(value, where, zero=zero))
        self.keys(value, UNITS, where)
        units = [unit for unit in UNITS if unit in value]
        if none and not units:
            return None
        if len(units) != 1:
            names = " and ".join(units) or "none"
            self.problems.append(f"{where} needs exactly one of weight, tokens, samples and epochs; found {names}")
            return Share("1")
        return Share(self.number(value[units[0]], f"{where}: {units[0]}", zero=zero), units[0])

    def number(self, value: Any, where: str, *, zero: bool = False) -> str:
        """The text of a number above 0 (or at least 0); Python floats are not exact, so they are refused."""
        text = str(value).replace("_", "")
        try:
            right = not isinstance(value, float | bool) and fraction_of(text) >= (0 if zero else Fraction(1, 10**400))
        except TooLong as error:
            self.problems.append(f"{where} has {error}; expected {TEXT_LIMITS}")
            return "1"
        except (ValueError, ZeroDivisionError):
            right = False
        if not right:
            least = "a number of at least 0" if zero else "a number above 0"
            hint = '; write it as text, such as "0.1"' if isinstance(value, float) else ""
            self.problems.append(f"{where} is {value!r}; expected {least}{hint}")
            return "1"
        return text

    def whole(self, table: Mapping[str, Any], key: str, where: str) -> int | None:
        if key not in table:
            return None
        text = self.number(table[key], _joined(where, key))
        value = Fraction(text)
        if value.denominator != 1 or value > LARGEST_SUM:
            self.problems.append(f"{_joined(where, key)} is {text[:60]}; expected an integer of at most 2^62")
            return 1
        return int(value)

    def flag(self, table: Mapping[str, Any], key: str, where: str) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            self.problems.append(f"{_joined(where, key)} is {value!r}; expected true or false")
        return value is True

    def choice(self, table: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        """One of these texts; the first if nothing is given."""
        value = table.get(key, choices[0])
        if value not in choices:
            self.problems.append(f"{key} is {value!r}; expected {' or '.join(choices)}")
        return str(value)

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.problems.append(f"{where} is {value!r}; expected a text")
        return str(value)

    def table(self, tables: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = tables.get(key, {})
        if not isinstance(value, Mapping):
            self.problems.append(f"{key} is {value!r}; expected a table")
            return {}
        return value

    def tables(self, tables: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        value = tables.get(key, [])
        if not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
            self.problems.append(f"{key} is not a list of tables; write [[{key}]] above each")
            return []
        return list(value)

    def keys(self, table: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
        for key in table:
            if key not in allowed:
                close = nearest(key, allowed)
                self.problems.append(
                    f"{_joined(where, key)} is not known" + (f"; did you mean {close}?" if close else "")
                )


_FLAGS = ("exhaustive", "redistribute", "merge_same", "allow_overlap")
_LENGTHS = ("samples", "tokens")
_UNKNOWN = "tokenizer_unknown"


def _joined(where: str, key: str) -> str:
    return f"{where}: {key}" if where else key
