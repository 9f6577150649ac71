"""Makes a blend: corpora and shares in, one manifest out.

Shares stay the text that was given; corpora without a share count by their number of tokens, as in Megatron. Corpora
with different tokenizers are refused, and so is the same corpus twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdata.blend.blend import OpenBlend
from mdata.blend.compose import allowing, plan_blend
from mdata.blend.same_tokenizer import REFUSE
from mdata.blend.spec import SpecLike, read_spec
from mdata.blend_planning.redistribute import redistribute_blend
from mdata.corpus.corpus import Corpus
from mdata.errors import MdataError, UsageError
from mdata.manifest.io import load_manifest, save_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest


def make_blend(
    spec: SpecLike,
    output: str | Path,
    *,
    tokenizer_unknown: str = REFUSE,
    allow_outside: bool = False,
    sequence_length: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    split: str = "100,0,0",
) -> OpenBlend:
    """Write a blend manifest.

    Args:
        spec: Megatron's grammar, `["0.7", "code.json", "0.3", "prose.json"]`, or corpora alone; a .toml or .csv file;
            a `BlendSpec`, or the content of a TOML file as a mapping. Words may be one string; weights among
            them may be numbers.
        output: the manifest; corpora are named relative to its folder, so that both can move together.
        tokenizer_unknown: "ok" mixes corpora that record their tokenizer with others that do not.
        allow_outside: as for `open_corpus`, of each corpus.
        sequence_length, samples, tokens, split: for `redistribute_blend`, if the spec asks for it.

    Raises:
        UsageError: unusable shares or corpora, two tokenizers or an unknown one, a corpus twice.
        DamageError: a corpus that does not match its manifest.
    """
    output, read = Path(output), allowing(read_spec(spec), tokenizer_unknown)
    blend = plan_blend(replace(read, redistribute=False), output.parent, allow_outside=allow_outside)
    if read.redistribute:
        blend = redistribute_blend(blend, sequence_length=sequence_length, samples=samples, tokens=tokens, split=split)
    return save_blend(blend, output)


def save_blend(blend: OpenBlend, output: Path) -> OpenBlend:
    """Write the manifest of a blend; its paths must be relative to the same folder.

    Raises:
        UsageError: the name does not end in .json, or the file is the manifest of a corpus.
    """
    if output.suffix != ".json":
        raise UsageError(f"{output}: the name of a manifest must end in .json", fix=f"{output}.json")
    if any(_manifest_of(corpus).resolve() == output.resolve() for corpus in blend.corpora) or _is_corpus(output):
        raise UsageError(f"{output} is the manifest of a corpus", fix="another name after --output")
    return OpenBlend(save_manifest(blend.manifest, output), blend.corpora, output.parent)


def _manifest_of(corpus: Corpus) -> Path:
    """The manifest of a corpus; of a bare pair, which has none yet, the name that it would have."""
    return corpus.path if corpus.path.suffix == ".json" else manifest_path(corpus.path)


def _is_corpus(path: Path) -> bool:
    """Whether the file is a corpus' manifest; only manifests that mdata wrote are accepted."""
    try:
        return isinstance(load_manifest(path), CorpusManifest)
    except MdataError:
        return False
