"""Making a blend: corpora and shares in, one manifest out; and opening what a manifest or Megatron's words
name.

Shares stay the text that was given; where no share is given at all, each corpus counts by its number of
tokens, as in Megatron. Corpora made with different tokenizers are refused, and so is the same corpus twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mdata import manifest as manifests
from mdata.blend import NativeBlend, Word, integer_weights, parse_data_path
from mdata.corpus import Corpus, open_corpus
from mdata.errors import DamageError, MdataError, UsageError
from mdata.indexed.reader import Mode
from mdata.manifest import BlendComponent, BlendManifest, CorpusManifest


@dataclass(frozen=True)
class OpenBlend:
    """A blend whose corpora are open; `weights` are its shares as exact integers."""

    manifest: BlendManifest
    corpora: tuple[Corpus, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True)
class BlendRow:
    """What a blend does with one component; epochs are None where no length was given."""

    name: str
    share: str
    achieved: float
    tokens: int
    documents: int
    epochs: float | None


def make_blend(words: Sequence[str], output: str | Path) -> OpenBlend:
    """Write a blend manifest.

    Args:
        words: Megatron's grammar, `["0.7", "code.json", "0.3", "prose.json"]`, or corpora alone.
        output: the manifest; corpora are named relative to its folder, so that both can move together.

    Raises:
        UsageError: a share or corpus that cannot be used, two tokenizers, a corpus twice.
        DamageError: a corpus that is not what its manifest says.
    """
    output = Path(output)
    if output.suffix != ".json":
        raise UsageError(f"{output}: a manifest's name ends in .json", fix=f"{output}.json")
    blend = blend_of_words(words, output.parent)
    # A bare pair has no manifest yet, but this name is where one would be looked for.
    beside = any(corpus.path.with_suffix(".json").resolve() == output.resolve() for corpus in blend.corpora)
    if beside or _is_corpus(output):
        raise UsageError(f"{output} is the manifest of a corpus", fix="another name after --output")
    return OpenBlend(manifests.save(blend.manifest, output), blend.corpora, blend.weights)


def _is_corpus(path: Path) -> bool:
    """Whether a corpus' manifest stands there; what is no manifest of ours is none."""
    try:
        return isinstance(manifests.load(path), CorpusManifest)
    except MdataError:
        return False


def blend_of_words(words: Sequence[str], folder: Path, *, mode: Mode = "mmap", checked: bool = True) -> OpenBlend:
    """The blend that Megatron's words name; paths in its manifest are relative to `folder`.

    Raises:
        UsageError, DamageError: as `make_blend`.
    """
    parts = parse_data_path(words)
    corpora = tuple(open_corpus(part.prefix, mode=mode, checked=checked) for part in parts)
    names = _names(corpora)
    _check_distinct(corpora, names)
    check_one_tokenizer(corpora)
    shares = _shares(parts, corpora, names)
    components = [
        BlendComponent(path=_relative(corpus.path, folder), id=corpus.id, name=name, share=share, group=None, cap=None)
        for corpus, name, share in zip(corpora, names, shares, strict=True)
    ]
    blend = BlendManifest(
        format=manifests.FORMAT,
        version=manifests.VERSION,
        id="",
        checksum="",
        algorithm="native",
        components=components,
        phases=[],
        parent=None,
    )
    return OpenBlend(manifests.sealed(blend), corpora, integer_weights(shares, names))


def open_blend(path: str | Path | Sequence[str], *, mode: Mode = "mmap", checked: bool = True) -> OpenBlend:
    """Open a blend manifest, a corpus manifest, a bare prefix, or Megatron's words (also in one string).

    `mode` and `checked` are those of `open_corpus`.

    Raises:
        UsageError: nothing there, two tokenizers, or phases and caps, which this version does not serve.
        DamageError: something that is not what its manifest says.
    """
    if isinstance(path, str) and not Path(path).exists() and len(path.split()) > 1:
        path = path.split()
    if not isinstance(path, str | Path):
        return blend_of_words(path, Path.cwd(), mode=mode, checked=checked)
    path = Path(path)
    content = manifests.load(path) if path.suffix == ".json" else None
    if not isinstance(content, BlendManifest):
        return blend_of_words([str(path)], path.parent, mode=mode, checked=checked)
    return _open_manifest(path, content, mode=mode, checked=checked)


