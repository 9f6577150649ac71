"""Repair and filter web text by rules, in a fixed order of steps.

Steps change texts or remove rows. A threshold that is -1 is switched off. The output folder gets a file of JSON lines
for each input file, and clean.report, which counts removed rows by the threshold that they missed. An interrupted
command continues.

Steps, in the order in which they run:
  fix                mojibake, entities and line ends, by ftfy
  punctuation        quotes, dashes and blanks become ASCII's
  url                blocked or malformed addresses (--url-key) fall
  language           other languages than --languages fall
  length             limits on characters and words
  gopher             Gopher's rules on quality
  gopher-repetition  Gopher's rules on repetition
  c4                 C4's rules: lines are cut, texts fall
  paragraphs         mC4's rule: three lines of 200 characters
  fineweb            FineWeb's rules
  collapse           runs of blanks and newlines become a blank

Examples:
  mdata clean --input web.jsonl --steps fix language gopher-repetition gopher fineweb --output clean
  mdata clean --input clean --steps gopher --gopher-min-words 20 --rows-only --output short
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any

from mdata import UsageError
from mdata.cleaning.clean import STEPS, CleanRules, clean, clean_work
from mdata.cleaning.languages import LanguageRules
from mdata.cleaning.openwebtext import TASKS
from mdata.cleaning.rules import C4Rules, FineWebRules, GopherRules, LengthRules, ParagraphRules, RepetitionRules
from mdata.cleaning.text_job import TextJobOptions, TextWork
from mdata.cleaning.urls import UrlRules
from mdata.errors import explain_os_error
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.util.config_text import parse_toml

from .console import Console, Parser
from .text_job_options import add_text_job, facts_of, text_job_of, text_of

_NAMED = tuple(step for step in STEPS if step != "openwebtext")
# Step -> its rules, whose fields are options.
_RULES: dict[str, Any] = {
    "length": LengthRules,
    "gopher": GopherRules,
    "gopher-repetition": RepetitionRules,
    "c4": C4Rules,
    "paragraphs": ParagraphRules,
    "fineweb": FineWebRules,
}


def add_arguments(parser: Parser) -> None:
    """Input, output, steps and every threshold."""
    add_text_job(parser)
    add = parser.add_argument
    add("--config", action=_Config, metavar="FILE", help="TOML with options in [clean]; the command line overrides it")
    add("--steps", nargs="+", choices=_NAMED, default=(), metavar="STEP", help="what is done, see above")
    url, language = UrlRules(), LanguageRules()
    add("--url-key", default=url.key, metavar="KEY", help="key or column of the address (default: url)")
    add("--url-domains", default="", metavar="FILE", help="blocked names, one a line (default: OpenWebText's)")
    add("--url-endings", default="", metavar="FILE", help="blocked endings, one a line (default: OpenWebText's)")
    add("--url-min-characters", type=int, default=url.min_characters, metavar="N", help="of an address (default: 9)")
    add("--languages", nargs="+", default=language.keep, metavar="CODE", help="that stay (default: en)")
    add("--language-min-probability", type=float, default=0.0, metavar="P", help="of the language (default: 0)")
    add(
        "--language-identifier",
        choices=("py3langid", "langdetect", "cld2"),
        default=language.identifier,
        help="the library that names languages (default: py3langid)",
    )
    add(
        "--language-first-characters",
        type=int,
        default=language.first_characters,
        metavar="N",
        help="how much of a text is looked at; -1: all (default: 2000)",
    )
    for step, rules in _RULES.items():
        _add_rules(parser, step, rules())
    add("--compat", choices=("openwebtext",), help="do what Megatron-LM's tools/openwebtext did, in place of steps")
    add("--openwebtext-tasks", nargs="+", choices=TASKS, default=(), metavar="TASK", help="those of its second tool")
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, for --compat openwebtext")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt, for --compat openwebtext")


class _Config(argparse.Action):
    """Options from the table [clean] of a TOML file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Set what is not given on the command line."""
        assert isinstance(parser, Parser), "the parser of a command"
        try:
            table = parse_toml(Path(values).read_text(encoding="utf-8")).get("clean")
        except OSError as error:
            raise explain_os_error(error, "reading --config") from error
        except ValueError as error:
            raise UsageError(f"{values} is not TOML", found=str(error)) from error
        if not isinstance(table, dict):
            raise UsageError(f"{values} has no table [clean]", expected="[clean] with keys such as gopher-min-words")
        parser.set_from_file(namespace, table, place=f"{values}: [clean]")


def _add_rules(parser: Parser, step: str, rules: Any) -> None:
    types = typing.get_type_hints(type(rules))
    for field in dataclasses.fields(rules):
        option, value = f"--{step}-{field.name.replace('_', '-')}", getattr(rules, field.name)
        if types[field.name] is bool:
            help = f"step {step}: leave this rule out"
            parser.add_argument(
                f"--no-{step}-{field.name.replace('_', '-')}",
                dest=_place(step, field.name),
                action="store_false",
                help=help,
            )
        elif isinstance(value, tuple):
            help = f"step {step} (default: {' '.join(value)})"
            parser.add_argument(
                option, nargs="+", default=value, metavar="WORD", dest=_place(step, field.name), help=help
            )
        else:
            help = f"step {step} (default: {value:g})" if value >= 0 else f"step {step} (default: none)"
            parser.add_argument(
                option, type=types[field.name], default=value, metavar="N", dest=_place(step, field.name), help=help
            )


def _place(step: str, name: str) -> str:
    return f"{step}_{name}".replace("-", "_")


def rules_of(arguments: argparse.Namespace) -> CleanRules:
    """The rules that were given.

    Raises:
        UsageError: options that do not go together.
    """
    if bool(arguments.steps) == bool(arguments.compat):
        raise UsageError(
            "clean needs steps, or --compat openwebtext", expected=f"--steps with some of {', '.join(_NAMED)}"
        )
    given: dict[str, Any] = {}
    for step, rules in _RULES.items():
        values = {field.name: getattr(arguments, _place(step, field.name)) for field in dataclasses.fields(rules)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        given[step.replace("-", "_")] = rules(**values)
    tokenizer = None
    if arguments.vocab_file or arguments.merge_file:
        tokenizer = TokenizerSpec(
            type="GPT2BPETokenizer", vocab_file=arguments.vocab_file, merge_file=arguments.merge_file
        )
    return CleanRules(
        steps=("openwebtext",) if arguments.compat else tuple(arguments.steps),
        url=UrlRules(
            key=arguments.url_key,
            domains=arguments.url_domains,
            endings=arguments.url_endings,
            min_characters=arguments.url_min_characters,
        ),
        language=LanguageRules(
            keep=tuple(arguments.languages),
            min_probability=arguments.language_min_probability,
            identifier=arguments.language_identifier,
            first_characters=arguments.language_first_characters,
        ),
        compat=arguments.compat,
        openwebtext_tasks=tuple(arguments.openwebtext_tasks),
        tokenizer=tokenizer,
        **given,
    )


def _idle(rules: CleanRules) -> list[str]:
    """Thresholds of steps that do not run, as options, each with the step that it needs."""
    used = rules.steps if rules.compat is None else tuple(_RULES)
    names = {step: step.replace("-", "_") for step in (*_RULES, "url", "language") if step not in used}
    idle = []
    for step, name in names.items():
        given = getattr(rules, name)
        for field in dataclasses.fields(given):
            default = getattr(type(given)(), field.name)
            if getattr(given, field.name) != default:
                option = f"--{'no-' if isinstance(default, bool) else ''}{step}-{field.name.replace('_', '-')}"
                option = option.replace("--language-keep", "--languages")
                idle.append(f"{option} (needs --steps {step})")
    return idle


def work_of(arguments: argparse.Namespace) -> tuple[TextJobOptions, TextWork]:
    """The options and the work, for `mdata launch`."""
    options = text_job_of(arguments)
    return options, clean_work(options, rules_of(arguments))


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `clean` and print what became of the rows."""
    options, rules = text_job_of(arguments), rules_of(arguments)
    if idle := _idle(rules):
        console.note(f"mdata: options without effect here: {', '.join(idle)}")
    with console.progress(continues=True) as progress:
        result = clean(options, rules, progress)
    console.result(text_of(result, rows_only=options.rows_only), facts_of(result))
