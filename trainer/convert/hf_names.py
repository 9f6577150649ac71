"""The tensors of Hugging Face's models as links to ours, read in both directions; the names are the family's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.convert.links import Link, link
from trainer.convert.model_folder import BUFFER
from trainer.models.family import Family, ModelShape


def hf_links(
    family: Family, shape: ModelShape, *, model_type: str, state: str = "weight/", bare: bool = False
) -> Iterator[Link]:
    """Links between our tensors and those of a Hugging Face folder.

    Args:
        state: before the names of ours. bare: without the prefix of their names, as GPT-2 was published.
    """
    assert family.hugging_face is not None, "from_hf and to_hf refuse other families"
    buffers = {f"{BUFFER}/{name}": size for name, size in family.logical_buffers(shape).items()}
    weights = {f"{state}{name}": size for name, size in family.logical_shapes(shape).items()}
    for ours, size in (weights | buffers).items():
        name = ours.removeprefix(f"{BUFFER}/" if ours in buffers else state)
        for form in family.hugging_face.forms(name, size, shape, model_type):
            theirs = form.tensor.removeprefix(family.hugging_face.prefixes.get(model_type, "")) if bare else form.tensor
            inside = {"ours_in": form.ours_in, "theirs_in": form.theirs_in}
            yield link((ours, form.ours), (theirs, form.theirs), lengths=form.lengths, **inside)
