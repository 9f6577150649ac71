"""The docs site: its generated pages are complete, its navigation has every page, and what cites a page names one."""

from __future__ import annotations

import re
import runpy

import pytest

import mdata
from cli import mdata as mdata_command
from cli import mtrain as mtrain_command
from tests.helpers.house_rules import ROOT, texts
from trainer.config.describe import describe
from trainer.migrate.flags import flag_table

SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
PAGES = {name: page() for name, page in SITE["PAGES"].items()}
CITED = re.compile(r"\bdocs/[\w/-]+\.md\b")
# How the guides give defaults: `section.key` (default 10), `key` (1,000), or a value of a key: "1f1b" (default).
DEFAULT_OF_KEY = re.compile(r"""`([a-z]\w*(?:\.\w+)?)` \((?:default )?(2\^\d+|\d[\d,.]*|"\w+")[;,)]""")
DEFAULT_VALUE = re.compile(r"""`([a-z]+\.\w+)(?:`| = )|"(\w+)"`? \(default\b""")


def test_every_setting_has_a_row():
    sections = re.split(r"^## `\[([\w.]+)\]`$", PAGES["reference/config.md"], flags=re.MULTILINE)[1:]
    rows = {
        f"{section}.{line.split('`')[1]}"
        for section, text in zip(sections[::2], sections[1::2], strict=True)
        for line in text.splitlines()
        if line.startswith("| `")
    }
    assert rows == {key.name for key in describe()}


def test_bars_in_the_code_of_tables_have_no_backslash():
    page = r"<p><code>a\|b</code></p><table><td>\|<code>&lt;\|im_end\|&gt;</code></td><td style=''>x\|</td></table>"
    expected = page.replace(r"&lt;\|im_end\|&gt;", "&lt;|im_end|&gt;")
    assert SITE["on_page_content"](page, page=None, config=None, files=None) == expected


def test_options_of_commands_stay_whole():
    page = '<p>a --b-c</p><div class="language-bash highlight"><pre><code>a<i> </i>--b-c d</code></pre></div>'
    expected = page.replace("</i>--b-c", '</i><span class="option">--b-c</span>')
    assert SITE["on_page_content"](page, page=None, config=None, files=None) == expected


def test_no_page_has_a_token_that_a_browser_takes_for_a_tag():
    """Such as <pad>, which is to be code; comments mark what a test runs."""
    assert "a piece &lt;pad>, id 3" in PAGES["reference/python.md"]
    pages = PAGES | {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    for name, text in pages.items():
        prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
        assert not re.search(r"<[/a-z]", prose), (name, re.findall(r"<[/a-z].{20}", prose))


def test_defaults_in_prose_are_those_of_the_settings():
    keys = {key.name: key for key in describe()}
    compared, wrong = 0, []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text, last = " ".join(path.read_text(encoding="utf-8").split()), ""
        stated = []
        for name, value in DEFAULT_OF_KEY.findall(text):
            number = float(2 ** int(value[2:])) if value.startswith("2^") else value.strip('"').replace(",", "")
            stated += [(name, number)]
        for name, value in DEFAULT_VALUE.findall(text):
            last = name or last
            stated += [(last, value)] if value else []
        for name, value in stated:
            defaults = [key.default for full, key in keys.items() if name in (full, full.partition(".")[2])]
            compared += bool(defaults)
            if defaults and not any(_number(default) == _number(value) for default in defaults):
                wrong.append(f"{path.name}: {name} {value}, here {defaults}")
    assert not wrong and compared >= 6


def _number(value: object) -> float | object:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value


def test_every_command_has_its_help():
    page = PAGES["reference/commands.md"]
    for program in (mdata_command, mtrain_command):
        name = program.__name__.rpartition(".")[2]
        for command in program.COMMANDS:
            assert f"\n### {name} {command.name}\n\n```text\nusage: {name} {command.name}" in page


def test_every_public_name_has_its_docstring():
    page = PAGES["reference/python.md"]
    for name in mdata.__all__:
        if not name.startswith("__"):
            entry = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
            assert len(entry.partition("\n```\n")[2].strip()) > 10, name


def test_every_argument_of_megatron_is_in_the_table():
    page = PAGES["reference/megatron_training.md"]
    assert "| `--num-layers`, `--encoder-num-layers` | `model.num_layers` |  |" in page
    assert set(re.findall(r"`(--[\w-]+)`", page)) >= set(flag_table())


def test_the_navigation_has_every_page_once():
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages | PAGES.keys())


def test_every_room_is_drawn_once():
    drawing = (ROOT / "docs/design/map.md").read_text().split("```")[1]
    rooms = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/__init__.py")]
    rooms = [room for room in rooms if room.startswith(("mdata/", "trainer/"))]
    assert sorted(re.findall(r"(?:mdata|trainer)/\w+", drawing)) == sorted(rooms)


@pytest.mark.parametrize("source", [source for source in texts() if CITED.search(source.text)], ids=lambda s: s.path)
def test_pages_that_are_cited_exist(source):
    if source.path in ("CHANGELOG.md", "tests/test_docs_site.py"):
        return
    missing = {
        page
        for page in CITED.findall(source.text)
        if not (ROOT / page).exists() and page.removeprefix("docs/") not in PAGES
    }
    assert not missing
