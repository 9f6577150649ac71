"""`clean`: texts repaired and filtered by steps, as new files or as rows to leave out.

The steps run in a fixed order, however they are listed. A step changes texts, removes them with a reason, or both;
a removed text is not examined again. A step's version changes when its results do, and is recorded with the versions of
the libraries it uses.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mdata import _core
from mdata.cleaning import openwebtext, rules
from mdata.cleaning.languages import Identify, LanguageRules, language_reasons, load_identifier
from mdata.cleaning.text_job import KEEP, Edit, TextBatch, TextJobOptions, TextJobResult, TextWork, run_text_job
from mdata.cleaning.text_repair import fixed, ftfy_version, plain_punctuation
from mdata.cleaning.urls import UrlFilter, UrlRules, tldextract_version
from mdata.errors import UsageError
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer

# These libraries ask Python for normal forms and case.
_NORMAL_FORMS: Mapping[str, str] = MappingProxyType({"python_unicode": unicodedata.unidata_version})
# Step -> (version, whether it changes texts).
STEPS: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {
        "fix": (1, True),
        "punctuation": (1, True),
        "url": (1, False),
        "language": (1, False),
        "length": (1, False),
        "gopher": (1, False),
        "gopher-repetition": (1, False),
        "c4": (1, True),
        "paragraphs": (1, False),
        "fineweb": (1, False),
        "collapse": (1, True),
        "openwebtext": (1, True),
    }
)


@dataclass(frozen=True, kw_only=True)
class CleanRules:
    """The steps of a job, with their rules.

    Args:
        steps: names of STEPS.
        url, language, length, gopher, gopher_repetition, c4, paragraphs, fineweb: of the steps of these names.
        compat: "openwebtext": judge addresses as its tools did.
        openwebtext_tasks: of its second tool; empty: use its first one.
        tokenizer: of step openwebtext; GPT-2's, for the same results.
    """

    steps: tuple[str, ...]
    url: UrlRules = field(default_factory=UrlRules)
    language: LanguageRules = field(default_factory=LanguageRules)
    length: rules.LengthRules = field(default_factory=rules.LengthRules)
    gopher: rules.GopherRules = field(default_factory=rules.GopherRules)
    gopher_repetition: rules.RepetitionRules = field(default_factory=rules.RepetitionRules)
    c4: rules.C4Rules = field(default_factory=rules.C4Rules)
    paragraphs: rules.ParagraphRules = field(default_factory=rules.ParagraphRules)
    fineweb: rules.FineWebRules = field(default_factory=rules.FineWebRules)
    compat: str | None = None
    openwebtext_tasks: tuple[str, ...] = ()
    tokenizer: TokenizerSpec | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise UsageError("clean has no step", expected=f"some of {', '.join(STEPS)}")
        if unknown := sorted(set(self.steps) - STEPS.keys()):
            raise UsageError(f"there is no step {unknown[0]}", expected=f"some of {', '.join(STEPS)}")
        if self.compat not in (None, "openwebtext"):
            raise UsageError(f"compat={self.compat}", expected="openwebtext")
        if unknown := sorted(set(self.openwebtext_tasks) - set(openwebtext.TASKS)):
            expected = f"some of {', '.join(openwebtext.TASKS)}"
            raise UsageError(f"OpenWebText has no task {unknown[0]}", expected=expected)
        if "openwebtext" in self.steps and not self.openwebtext_tasks and self.tokenizer is None:
            raise UsageError(
                "OpenWebText counts GPT-2's tokens in short texts",
                fix="--vocab-file vocab.json --merge-file merges.txt",
            )
        for step in self.ordered:
            if dataclasses.is_dataclass(step_rules := self.of(step)):
                rules.check_rules(step, step_rules)

    @property
    def ordered(self) -> tuple[str, ...]:
        """The steps in the order in which they run."""
        return tuple(step for step in STEPS if step in self.steps)

    @property
    def changing(self) -> tuple[str, ...]:
        """The steps that change texts, rather than only remove rows."""
        return tuple(step for step in self.ordered if STEPS[step][1])

    def of(self, step: str) -> Any:
        """The rules of a step; None if it has no options."""
        return getattr(self, step.replace("-", "_"), None)

    def record(self) -> dict[str, Any]:
        """Everything that decides the result: steps with versions, thresholds and libraries, as JSON.

        Raises:
            UsageError: a library of a step is not installed.
        """
        steps = []
        for step in self.ordered:
            entry: dict[str, Any] = {"step": step, "version": STEPS[step][0]}
            if dataclasses.is_dataclass(step_rules := self.of(step)):
                entry |= dataclasses.asdict(step_rules)  # type: ignore[arg-type]
            steps.append(entry | self._libraries(step))
        compat = {"compat": self.compat} if self.compat else {}
        return {"steps": steps, "unicode": _core.text_classes_unicode(), **compat}

    def _libraries(self, step: str) -> dict[str, Any]:
        if step == "url":
            return {"tldextract": tldextract_version(), "lists": UrlFilter(self.url).fingerprint}
        if step == "language":
            return {self.language.identifier: load_identifier(self.language.identifier)[1], **_NORMAL_FORMS}
        if step == "openwebtext":
            tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer).fingerprint
            others = {"langdetect": load_identifier("langdetect")[1], "tokenizer": tokenizer}
            return {"tasks": list(self.openwebtext_tasks), "ftfy": ftfy_version(), **others, **_NORMAL_FORMS}
        return {"ftfy": ftfy_version(), **_NORMAL_FORMS} if step == "fix" else {}


# (texts not yet removed, their addresses) -> (texts, reasons)
_Apply = Callable[[list[str], list[str]], tuple[list[str], list[str]]]


class Cleaner:
    """The steps, ready to run."""

    def __init__(self, clean_rules: CleanRules) -> None:
        self._steps = [_loaded(step, clean_rules) for step in clean_rules.ordered]

    def clean(self, texts: list[str], urls: Sequence[str]) -> tuple[list[str], list[str]]:
        """(texts after all steps; why each was removed, or "")."""
        texts = list(texts)
        reasons = [""] * len(texts)
        alive = list(range(len(texts)))
        for apply in self._steps:
            changed, why = apply([texts[row] for row in alive], [urls[row] for row in alive] if urls else [])
            for row, text, reason in zip(alive, changed, why, strict=True):
                texts[row], reasons[row] = text, reason
            alive = [row for row in alive if not reasons[row]]
        return texts, reasons


def _loaded(step: str, clean_rules: CleanRules) -> _Apply:
    """A step with its libraries and lists loaded."""
    of_step = clean_rules.of(step)
    if step == "url":
        refuse = UrlFilter(of_step, compat=clean_rules.compat == "openwebtext").reason
        return lambda texts, urls: (texts, [refuse(url) for url in urls])
    if step == "language":
        identify, _ = load_identifier(of_step.identifier)
        return lambda texts, _: (texts, language_reasons(texts, of_step, identify))
    if step == "openwebtext":
        return _openwebtext(clean_rules, load_identifier("langdetect")[0])
    if step == "c4":
        return lambda texts, _: rules.c4_texts(texts, of_step)
    if step in _CHANGES:
        return lambda texts, _: (_CHANGES[step](texts), [""] * len(texts))
    return lambda texts, _: (texts, _REASONS[step](texts, of_step))


def _openwebtext(clean_rules: CleanRules, identify: Identify) -> _Apply:
    if clean_rules.openwebtext_tasks:
        return lambda texts, _: openwebtext.fixed_by_tasks(texts, clean_rules.openwebtext_tasks, identify)
    assert clean_rules.tokenizer is not None, "checked before"
    tokenizer = load_tokenizer(clean_rules.tokenizer)

    def count_tokens(texts: list[str]) -> list[int]:
        return tokenizer.encode_batch(texts)[1].tolist() if texts else []

    return lambda texts, _: openwebtext.cleaned(texts, identify, count_tokens)


_CHANGES: Mapping[str, Callable[[list[str]], list[str]]] = MappingProxyType(
    {"fix": fixed, "punctuation": plain_punctuation, "collapse": _core.collapsed}
)
_REASONS: Mapping[str, Callable[[list[str], Any], list[str]]] = MappingProxyType(
    {
        "length": rules.length_reasons,
        "gopher": rules.gopher_reasons,
        "gopher-repetition": rules.repetition_reasons,
        "paragraphs": rules.paragraph_reasons,
        "fineweb": rules.fineweb_reasons,
    }
)


@dataclass
class _Clean:
    """See `TextWork`."""

    rules: CleanRules
    cleaner: Cleaner | None = None

    name, writes = "clean", True

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.rules.url.key,) if "url" in self.rules.steps else ()

    def record(self) -> dict[str, Any]:
        return self.rules.record()

    def prepare(self) -> None:
        self.cleaner = Cleaner(self.rules)

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        assert self.cleaner is not None, "prepared before"
        cleaned, reasons = self.cleaner.clean(batch.texts, batch.others[0] if batch.others else [])
        edits = [
            Edit(reason) if reason else KEEP if new == text else Edit(texts=(new,))
            for text, new, reason in zip(batch.texts, cleaned, reasons, strict=True)
        ]
        return edits, Counter()

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return {}


def clean(options: TextJobOptions, rules: CleanRules, progress: Progress = SILENT) -> TextJobResult:
    """Repair and filter texts; an interrupted command continues.

    Raises:
        UsageError: unusable options, rules or input, or the folder holds a result of other options.
        BadInputError: a bad row, compressed data or parquet is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    return run_text_job(options, clean_work(options, rules), progress)


def clean_work(options: TextJobOptions, rules: CleanRules) -> TextWork:
    """The work on the texts of a job.

    Raises:
        UsageError: options and rules that do not go together.
    """
    if options.rows_only and rules.changing:
        raise UsageError(
            f"rows_only writes no texts, and these steps change them: {', '.join(rules.changing)}",
            fix="leave one of the two out",
        )
    return _Clean(rules)
