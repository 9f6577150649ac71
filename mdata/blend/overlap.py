"""Keeps the same document from being read twice: corpora that a folder contributes, and corpora that may not be mixed.

Of a folder, held-out parts are left out, and so are parts of a corpus that is in the folder too; both are reported.
Other corpora that share documents (two wholes of one input, a part beside a whole of another run) are refused by name,
and so is a corpus, or any of its documents, in both training and evaluation; `allow_overlap` allows both. Corpora
without a provenance are compared by id and files only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mdata.blend.duplicates import files_of
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.manifest.lineage import ByInput, lineage_of
from mdata.mixing.schedule import blend_error

ALLOW = "allow_overlap = true (mdata blend --allow-overlap)"
_SHOWN = 5


def to_train_on(path: str, corpora: Sequence[Corpus]) -> tuple[list[Corpus], dict[str, str]]:
    """The corpora of a folder that a blend uses; and path -> reason for those that are left out.

    Raises:
        UsageError: all are held-out parts.
    """
    lineages = [lineage_of(corpus.manifest) for corpus in corpora]
    named = [
        (lineage, corpus)
        for lineage, corpus in zip(lineages, corpora, strict=True)
        if lineage and lineage.role == "whole"
    ]
    wholes = {key: corpus for lineage, corpus in named for key in (lineage.run, lineage.job)}
    taken, left_out = [], {}
    for corpus, lineage in zip(corpora, lineages, strict=True):
        if lineage and lineage.role == "holdout":
            left_out[str(corpus.path)] = f"{lineage.description} of {lineage.key}"
        elif lineage and (parent := wholes.get({"partition": lineage.run, "shard": lineage.job}.get(lineage.role, ()))):
            left_out[str(corpus.path)] = f"{lineage.description} of {parent.path.name}, which is included"
        else:
            taken.append(corpus)
    if corpora and not taken:
        raise UsageError(
            f"{path}: every corpus in it is a held-out part",
            found=_some([f"{where} is {why}" for where, why in left_out.items()]),
            fix=f"to train on a corpus, name it by itself, or set {ALLOW}",
        )
    return taken, left_out


def check_added(corpora: Sequence[Corpus], num_old: int, *, sets: Mapping[str, Sequence[Corpus]]) -> None:
    """Refuse corpora added by a change that share documents with the first `num_old` corpora.

    Raises:
        UsageError: names each pair of corpora, or corpus and validation or test set.
    """
    if problems := shared_documents(corpora, first=num_old):
        raise blend_error(problems, fix=f"leave out one of the two; to use both, set {ALLOW}")
    check_apart(corpora[num_old:], sets)


def shared_documents(corpora: Sequence[Corpus], *, first: int = 0) -> list[str]:
    """Each pair of corpora that share documents, as text; at least one of the two has a number from `first` on."""
    lineages = [lineage_of(corpus.manifest) for corpus in corpora]
    by_input, reported = ByInput(lineages), set()
    problems = []
    for number, lineage in enumerate(lineages):
        if lineage is None:
            continue
        for other, input in by_input.sharing(lineage):
            pair = frozenset((number, other))
            if (
                other != number
                and max(pair) >= first
                and pair not in reported
                and corpora[other].id != corpora[number].id
            ):
                reported.add(pair)
                theirs = lineages[other]
                assert theirs is not None, "found by its inputs"
                names = (
                    f"{corpora[number].place} ({lineage.description}) and {corpora[other].place} ({theirs.description})"
                )
                problems.append(f"{names} both contain documents of {input}")
    return problems


def check_apart(train: Sequence[Corpus], sets: Mapping[str, Sequence[Corpus]], *, allow: str = ALLOW) -> None:
    """Refuse evaluation sets that contain documents of the training data.

    Args:
        train: corpora that are trained on.
        sets: name -> corpora of a validation or test set.
        allow: the option that allows it, for the message.

    Raises:
        UsageError: names each pair.
    """
    by_input = ByInput([lineage_of(corpus.manifest) for corpus in train]) if sets else None
    problems = []
    for name, corpora in sets.items():
        for corpus in corpora:
            same = next((other for other in train if _same(corpus, other)), None)
            if same is not None:
                problems.append(f"{name}: {corpus.place} is also training data: {same.place}")
                continue
            lineage = lineage_of(corpus.manifest)
            for other, input in by_input.sharing(lineage) if lineage and by_input else ():
                problems.append(f"{name}: {corpus.place} and {train[other].place} both contain documents of {input}")
    if problems:
        raise UsageError(
            "evaluation sets contain documents of the training data",
            found=_some(problems),
            expected="other documents, such as the held-out part of `mdata preprocess --holdout`",
            fix=f"name other sets; to use these, set {allow}",
        )


def _same(corpus: Corpus, other: Corpus) -> bool:
    unread = not (corpus.manifest.verified and other.manifest.verified)
    return corpus.id == other.id or (unread and files_of(corpus) == files_of(other))


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
