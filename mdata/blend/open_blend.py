"""Making a blend: corpora and shares in, one manifest out; and opening what a manifest or Megatron's words name.

Shares stay the text that was given; where none is given, each corpus counts by its number of tokens, as in Megatron.
Corpora made with different tokenizers are refused, and so is the same corpus twice. What samples an open blend deals
depends on the run (its sequence length and split): `OpenBlend.deal`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UnsetType

from mdata.blend.compose import compose
from mdata.blend.data_path import WordLike, as_words
from mdata.blend.same_tokenizer import check_one_tokenizer, may_be_unknown
from mdata.blend.spec import (
    OK,
    REFUSE,
    BlendSpec,
    spec_of_csv,
    spec_of_mapping,
    spec_of_toml,
    spec_of_words,
)
from mdata.corpus.corpus import Corpus, open_corpus
from mdata.errors import DamageError, UsageError, errors_wanted_by, os_errors_named
from mdata.indexed.reader import Mode
from mdata.manifest.blend_schedule import caps_of, is_plain, schedules_of
from mdata.manifest.io import load_manifest
from mdata.manifest.types import BlendManifest, NamedSet
from mdata.mixing.native_blend import NativeBlend
from mdata.mixing.schedule import blend_error, missing_lengths, phase_weights
from mdata.mixing.selection import Deal

if TYPE_CHECKING:
    from mdata.mixing.phased_blend import PhasedBlend
    from mdata.progress import Progress

SpecLike = Sequence[WordLike] | Mapping[str, Any] | BlendSpec | str | Path


@dataclass(frozen=True)
class OpenBlend:
    """A blend whose corpora are open; `folder` is that from which the manifest's paths go."""

    manifest: BlendManifest
    corpora: tuple[Corpus, ...]
    folder: Path = Path()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The weights of the last phase as exact integers; 0 for what is not read or asked for in amounts."""
        return phase_weights(schedules_of(self.manifest)[-1].phases[-1], self.names)

    @property
    def plain(self) -> bool:
        """Whether there are weights of components and nothing else."""
        return is_plain(self.manifest) and not any(part.cap for part in self.manifest.components)

    @property
    def tokenizer_unknown(self) -> str:
        """ "ok" where the manifest says that corpora whose tokenizer is not known may stand beside others."""
        return REFUSE if isinstance(self.manifest.tokenizer_unknown, UnsetType) else self.manifest.tokenizer_unknown

    @property
    def left_out(self) -> dict[str, str]:
        """What a folder or pattern named and is not trained on: path -> why."""
        found = self.manifest.notes.get("left_out", {})
        return dict(found) if isinstance(found, Mapping) else {}

    def tell_left_out(self, progress: Progress) -> None:
        """Say what is left out, and why."""
        for where, why in self.left_out.items():
            progress.note(f"{where} is left out: {why}")

    @property
    def allow_outside(self) -> bool:
        """Whether manifests of its corpora were allowed to name files outside their folders."""
        return any(corpus.allow_outside for corpus in self.corpora)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the components."""
        return tuple(part.name for part in self.manifest.components)

    @property
    def valid_sets(self) -> dict[str, tuple[Path, str]]:
        """The named validation sets: name -> (path, id of the corpus or blend there)."""
        return self._named(self.manifest.valid)

    @property
    def test_sets(self) -> dict[str, tuple[Path, str]]:
        """The named test sets, likewise."""
        return self._named(self.manifest.test)

    def _named(self, sets: list[NamedSet] | UnsetType) -> dict[str, tuple[Path, str]]:
        return {} if isinstance(sets, UnsetType) else {one.name: (self.folder / one.path, one.id) for one in sets}

    @property
    def continues(self) -> tuple[str, int] | None:
        """(id of the blend that this one continues, the samples after which it differs)."""
        earlier, parent = self.manifest.earlier, self.manifest.parent
        return None if parent is None or isinstance(earlier, UnsetType) else (parent, earlier[-1].until)

    def deal(self, samples_per_epoch: Sequence[int], sequence_length: int) -> Deal:
        """Which component gives sample k, for a run whose split and samples give these sizes.

        Raises:
            UsageError: shares, lengths or caps that cannot be met; every problem with its numbers.
        """
        if self.plain:
            return NativeBlend(self.weights)
        return self.phased(samples_per_epoch, sequence_length)

    def phased(self, samples_per_epoch: Sequence[int], sequence_length: int) -> PhasedBlend:
        """The same with its phases to be looked at, for a blend of weights too."""
        from mdata.mixing.resolve import Sizes, resolve

        sizes = Sizes(self.names, tuple(samples_per_epoch), sequence_length, caps_of(self.manifest))
        return resolve(schedules_of(self.manifest), sizes)


