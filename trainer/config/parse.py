"""Reads and checks a run's TOML file, and reports all of its problems at once.

`load_config` reads the file, applies `section.key=value` overrides and reports unknown sections and keys (with the
nearest name), missing keys, wrong types and values out of range. Rules between sections are in `plan/check.py`. Only
reads files; imports no torch.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mdata import MdataError, UsageError
from mdata.errors import counted, explain_os_error
from mdata.util.config_text import load_toml
from mdata.util.option_synonyms import asks_to_resume, nearest
from mdata.util.regular_files import regular_file
from trainer.config.presets import PRESETS, presets_like
from trainer.config.sections import RunConfig

# Keys before 0.1 and where they are now; accepted until 0.2.
MOVED_KEYS: Mapping[str, str] = types.MappingProxyType({"train.log_interval": "run.log_interval"})

# A note for a user whose file has wrong values: rules that depend on them are checked later.
AFTERWARDS = "correct this first; what depends on it is checked after that"


RESUME_ADVICE = (
    "leave it out: the same command continues from the newest checkpoint in run.folder; a new run begins with the "
    "weights of checkpoint.init_from=FOLDER"
)
_SHOWN = 200  # characters of a wrong value, or of a name, that are shown
_LISTED = 100  # problems that are listed
_COMPARED = 20  # unknown keys of a section for which a similar key is suggested: each takes milliseconds


@dataclasses.dataclass(frozen=True, slots=True)
class ReadConfig:
    """What a run's TOML file says.

    Args:
        config: the configuration; wrong values are replaced by defaults, or by the smallest valid value.
        problems: of single sections, keys and values, one line each.
        moved: a line for each old name of a key.
    """

    config: RunConfig
    problems: list[str]
    moved: Sequence[str] = ()

    @property
    def wrong_sections(self) -> list[str]:
        """The sections with problems: what depends on their values cannot be checked yet."""
        return [
            name for name in section_types() if any(f"{name}." in text or f"[{name}]" in text for text in self.problems)
        ]

    def says_nothing_of(self, problem: str) -> bool:
        """Whether a problem is independent of the wrong sections, so that it remains when they are corrected."""
        wrong = self.wrong_sections
        layout = {"mesh", "model"}.intersection(wrong) and ("ranks" in problem or "the model" in problem)
        return not layout and not any(f"{name}." in problem for name in wrong)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's TOML file.

    Args:
        path: the file.
        overrides: `section.key=value`; the value is TOML, a bare word is a string.

    Raises:
        UsageError: the file cannot be read; or lists all of its problems.
    """
    read = read_config(path, overrides)
    if read.problems:
        raise problems_error(str(path), read.problems, fix=AFTERWARDS)
    return read.config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> ReadConfig:
    """The same, together with the problems of keys and values.

    Raises:
        UsageError: the file cannot be read.
    """
    tables, moved = with_moved_keys(_read_toml(Path(path)))
    moved += [old for text in overrides if (old := text.partition("=")[0].strip()) in MOVED_KEYS]
    problems = [problem for text in overrides if (problem := apply_override(tables, text))]
    config, more_problems = parse_config(tables)
    lines = [f"{old} is now {MOVED_KEYS[old]}; the old name works until 0.2" for old in dict.fromkeys(moved)]
    return ReadConfig(config or RunConfig(**_valid_sections(tables)), problems + more_problems, lines)


