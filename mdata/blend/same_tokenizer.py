"""Checks that corpora that are read together have one tokenizer, as far as their manifests say.

A pair without a manifest, or with one from a plain `mdata adopt`, does not record its tokenizer. Such corpora may be
read together; mixing them with corpora that record a tokenizer needs the user's permission.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError, counted, few

TOKENIZER_UNKNOWN = REFUSE, OK = "refuse", "ok"


def may_be_unknown(*said: str) -> bool:
    """Whether any of these values, each "refuse" or "ok", allows corpora without a recorded tokenizer beside others.

    Raises:
        UsageError: any other value.
    """
    for word in said:
        if word not in TOKENIZER_UNKNOWN:
            raise UsageError(f"no tokenizer_unknown {word!r}", expected=" or ".join(TOKENIZER_UNKNOWN))
    return OK in said


def check_one_tokenizer(corpora: Sequence[Corpus], *, unknown: bool) -> None:
    """Refuse corpora whose ids mean, or may mean, different things.

    Args:
        corpora: read together.
        unknown: the user confirms that corpora without a recorded tokenizer use the same one.

    Raises:
        UsageError: names two corpora, and the known facts about their tokenizers.
    """
    fingerprinted = [corpus for corpus in corpora if corpus.tokenizer_fingerprint is not None]
    for corpus in fingerprinted[1:]:
        if corpus.tokenizer_fingerprint != fingerprinted[0].tokenizer_fingerprint:
            raise UsageError(
                "two corpora were made with different tokenizers",
                found=f"{fingerprinted[0].place}: {_named(fingerprinted[0])}",
                expected=f"the same tokenizer as {corpus.place}: {_named(corpus)}",
                fix="preprocess one of them again with the tokenizer of the other",
            )
    silent = [corpus.place for corpus in corpora if corpus.tokenizer_fingerprint is None]
    if fingerprinted and silent and not unknown:
        raise UsageError(
            "some corpora do not record their tokenizer, and others do",
            found=f"no tokenizer recorded for {few(silent)}",
            expected=f"the tokenizer of {fingerprinted[0].place}: {_named(fingerprinted[0])}",
            fix=way_out(silent[0]),
        )


def way_out(prefix: str) -> str:
    """The remedy for a corpus that does not record its tokenizer."""
    return (
        f"mdata adopt {prefix} --tokenizer-type TYPE --tokenizer-model FILE records the tokenizer that made it\n"
        "  or, if you know that its ids match: mdata blend --tokenizer-unknown ok (in a run:"
        ' data.tokenizer_unknown = "ok"; in Python: tokenizer_unknown="ok")'
    )


def _named(corpus: Corpus) -> str:
    """The name of a corpus' tokenizer, for messages."""
    facts = corpus.tokenizer
    assert facts is not None, "only corpora whose tokenizer is known are compared"
    options = "".join(f", {name} {value}" for name, value in sorted(facts.options.items()) if name != "special_tokens")
    return (
        f"{facts.type} with {counted(facts.vocab_size, 'entry', 'entries')}{options}, fingerprint {facts.fingerprint}"
    )