def _open_manifest(path: Path, blend: BlendManifest, *, mode: Mode, checked: bool) -> OpenBlend:
    if blend.phases or any(part.cap is not None for part in blend.components):
        raise UsageError(f"{path} has phases or caps, which this version of mdata does not serve")
    corpora = tuple(open_corpus(path.parent / part.path, mode=mode, checked=checked) for part in blend.components)
    for part, corpus in zip(blend.components, corpora, strict=True):
        if part.id != corpus.id:
            raise DamageError(
                f"{path}: component {part.name} is not the corpus that was blended ({corpus.path})",
                found=f"id {corpus.id}",
                expected=f"id {part.id}",
                fix="put the corpus back, or make the blend again",
            )
    check_one_tokenizer(corpora)
    names = [part.name for part in blend.components]
    return OpenBlend(blend, corpora, integer_weights([part.share for part in blend.components], names))


def check_one_tokenizer(corpora: Sequence[Corpus]) -> None:
    """Refuse corpora whose ids mean different things; a bare pair, which does not say, is let pass.

    Raises:
        UsageError: names two corpora and both fingerprints.
    """
    known = [corpus for corpus in corpora if corpus.tokenizer_fingerprint is not None]
    for corpus in known[1:]:
        if corpus.tokenizer_fingerprint != known[0].tokenizer_fingerprint:
            raise UsageError(
                "two corpora were made with different tokenizers",
                found=f"{known[0].path}: {known[0].tokenizer_fingerprint}",
                expected=f"the same for {corpus.path}: {corpus.tokenizer_fingerprint}",
                fix="preprocess one of them again with the tokenizer of the other",
            )


def blend_table(blend: OpenBlend, total_tokens: int | None = None) -> list[BlendRow]:
    """What the blend does: shares asked and achieved over one sum of weights, sizes, epochs.

    Args:
        blend: an open blend.
        total_tokens: the length of a training, for epochs.
    """
    counts = NativeBlend(blend.weights).counts(sum(blend.weights))
    rows = []
    for part, corpus, count in zip(blend.manifest.components, blend.corpora, counts, strict=True):
        achieved = count / sum(blend.weights)
        epochs = total_tokens * achieved / corpus.num_tokens if total_tokens and corpus.num_tokens else None
        rows.append(BlendRow(part.name, part.share, achieved, corpus.num_tokens, corpus.num_documents, epochs))
    return rows


def _shares(parts: Sequence[Word], corpora: Sequence[Corpus], names: Sequence[str]) -> list[str]:
    shares = []
    for part, corpus, name in zip(parts, corpora, names, strict=True):
        if part.share is None and not corpus.num_tokens:
            raise UsageError(f"{name} has no tokens to count by", fix="leave it out")
        shares.append(str(corpus.num_tokens) if part.share is None else part.share)
    integer_weights(shares, names)
    for share, name in zip(shares, names, strict=True):
        try:
            msgspec.convert(share, manifests.Share)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"the share of {name} cannot be kept exactly", found=repr(share), expected="a number such as 0.7"
            ) from error
    return shares


def _names(corpora: Sequence[Corpus]) -> list[str]:
    """Short names where they differ, else the paths."""
    names = [corpus.name for corpus in corpora]
    return names if len(set(names)) == len(names) else [str(corpus.path) for corpus in corpora]


def _check_distinct(corpora: Sequence[Corpus], names: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for corpus, name in zip(corpora, names, strict=True):
        if corpus.id in first:
            raise UsageError(
                f"{name} and {first[corpus.id]} are the same corpus",
                found=f"id {corpus.id} twice",
                fix="name it once, with the sum of both shares",
            )
        first[corpus.id] = name


def _relative(path: Path, folder: Path) -> str:
    """A path from a folder, both without symbolic links, so that `..` means the same when it is followed."""
    real = path.parent.resolve() / path.name
    return Path(os.path.relpath(real, folder.resolve())).as_posix()
