"""An open blend: its manifest and its open corpora. A single corpus is opened as a blend of itself, without a share.

Which component gives which sample depends on the run (its sequence length and split): `OpenBlend.selection`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from mdata.blend.same_tokenizer import OK, REFUSE
from mdata.corpus.corpus import Corpus
from mdata.corpus.open_part import beside
from mdata.errors import UsageError
from mdata.manifest.ids import sealed
from mdata.manifest.types import FORMAT, VERSION, BlendComponent, BlendManifest, NamedSet
from mdata.mixing.native_blend import NativeBlend
from mdata.mixing.selection import SelectionMap
from mdata.mixing.shares import TOKENS, USER, integer_weights

if TYPE_CHECKING:
    from mdata.mixing.phased_blend import PhasedBlend
    from mdata.progress import Progress


@dataclass(frozen=True)
class OpenBlend:
    """A blend whose corpora are open; the manifest's paths are relative to `folder`."""

    manifest: BlendManifest
    corpora: tuple[Corpus, ...]
    folder: Path = Path()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The weights of the last phase as exact integers.

        0 for components that it does not read, or of which it reads an amount (of samples, tokens or epochs).
        """
        if self.manifest.is_plain:
            return integer_weights([part.share for part in self.manifest.components], self.names)
        from mdata.manifest.blend_schedule import schedules_of
        from mdata.mixing.schedule import phase_weights

        return phase_weights(schedules_of(self.manifest)[-1].phases[-1], self.names)

    @property
    def only_weights(self) -> bool:
        """Whether the manifest gives weights of components and nothing else: no phases, amounts or caps."""
        return self.manifest.is_plain and not any(part.cap for part in self.manifest.components)

    @property
    def tokenizer_unknown(self) -> str:
        """ "ok" if the manifest allows corpora with and without a recorded tokenizer to be mixed."""
        return REFUSE if isinstance(self.manifest.tokenizer_unknown, UnsetType) else self.manifest.tokenizer_unknown

    @property
    def left_out(self) -> dict[str, str]:
        """Corpora of a folder or pattern that are not trained on: path -> reason."""
        left_out = self.manifest.notes.get("left_out", {})
        return dict(left_out) if isinstance(left_out, Mapping) else {}

    def tell_left_out(self, progress: Progress) -> None:
        """Report which corpora are left out, and why."""
        for where, why in self.left_out.items():
            progress.note(f"{where} is left out: {why}")

    @property
    def allow_outside(self) -> bool:
        """Whether manifests of its corpora were allowed to name files outside their folders."""
        return any(corpus.allow_outside for corpus in self.corpora)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""
        return tuple(part.name for part in self.manifest.components)

    @property
    def valid_sets(self) -> dict[str, tuple[Path, str]]:
        """The named validation sets: name -> (path, id of the corpus or blend there)."""
        return self._named(self.manifest.valid)

    @property
    def test_sets(self) -> dict[str, tuple[Path, str]]:
        """The named test sets, in the same form."""
        return self._named(self.manifest.test)

    def _named(self, sets: list[NamedSet] | UnsetType) -> dict[str, tuple[Path, str]]:
        if isinstance(sets, UnsetType):
            return {}
        return {named_set.name: (beside(self.folder, named_set.path), named_set.id) for named_set in sets}

    @property
    def continues(self) -> tuple[str, int] | None:
        """(id of the blend that this one continues, the samples after which it differs)."""
        earlier, parent = self.manifest.earlier, self.manifest.parent
        return None if parent is None or isinstance(earlier, UnsetType) else (parent, earlier[-1].until)

    @property
    def continued_blends(self) -> dict[str, int]:
        """Every blend that this one continues, through all its changes: id -> the samples after which they differ."""
        earlier = [] if isinstance(self.manifest.earlier, UnsetType) else self.manifest.earlier
        known = {part.id: part.until for part in earlier if not isinstance(part.id, UnsetType)}
        return known | dict([self.continues] if self.continues else ())

    @property
    def counts_by_tokens(self) -> bool:
        """Whether every component counts by its tokens, and the user gave no share.

        An older manifest does not say who set its shares; those equal to the corpora's tokens count as computed.
        """
        parts = zip(self.manifest.components, self.corpora, strict=True)
        return all(part.set_by != USER and part.share == str(corpus.num_tokens) for part, corpus in parts)

    def selection(self, samples_per_epoch: Sequence[int], sequence_length: int) -> SelectionMap:
        """Which component gives sample k, for a run whose split and samples give these sizes.

        Raises:
            UsageError: shares, lengths or caps that cannot be met; lists every problem with its numbers.
        """
        if self.only_weights:
            return NativeBlend(self.weights)
        return self.phased(samples_per_epoch, sequence_length)

    def phased(self, samples_per_epoch: Sequence[int], sequence_length: int) -> PhasedBlend:
        """`selection` as a `PhasedBlend`, whose phases can be inspected; for a blend of weights too."""
        from mdata.manifest.blend_schedule import caps_of, schedules_of
        from mdata.mixing.resolve import Sizes, resolve

        sizes = Sizes(self.names, tuple(samples_per_epoch), sequence_length, caps_of(self.manifest))
        return resolve(schedules_of(self.manifest), sizes)


def blend_of_corpus(corpus: Corpus, folder: Path, *, tokenizer_unknown: str = REFUSE) -> OpenBlend:
    """One corpus as a blend; its id is that of a blend of this corpus alone, and is part of the data id.

    Raises:
        UsageError: it has no tokens.
    """
    if not corpus.num_tokens:
        raise UsageError(f"{corpus.name} has no tokens; leave it out")
    component = BlendComponent(
        path=name_in(folder, corpus),
        id=corpus.id,
        name=corpus.name,
        share=str(corpus.num_tokens),
        set_by=TOKENS,
        group=None,
        cap=None,
    )
    manifest = BlendManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        algorithm="native",
        components=[component],
        phases=[],
        parent=None,
        tokenizer_unknown="ok" if tokenizer_unknown == OK else UNSET,
    )
    return OpenBlend(sealed(manifest), (corpus,), folder)


def name_in(folder: Path, corpus: Corpus) -> str:
    """The name of a corpus in a manifest in this folder, which `beside` resolves."""
    return corpus.address or relative_path(corpus.path, folder)


def relative_path(path: Path, folder: Path) -> str:
    """A path relative to a folder, both with symbolic links resolved, so that `..` has its usual meaning."""
    real = path.parent.resolve() / path.name
    return Path(os.path.relpath(real, folder.resolve())).as_posix()
