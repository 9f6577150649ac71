"""Opens a blend or corpus by its path or by Megatron's words.

One corpus, or the manifest of a blend, is opened as it is. Anything else (words, folders, patterns, .toml and .csv
files) is composed first, and only then the modules for it are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.blend.blend import OpenBlend, blend_of_corpus
from mdata.blend.data_path import WordLike, is_many, words_of_path
from mdata.blend.same_tokenizer import OK, REFUSE, check_one_tokenizer, may_be_unknown
from mdata.corpus.corpus import Corpus
from mdata.corpus.open_part import beside, manifest_at, open_part
from mdata.errors import DamageError, MdataError, UsageError, joined, wanted_by
from mdata.indexed.reader import Mode
from mdata.manifest.types import BlendManifest

if TYPE_CHECKING:
    from mdata.block_cache.cache_room import CachePlace


def open_blend(
    path: str | Path | Sequence[WordLike],
    *,
    mode: Mode = "mmap",
    checked: bool = True,
    tokenizer_unknown: str = REFUSE,
    allow_outside: bool = False,
    evaluation: bool = False,
    cache: CachePlace = (None, None),
) -> OpenBlend:
    """Open a corpus manifest, a bare prefix, a blend manifest, or Megatron's words (also in one string).

    Also opens a folder, a pattern, and a .toml or .csv file. `mode`, `checked`, `allow_outside` and `cache` are as in
    `open_part`, `tokenizer_unknown` as in `make_blend`. A blend may name corpora anywhere. `evaluation`: held-out parts
    in a folder are read too.

    Raises:
        UsageError: nothing there, two tokenizers, or corpora with and without a recorded tokenizer.
        DamageError: a corpus does not match its manifest.
    """
    open_one = partial(open_part, mode=mode, checked=checked, allow_outside=allow_outside, cache=cache)
    words, folder = words_of_path(path) if isinstance(path, str | Path) else path, Path.cwd()
    if len(words) == 1 and isinstance(path, str | Path):
        single_path = Path(str(words[0]))
        content = manifest_at(single_path, cache) if single_path.suffix == ".json" else None
        if isinstance(content, BlendManifest):
            return _open_manifest(single_path, content, open_one, tokenizer_unknown=tokenizer_unknown)
        if single_path.suffix not in (".toml", ".csv") and not is_many(str(words[0])):
            allowed = OK if may_be_unknown(tokenizer_unknown) else REFUSE
            corpus = open_one(str(words[0]), content=content)  # not a Path, which would lose the slash of a folder
            return blend_of_corpus(corpus, single_path.parent, tokenizer_unknown=allowed)
        folder = single_path.parent
    from mdata.blend.compose import plan_blend
    from mdata.blend.spec import read_spec

    spec = read_spec(words)
    if evaluation:
        spec = replace(spec, allow_overlap=True)
    return plan_blend(
        spec,
        folder,
        mode=mode,
        checked=checked,
        tokenizer_unknown=tokenizer_unknown,
        allow_outside=allow_outside,
        cache=cache,
    )


def _open_manifest(
    path: Path, blend: BlendManifest, open_one: Callable[[Path], Corpus], *, tokenizer_unknown: str
) -> OpenBlend:
    corpora, errors = [], list[MdataError]()
    for part in blend.components:
        try:
            corpora.append(open_one(beside(path.parent, part.path)))
        except (UsageError, DamageError) as error:
            errors.append(wanted_by(f"{path}: component {part.name}", error))
    if errors:
        raise joined(errors)
    for part, corpus in zip(blend.components, corpora, strict=True):
        if part.id != corpus.id:
            raise DamageError(
                f"{path}: component {part.name} is not the corpus that was blended ({corpus.place})",
                found=f"id {corpus.id}",
                expected=f"id {part.id}",
                fix="put the corpus back, or make the blend again",
            )
    opened = OpenBlend(blend, tuple(corpora), path.parent)
    check_one_tokenizer(corpora, unknown=may_be_unknown(tokenizer_unknown, opened.tokenizer_unknown))
    return opened
