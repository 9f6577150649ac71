"""A hook of mkdocs: the generated pages of the docs site.

mkdocs.yml names this file. Nothing is written into docs/: `on_files` adds the pages to the site while it is built, from
the sections of trainer/config, the command tables, the public names and the table of Megatron-LM's arguments, so that
no page can be out of date.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from trainer.config.describe import ConfigKey


def config_page() -> str:
    """Every key of a run's TOML file, one table a section."""
    from trainer.config.describe import describe, section_texts

    lines = [
        "# Settings of a run",
        "",
        "Every key of the TOML file that `mtrain train` reads. `mtrain config` prints all of them as a file with their",
        "defaults; `mtrain config --key KEY` explains one.",
    ]
    for section, text in section_texts().items():
        lines += ["", f"## `[{section}]`", "", text, "", "| key | default | values | meaning |", "|---|---|---|---|"]
        for key in describe():
            if key.name.rpartition(".")[0] == section:
                lines.append(
                    _row(f"`{key.name.rpartition('.')[2]}`", _default(key), key.expected, _sentence(key.comment))
                )
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """The help of every command."""
    lines = ["# Commands", "", "What each command prints with `--help`."]
    for program in ("mdata", "mtrain"):
        module = importlib.import_module(f"cli.{program}")
        lines += ["", f"## {program}"]
        for command in module.COMMANDS:
            lines += ["", f"### {program} {command.name}", "", "```text", _help(module.main, command.name), "```"]
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """The public names of the packages, with their signatures and docstrings."""
    lines = ["# Python", "", "The public names of each package, with their docstrings."]
    for package in ("mdata", "trainer"):
        module = importlib.import_module(package)
        names = [name for name in getattr(module, "__all__", ()) if not name.startswith("__")]
        if names:
            lines += ["", f"## {package}", "", inspect.getdoc(module) or ""]
        for name in sorted(names, key=str.lower):
            lines += _entry(package, name, getattr(module, name))
    return "\n".join(lines) + "\n"


def megatron_page() -> str:
    """What becomes of every argument of Megatron-LM's training: mapped, not needed, refused."""
    from trainer.migrate.flags import flag_table

    flags = flag_table()
    lines = [
        "# Arguments of pretrain_gpt.py",
        "",
        "What [`mtrain config --from-megatron`](../howto/migrate.md#training) does with each argument of Megatron-Core",
        "0.12 to 0.20: mapped, not needed, or refused.",
        "",
        "| mapped | here | how |",
        "|---|---|---|",
    ]
    for flag in flags.values():
        if flag.use == "mapped" and not flag.same_as:
            names = [flag.name, *(other.name for other in flags.values() if other.same_as == flag.name)]
            lines.append(_row(_code(names), f"`{flag.key}`", flag.note))
    for use in ("not needed", "refused"):
        lines += ["", f"| {use} | why |", "|---|---|"]
        for reason in dict.fromkeys(flag.note for flag in flags.values() if flag.use == use):
            names = [flag.name for flag in flags.values() if flag.use == use and flag.note == reason]
            lines.append(_row(_code(names), reason))
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/config.md": config_page,
    "reference/commands.md": commands_page,
    "reference/python.md": python_page,
    "reference/megatron_training.md": megatron_page,
}


# Names in a table stay whole; on a narrow screen the table scrolls. A long command is wrapped, so that its end is seen.
SITE_CSS = """\
.md-typeset td code { word-break: normal; overflow-wrap: normal; }
.md-typeset td:first-child code { white-space: nowrap; }
.language-bash pre > code { white-space: pre-wrap; }
.language-bash .option { white-space: nowrap; }
"""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site, and its style."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    files.append(File.generated(config, "site.css", content=SITE_CSS))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Show `\\|` in the code of a table as a bar, and options of commands whole.

    Markdown needs the backslash there, and this converter keeps it. A browser would end a line inside an option.
    """
    commands = r'<div class="language-bash.*?</div>'
    html = re.sub(commands, lambda block: _OPTION.sub(_WHOLE, block[0]), html, flags=re.DOTALL)
    return re.sub(r"<td[ >].*?</td>", lambda cell: _CODE.sub(_with_bars, cell[0]), html, flags=re.DOTALL)


_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<=[\s>])--[\w-]+")
_WHOLE = r'<span class="option">\g<0></span>'


def _with_bars(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def _help(main: Callable[[list[str]], int], command: str) -> str:
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    assert code == 0, f"{command} --help ends with exit code {code}"
    return printed.getvalue().rstrip()


def _entry(package: str, name: str, value: object) -> list[str]:
    """The lines about one public name."""
    code = f"{package}.{name}"
    if callable(value):
        with contextlib.suppress(ValueError):  # a protocol has no signature
            parameters = [str(parameter) for parameter in inspect.signature(value).parameters.values()]
            code += _call([re.sub(r"'|<mdata\S* object at \w+>", _quoted, parameter) for parameter in parameters])
    lines = ["", f"### {name}", "", "```python", code, "```", "", *_docstring(inspect.getdoc(value) or "")]
    for method_name, method in vars(value).items() if isinstance(value, type) else ():
        documented = inspect.isfunction(method) and method.__doc__ and not method_name.startswith("_")
        if documented:
            lines.append(f"- `.{method_name}`: {(inspect.getdoc(method) or '').split(chr(10) * 2)[0]}")
    return lines


def _quoted(match: re.Match[str]) -> str:
    return "" if match[0] == "'" else "..."


def _call(parameters: list[str]) -> str:
    """The parameters in one line, or one a line where that is too long."""
    line = f"({', '.join(parameters)})"
    return line if len(line) < 90 else "(\n    " + ",\n    ".join(parameters) + ",\n)"


def _docstring(text: str) -> list[str]:
    """Markdown of a docstring; its indented sections (Args, Raises ...) become lists."""
    lines: list[str] = []
    for line in re.sub(r"(`[^`]*`)|<", lambda match: match[1] or "&lt;", text).splitlines():  # <pad> is no tag
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            lines += [f"**{line}**", ""]
        elif line.startswith("    ") and not line.startswith("     "):
            lines.append(f"- {line.strip()}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("     ") else line)
    return lines


def _sentence(comment: str) -> str:
    """The comment with a capital letter, unless it begins with a value or a key."""
    first = comment.partition(" ")[0]
    return comment if re.search(r"[_.:]", first) else comment[:1].upper() + comment[1:]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: ConfigKey) -> str:
    value = key.default
    if value is None:
        return "required" if key.required else key.not_set or "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{list(value) if isinstance(value, tuple) else value}`"