def with_moved_keys(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Parsed TOML with old names of keys replaced by the new ones, which win if both are there; and the old names."""
    current: dict[str, Any] = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    moved = []
    for old, new in MOVED_KEYS.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        table = current.get(section)
        if isinstance(table, dict) and key in table:
            value, new_table = table.pop(key), current.setdefault(new_section, {})
            if isinstance(new_table, dict):
                new_table.setdefault(new_key, value)
            moved.append(old)
    return current, moved


def _valid_sections(tables: Mapping[str, Any]) -> dict[str, Any]:
    """All sections, without unknown keys, and with valid values instead of wrong and missing ones."""
    values, (tables, _) = {}, _with_preset(tables)
    for name, section in section_types().items():
        table = _table(tables, name)
        if table is None and "." in name:
            continue
        arguments, _, _ = _parse_section(name, section, table if isinstance(table, Mapping) else {})
        for field in own_fields(section):
            hint = _hints(section)[field.name]
            if field.name in arguments and _value_problem("", arguments[field.name], hint):
                del arguments[field.name]
            if field.name not in arguments and field.default is dataclasses.MISSING:
                base, *ranges = get_args(hint) if get_origin(hint) is Annotated else (hint,)
                arguments[field.name] = base(ranges[0].low) if ranges else base()
        values[name] = section(**arguments)
    return _nested(values)


def parse_config(tables: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """(configuration, problems) from parsed TOML; the configuration is None if there are problems."""
    sections, (tables, _) = section_types(), with_moved_keys(tables)
    unknown = [name for name in tables if name not in sections]
    problems = [_unknown_section(name, tables[name]) for name in unknown[:_COMPARED]]
    problems += [f"there is no section [{_cut(name)}]" for name in unknown[_COMPARED:]]
    values: dict[str, Any] = {}
    missing: list[str] = []
    tables, unknown_preset = _with_preset(tables)
    for name, section in sections.items():
        table = _table(tables, name)
        if table is None and "." in name:
            continue
        table = {} if table is None else table
        if not isinstance(table, Mapping):
            problems.append(f"{name} = {_shown(table)} is not a section; write [{name}] and put its keys below it")
            continue
        arguments, section_problems, section_missing = _parse_section(name, section, table)
        section_problems += unknown_preset if name == "model" else []
        problems += section_problems
        missing += section_missing
        if not section_problems and not section_missing:
            values[name] = section(**arguments)
    problems += [_missing_keys(missing)] if missing else []
    return (None if problems else RunConfig(**_nested(values))), problems


def _table(tables: Mapping[str, Any], name: str) -> Any:
    """The table of a section in parsed TOML, without sub-sections; None: it is not there, or empty and needs no key."""
    outer, dot, inner = name.partition(".")
    table = tables.get(outer)
    if not isinstance(table, Mapping):
        return None if dot else table
    if dot:
        table = table.get(inner)
        needs = any(field.default is dataclasses.MISSING for field in own_fields(section_types()[name]))
        return None if table == {} and not needs else table
    return {key: value for key, value in table.items() if key not in sub_sections(outer)}


@functools.cache
def sub_sections(section: str) -> tuple[str, ...]:
    """The names of a section's sub-sections."""
    return tuple(name.removeprefix(f"{section}.") for name in section_types() if name.startswith(f"{section}."))


def own_keys(section: str) -> tuple[str, ...]:
    """The keys of a section, without its sub-sections."""
    return tuple(_hints(section_types()[section]))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by name, with each sub-section as a field of its section."""
    nested = {name: section for name, section in values.items() if "." not in name}
    for name, section in values.items():
        outer, dot, inner = name.partition(".")
        if dot:
            nested[outer] = dataclasses.replace(nested[outer], **{inner: section})
    return nested


def section_of(config: RunConfig, name: str) -> Any:
    """A section, or a sub-section such as "model.gpt_neox"; None: the sub-section is not set."""
    return functools.reduce(getattr, name.split("."), config)


def _with_preset(tables: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The tables, [model] completed with the values of its preset; the problem with the preset's name, if any."""
    table = tables.get("model")
    preset = table.get("preset") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(preset, str) or not preset:
        return tables, []
    if preset not in PRESETS:
        like = presets_like(preset)
        hint = f"; did you mean {like}?" if like else f"; expected one of {', '.join(PRESETS)}"
        problem = f"model.preset is {_shown(preset)}, which does not exist{hint}"
        return {**tables, "model": {**PRESETS["gpt2"], **table, "preset": None}}, [problem]  # nothing else is missing
    merged = {**PRESETS[preset], **table}
    for name in sub_sections("model"):
        if isinstance(written := table.get(name, {}), Mapping) and name in PRESETS[preset]:
            merged[name] = {**PRESETS[preset][name], **written}
    return {**tables, "model": merged}, []


def value_problems(config: RunConfig) -> list[str]:
    """Wrong types and ranges in a configuration that was built in Python; load_config has already checked its own."""
    return [
        problem
        for name, section in section_types().items()
        if (values := section_of(config, name)) is not None
        for key, hint in _hints(section).items()
        if (problem := _value_problem(f"{name}.{key}", getattr(values, key), hint))
    ]


def setting_problem(name: str, value: Any) -> str | None:
    """Why section.key cannot have this value (unknown key, wrong type or range); None: it can."""
    section, _, key = name.rpartition(".")
    section_type = section_types().get(section)
    if section_type is None:
        return _unknown_section(section, {})
    hints = _hints(section_type)
    if key not in hints:
        return _unknown_key(section, key, hints)
    return _value_problem(name, _converted(value, hints[key]), hints[key])


def is_old_not_set(name: str, value: Any) -> bool:
    """Whether files before 0.1 say with this value that section.key is not set."""
    section, _, key = name.rpartition(".")
    of_values = _if_set(_hints(section_types()[section])[key])
    return of_values is not None and _says_not_set(value, of_values)


def expected_value(name: str) -> str:
    """The type and range of section.key, as text."""
    section, _, key = name.rpartition(".")
    return _expectation(_hints(section_types()[section])[key])


def listed_values(name: str) -> tuple[str, ...]:
    """The values of section.key if they can be listed."""
    section, _, key = name.rpartition(".")
    return _listed_values(_hints(section_types()[section])[key])


def _listed_values(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    if get_origin(hint) is Literal:
        return tuple(choice for choice in get_args(hint) if choice)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for member in get_args(hint) for value in _listed_values(member))
    return ()


def dump_config(config: RunConfig) -> str:
    """The configuration as TOML, with defaults and overrides; load_config reads the same configuration back."""
    import tomli_w

    tables: dict[str, Any] = _without_none(dataclasses.asdict(config))
    # A key that is absent would have the preset's value.
    of_preset = PRESETS.get(config.model.preset or "", {})
    tables["model"] |= {key: 0 for key in of_preset if getattr(config.model, key) is None}
    return tomli_w.dumps(tables)


def inline_toml(value: object) -> str:
    """A value as one line of TOML, as a user would write it: ["a", "b"], where tomli_w takes four lines."""
    import tomli_w

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline_toml, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without keys that are not set."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def problems_error(
    where: str, problems: Sequence[str], *, fix: str | None = None, kind: type[MdataError] = UsageError
) -> MdataError:
    """One error for all problems of a configuration: a sentence for one, a list for many."""
    if len(problems) == 1:
        return kind(f"{where}: {problems[0]}", fix=fix)
    lines = "".join("\n  - " + problem.replace("\n", "\n    ") for problem in problems[:_LISTED])
    lines += f"\n  - and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return kind(f"{where} has {counted(len(problems), 'problem')}:{lines}", fix=fix)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = regular_file(path).read_bytes()
    except OSError as error:
        explained = explain_os_error(error, "reading the configuration")
        if not isinstance(explained, UsageError):
            raise explained from error
        fix = "give the path of a run's TOML file; mtrain init writes one"
        if error.errno == errno.EISDIR and (path / "config.toml").is_file():
            fix = f"{path / 'config.toml'}, the configuration of this run folder"
        raise UsageError(f"cannot read the configuration {path}", found=error.strerror, fix=fix) from error
    try:
        return load_toml(text.decode())
    except UnicodeDecodeError as error:
        found = f"not UTF-8: byte 0x{text[error.start]:02x} at byte {error.start + 1}"
        raise UsageError(f"{path} is not a TOML file", found=found, fix="save it as UTF-8 text") from error
    except ValueError as error:  # not TOML, a number of 5,000 digits, nested too deep
        fix = "correct that line" if path.suffix == ".toml" else "give a run's TOML file; mtrain init writes one"
        raise UsageError(f"{path} is not a TOML file", found=str(error), fix=fix) from error