def plan_blend(
    spec: SpecLike,
    folder: Path,
    *,
    mode: Mode = "mmap",
    checked: bool = True,
    tokenizer_unknown: str = REFUSE,
    allow_outside: bool = False,
) -> OpenBlend:
    """The blend that `make_blend` would write into a folder; `mode`, `checked` and `allow_outside` as in `open_corpus`.

    Raises:
        UsageError, DamageError: as `make_blend`.
    """
    read = allowing(read_spec(spec), tokenizer_unknown)
    if read.redistribute:
        raise UsageError(
            "redistribute is resolved when a manifest is written, for one training",
            fix="mdata blend SPEC -o mix.json --redistribute --sequence-length S --samples N",
        )
    how: dict[str, Any] = {"mode": mode, "checked": checked, "allow_outside": allow_outside}
    manifest, corpora = compose(read, folder, open_one=lambda path: open_corpus(path, **how))
    check_one_tokenizer(corpora, unknown=read.tokenizer_unknown == OK)
    if problems := missing_lengths(schedules_of(manifest)):
        raise blend_error(problems)
    return OpenBlend(manifest, corpora, folder)


def allowing(spec: BlendSpec, tokenizer_unknown: str) -> BlendSpec:
    """The spec, with unknown tokenizers allowed where the spec or the caller allows them."""
    allowed = may_be_unknown(spec.tokenizer_unknown, tokenizer_unknown)
    return replace(spec, tokenizer_unknown=OK if allowed else REFUSE)


def read_spec(spec: SpecLike) -> BlendSpec:
    """The spec that words, a .toml or .csv file or a mapping are.

    Raises:
        UsageError: it cannot be read; all of its problems at once.
    """
    if isinstance(spec, BlendSpec):
        return spec
    if isinstance(spec, Mapping):
        return spec_of_mapping(spec)
    words = _words(spec) if isinstance(spec, str | Path) else as_words(spec)
    files = [word for word in words if Path(word).suffix in (".toml", ".csv")]
    there = [word for word in files if Path(word).is_file()]
    if len(words) > 1 and there:
        raise UsageError(
            f"{there[0]} is a whole blend, and stands alone",
            found=" ".join(words[:8]) + (" ..." if len(words) > 8 else ""),
            expected="one .toml or .csv file, or weights and corpora",
            fix="write what stands beside it into the file",
        )
    if len(words) != 1 or not files:
        return spec_of_words(words)
    (name,) = files
    with os_errors_named("reading a blend's description"):
        content = Path(name).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8", found=str(error)) from error
    return spec_of_toml(text, name) if name.endswith(".toml") else spec_of_csv(text, name)


def _words(path: str | Path) -> list[str]:
    """Megatron's words that stand in one string; a path of something that is there is one word, blanks or not."""
    whole = str(path)
    # Of os.path, as words of many corpora are longer than a name may be, and Path.exists then raises.
    there = any(os.path.exists(whole + end) for end in ("", ".json", ".idx"))  # noqa: PTH110
    return [whole] if isinstance(path, Path) or there or len(whole.split()) < 2 else whole.split()


def open_blend(
    path: str | Path | Sequence[WordLike],
    *,
    mode: Mode = "mmap",
    checked: bool = True,
    tokenizer_unknown: str = REFUSE,
    allow_outside: bool = False,
    evaluation: bool = False,
) -> OpenBlend:
    """Open a blend manifest, a corpus manifest, a bare prefix, or Megatron's words (also in one string).

    `mode`, `checked` and `allow_outside` are those of `open_corpus`, `tokenizer_unknown` is that of `make_blend`. A
    folder, a pattern, and a .toml or .csv file are taken too. A blend may name corpora anywhere. `evaluation`: what is
    measured on, so that a folder gives its held-out parts too.

    Raises:
        UsageError: nothing there, two tokenizers, or one that is not known beside one that is.
        DamageError: something that is not what its manifest says.
    """
    words = _words(path) if isinstance(path, str | Path) else path
    how: dict[str, Any] = {"mode": mode, "checked": checked, "allow_outside": allow_outside}
    if len(words) != 1 or not isinstance(path, str | Path):
        return plan_blend(_read_for(words, evaluation), Path.cwd(), tokenizer_unknown=tokenizer_unknown, **how)
    path = Path(path)
    content = load_manifest(path) if path.suffix == ".json" else None
    if not isinstance(content, BlendManifest):
        read = _read_for([str(path)], evaluation)
        return plan_blend(read, path.parent, tokenizer_unknown=tokenizer_unknown, **how)
    return _open_manifest(path, content, how, tokenizer_unknown=tokenizer_unknown)


def _read_for(words: Sequence[WordLike], evaluation: bool) -> BlendSpec:
    read = read_spec(words)
    return replace(read, allow_overlap=True) if evaluation else read


def _open_manifest(path: Path, blend: BlendManifest, how: dict[str, Any], *, tokenizer_unknown: str) -> OpenBlend:
    corpora = []
    for part in blend.components:
        with errors_wanted_by(f"{path}: component {part.name}"):
            corpora.append(open_corpus(path.parent / part.path, **how))
    for part, corpus in zip(blend.components, corpora, strict=True):
        if part.id != corpus.id:
            raise DamageError(
                f"{path}: component {part.name} is not the corpus that was blended ({corpus.path})",
                found=f"id {corpus.id}",
                expected=f"id {part.id}",
                fix="put the corpus back, or make the blend again",
            )
    opened = OpenBlend(blend, tuple(corpora), path.parent)
    check_one_tokenizer(corpora, unknown=may_be_unknown(tokenizer_unknown, opened.tokenizer_unknown))
    return opened