# get_type_hints compiles every annotation at each call.
@functools.cache
def section_types() -> Mapping[str, type]:
    """The sections by name; a sub-section such as "model.gpt_neox" follows its section."""
    sections = {}
    for name, section in get_type_hints(RunConfig).items():
        sections[name] = section
        for key, hint in get_type_hints(section).items():
            if subsection := _subsection(hint):
                sections[f"{name}.{key}"] = subsection
    return types.MappingProxyType(sections)


@functools.cache
def _hints(section: type) -> Mapping[str, Any]:
    """The types of a section's keys, without sub-sections."""
    hints = get_type_hints(section, include_extras=True)
    return types.MappingProxyType({key: hint for key, hint in hints.items() if not _subsection(hint)})


def own_fields(section: type) -> list[dataclasses.Field[Any]]:
    """The fields of a section that are keys."""
    return [field for field in dataclasses.fields(section) if field.name in _hints(section)]


def _subsection(hint: Any) -> type | None:
    """The dataclass of a field that is a sub-section or None."""
    hint = _if_set(hint) or hint
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def apply_override(tables: dict[str, Any], text: str) -> str | None:
    """Put one override into the parsed TOML; the problem with its form, if any."""
    name, equals, value = text.partition("=")
    name = MOVED_KEYS.get(name.strip(), name)
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not section or not key:
        if asks_to_resume(name):
            return f"{_cut(repr(text))} is not an override; {RESUME_ADVICE}"
        meant = nearest(name.strip(), key_names()) if equals and name.strip().isidentifier() else None
        example = f"{meant}={value}" if meant else "train.steps=100"
        return f"{_cut(repr(text))} is not an override; expected section.key=value, such as {example}"
    table = tables.setdefault(section, {})
    subsection, _, inner = name.strip().rpartition(".")
    if subsection in section_types() and isinstance(table, dict):
        section, key = subsection, inner
        table = table if "." not in subsection else table.setdefault(subsection.partition(".")[2], {})
    if isinstance(table, dict):
        section_type = section_types().get(section)
        table[key] = _override_value(value.strip(), _hints(section_type).get(key) if section_type else None)
    return None


def _override_value(text: str, hint: Any) -> Any:
    """Parse a TOML value; text that is not TOML, and every unquoted value of a string field, is the string itself.

    `none` means not set, for a key that may be not set.
    """
    if of_values := _if_set(hint):
        return None if text == "none" else _override_value(text, of_values)
    try:
        parsed = load_toml(f"value = {text}")
    except ValueError:
        return text
    if set(parsed) != {"value"} or (hint is str and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _parse_section(name: str, section: type, table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The arguments of a section, the problems of its keys, and the names of those that are missing."""
    hints = _hints(section)
    unknown = [key for key in table if key not in hints]
    problems = [_unknown_key(name, key, hints) for key in unknown[:_COMPARED]]
    problems += [f"there is no key {_cut(f'{name}.{key}')}" for key in unknown[_COMPARED:]]
    arguments: dict[str, Any] = {}
    missing = []
    for field in own_fields(section):
        where, hint = f"{name}.{field.name}", hints[field.name]
        if field.name in table:
            arguments[field.name] = _converted(table[field.name], hint)
            problem = _value_problem(where, arguments[field.name], hint)
            problems += [problem] if problem else []
        elif field.default is dataclasses.MISSING:
            missing.append(where)
    return arguments, problems, missing


def _missing_keys(names: Sequence[str]) -> str:
    """One problem for all of them: an empty file lacks nine."""
    if len(names) == 1:
        return f"{names[0]} is missing; it is required: {expected_value(names[0])}"
    return f"required and missing: {', '.join(f'{name} ({expected_value(name)})' for name in names)}"


def _unknown_section(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"there is no section [{_cut(name)}]{_suggestion(name, section_types())}"
    near = nearest(name, key_names())
    section, _, key = near.rpartition(".") if near else ("", "", "")
    fix = f"write it below [{section}]" if key == name else f"did you mean {near}?" if near else "see mtrain config"
    return f"{_cut(name)} = {_shown(value)} is in no section; {fix}"


def _unknown_key(section: str, key: str, hints: Mapping[str, Any]) -> str:
    exactly = next((name for name in key_names() if name.endswith(f".{key}")), None)
    if exactly is None and asks_to_resume(key):
        return f"there is no key {_cut(f'{section}.{key}')}; {RESUME_ADVICE}"
    elsewhere = exactly or (None if nearest(key, hints) else nearest(key, key_names()))
    hint = f"; did you mean {elsewhere}?" if elsewhere else _suggestion(key, hints)
    return f"there is no key {_cut(f'{section}.{key}')}{hint}"


def key_names() -> list[str]:
    """Every setting of a run, as section.key."""
    return [f"{name}.{key}" for name, section in section_types().items() for key in _hints(section)]


def _suggestion(name: str, names: Mapping[str, Any]) -> str:
    near = nearest(name, names)
    one_of = "one of " if len(names) > 1 else ""
    return f"; did you mean {near}?" if near else f"; expected {one_of}{', '.join(names)}"


def _if_set(hint: Any) -> Any | None:
    """The type of a key's values when it is set; None for a key that always has a value."""
    if get_origin(hint) not in (Union, types.UnionType) or types.NoneType not in get_args(hint):
        return None
    (of_values,) = (member for member in get_args(hint) if member is not types.NoneType)
    return of_values


def _converted(value: Any, hint: Any) -> Any:
    """A TOML value as the field stores it: integers are accepted as floats, arrays become tuples.

    For "not set", files before 0.1 have "", or 0 where that is not a value of the key.
    """
    if of_values := _if_set(hint):
        return None if value is None or _says_not_set(value, of_values) else _converted(value, of_values)
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if base is float and _fits(value, int):
        return float(value)
    if isinstance(value, list):
        (item,) = {*get_args(hint)} - {...} if get_origin(hint) is tuple else (None,)
        return tuple(_converted(each, item) for each in value)
    return value


def _says_not_set(value: Any, of_values: Any) -> bool:
    if value == 0 and value is not False:
        return not _fits(_converted(0, of_values), of_values)
    return bool(value == "")


def _value_problem(where: str, value: Any, hint: Any) -> str | None:
    if _fits(value, hint):
        return None
    return f"{where} is {_shown(value)}; expected {_expectation(hint)}{_correction(value, hint)}"


def _correction(value: Any, hint: Any) -> str:
    """What a value most likely meant: a misspelt choice, a word instead of a list, 1e3 instead of 1000."""
    if isinstance(value, float) and value.is_integer() and _fits(int(value), hint):
        return f"; did you mean {int(value)}?"
    is_list = get_origin(hint) is tuple
    if is_list and value == "none":
        return "; did you mean []?"
    choices = _listed_values(get_args(hint)[0] if is_list else hint)
    words = value if is_list and isinstance(value, tuple) else (value,)
    near = [word if word in choices else nearest(word, choices) for word in words if isinstance(word, str)]
    if not choices or not near or None in near or len(near) < len(words):
        return ""
    return f"; did you mean {inline_toml(near) if is_list else near[0]}?"


def value_text(value: Any) -> str:
    """The value of a key for a message: as Python writes it, or "not set"."""
    return "not set" if value is None else repr(value)


def _shown(value: Any) -> str:
    """A value shortened for a message."""
    if type(value) is int and not _fits(value, int):
        return f"a number of {value.bit_length()} bits"
    text = repr(list(value) if isinstance(value, tuple) else value)
    if isinstance(value, str) and not _fits(value, str):
        text += ", which is not UTF-8"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Annotated:
        base, allowed = get_args(hint)
        return _fits(value, base) and bool(allowed.low <= value < allowed.below)
    if origin is Literal:
        return type(value) is str and value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if type(value) is not hint:
        return False
    if hint is str:  # not printable: bytes of the command line that are not UTF-8
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return hint is not int or -(1 << 63) <= value < 1 << 63


def _expectation(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        base, allowed = get_args(hint)
        return f"{_expectation(base)} {allowed}"
    if origin is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin in (Union, types.UnionType):
        return " or ".join(_expectation(member) for member in get_args(hint) if member is not types.NoneType)
    if origin is tuple and get_origin(get_args(hint)[0]) is Literal:
        return f"a list of {', '.join(repr(choice) for choice in get_args(get_args(hint)[0]))}"
    if origin is tuple:
        item = get_args(hint)[0]
        of_items: dict[Any, str] = {
            str: 'a list of strings, such as ["a", "b"]',
            float: "a list of numbers, as [1.0, 1.5]",
            int | str: 'a list of strings and integers, such as ["a", 2]',
        }
        return of_items.get(item, "a list of integers, as [2, 1]")
    words: Mapping[type, str] = types.MappingProxyType(
        {int: "integer", float: "number", bool: "true or false", str: "a string"}
    )
    return words[hint]
