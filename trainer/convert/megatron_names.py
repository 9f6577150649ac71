"""Megatron-Core's tensors as links to ours, whole or cut over ranks, read in both directions.

Names and forms of tensors are those of the model's family (`Megatron` in models/family.py). A layout defines the layers
and the part of each tensor that a set of names covers: in a torch_dist checkpoint the only one, with layers stacked
along a leading axis; in mp_rank folders one for each rank, with layers that begin at 0. Padding of the vocabulary
exists on their side only. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from mdata import UsageError
from trainer.config.sections import RunConfig
from trainer.convert.links import Link, link
from trainer.convert.model_folder import BUFFER
from trainer.models.family import (
    FAMILIES,
    Family,
    Form,
    LayerPlace,
    Megatron,
    ModelShape,
    family_named,
    family_of,
    split_block,
)
from trainer.parallel.params import Place

# Names of Megatron-LM before its core: (pattern, what stands for it now).
_OLDER = (
    (r"^language_model\.(encoder|transformer)\.final_layernorm\.", "decoder.final_layernorm."),
    (r"^language_model\.(encoder|transformer)\.layers\.", "decoder.layers."),
    (r"^language_model\.(embedding|pooler)\.", r"\1."),
    (r"^lm_head\.(layernorm|norm)\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", "output_layer.bias"),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^(decoder\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
)
_EXTRA_STATE = (  # of layers that are in a model, and of the attention that they are for
    *(
        f"self_attention.linear_{name}"
        for name in ("qkv", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    ),
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    *(f"cross_attention.{name}" for name in ("linear_q", "linear_kv", "linear_proj", "core_attention")),
    "mixer.in_proj",
    "mixer.out_proj",
)
IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq", "rng_state", "rerun_state_machine_state")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateDictLayout:
    """The content of one of Megatron's state dicts, and its names.

    Args:
        family: of the model.
        layers: blocks, by their numbers in the whole model. stacked: along a leading axis; else numbered from 0.
        has_embedding, has_head: whether it holds the first and the last layers' neighbours.
        tied_copy: whether a tied embedding stands under the head's name as well.
        tp_rank, tp_size: which part of each tensor.
        padded_rows: of the vocabulary, over all ranks.
        version: of the order of rows of q, k, v (checkpoint_version).
        fused: whether norms have the names of fused layers.
        prefix: before all names.
        experts_together: whether all experts of a layer are one tensor, as in torch_dist. grouped: whether one layer
            computes all, which decides their names if they are apart.
        experts: those that it holds, by their numbers in the layer; numbers in its names begin with 0. None: all.
        renamed: beginnings of names within a layer -> what stands for them.
        aliases: how names of the model are taken that stand for tensors with another name, see `Megatron`.
        written: names are those that Megatron-Core reads; False: those of `modern_name`, in which every stack is a
            decoder.
    """

    family: Family
    layers: range
    padded_rows: int
    stacked: bool = False
    has_embedding: bool = True
    has_head: bool = True
    tied_copy: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    version: float = 3.0
    fused: bool = False
    prefix: str = ""
    experts_together: bool = False
    grouped: bool = False
    experts: range | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    aliases: Literal["none", "beside", "instead"] = "none"
    written: bool = False


def modern_name(name: str) -> str:
    """The name that a tensor of any version has in Megatron-Core."""
    for pattern, new in _OLDER:
        name = re.sub(pattern, new, name)
    return name


def stacks_named(names: Iterable[str]) -> dict[str, str]:
    """Names of a model of one stack, which is called a decoder here -> those that it has where it is an encoder."""
    own = list(names)
    if any(name.startswith("decoder.") for name in own):
        return {name: name for name in own}
    return {re.sub(r"^encoder\.", "decoder.", name): name for name in own}


def num_rows(tensors: Mapping[str, Any]) -> int:
    """Rows of the embedding among tensors with shapes; 0 without an embedding."""
    embedding = tensors.get("embedding.word_embeddings.weight")
    return embedding.shape[0] if embedding is not None and embedding.shape else 0


def has_grouped_experts(names: Iterable[str]) -> bool:
    """Whether one layer of Transformer Engine computes all experts."""
    return any(re.search(r"\.mlp\.experts\.linear_fc1\.weight\d", name) for name in names)


def is_ignored(name: str, megatron: Megatron | None = None) -> bool:
    """Whether a tensor of theirs holds nothing to learn, or what another of the model holds."""
    is_alias = megatron is not None and name in megatron.aliases.values()
    return is_alias or any(part in name for part in IGNORED)


def megatron_model(config: RunConfig) -> Megatron:
    """The counterpart of a model's family in Megatron-LM.

    Raises:
        UsageError: it has nothing.
    """
    if (megatron := family_of(config).megatron) is None:
        others = [name for name in FAMILIES if family_named(name).megatron]
        raise UsageError(
            "Megatron-LM has no model of this family",
            found=f'model.family="{config.model.family}"',
            expected=f"one of {', '.join(others)}",
            fix="export to another format",
        )
    return megatron


def megatron_links(
    shape: ModelShape, layout: StateDictLayout, *, state: str = "weight/", copies: bool = True
) -> Iterator[Link]:
    """Links between our tensors and those of a state dict.

    Args:
        state: before the names of ours. copies: whether with what other state dicts hold as well; a reader needs one.
    """
    family = layout.family
    assert family.megatron is not None, "megatron_model refuses other families"
    block_of = {piece.name: spec.block for spec in family.parameters(shape, Place()) for piece in spec.pieces}
    for name, size in family.logical_shapes(shape).items():
        number = split_block(name)[0]
        first = layout.has_head if block_of[name] else layout.has_embedding
        if number not in layout.layers if number is not None else not first:
            continue
        for form in _forms(family.megatron.tensor(name, size, shape, layout.version, layout.fused), layout):
            is_copy = layout.experts is not None and layout.experts.start > 0 and form.apart is None
            if not copies and (is_copy or not (form.cut or layout.tp_rank == 0)):
                continue
            again = family.megatron.aliases.get(form.tensor) if layout.aliases != "none" else None
            if again is None or layout.aliases == "beside":
                yield _cut(state + name, form, place=_place(shape, number, layout), layout=layout)
            if again is not None:
                yield _cut(state + name, dataclasses.replace(form, tensor=again), place=None, layout=layout)
    further = any(name.startswith("mtp.") for name in block_of)
    if further and copies and layout.has_head and not layout.has_embedding:  # they read later tokens
        name, size = "embedding.weight", (shape.vocab_size, shape.hidden_size)
        form = family.megatron.tensor(name, size, shape, layout.version, layout.fused)
        yield _cut(state + name, form, place=None, layout=layout)
    if layout.tied_copy and copies and shape.tie_embeddings:
        name, size = "embedding.weight", (shape.vocab_size, shape.hidden_size)
        form = family.megatron.tensor(name, size, shape, layout.version, layout.fused)
        form = dataclasses.replace(form, tensor="output_layer.weight")
        yield _cut(state + name, form, place=None, layout=layout)


def _forms(form: Form, layout: StateDictLayout) -> Iterator[Form]:
    """A form, or those of the tensors of its experts; in torch_dist a part may be a tensor."""
    if form.split and layout.experts_together:
        form = dataclasses.replace(form, tensor=form.split, theirs_in={})
    if form.apart is None or layout.experts_together:
        yield form
        return
    count = form.lengths["expert"]
    held = layout.experts or range(count)
    for number in held:
        yield dataclasses.replace(
            form,
            tensor=form.apart(number - held.start, layout.grouped),
            theirs=form.theirs.removeprefix("expert "),
            lengths={**form.lengths, "expert": 1},
            ours_in={"expert": (number, count)},
        )


def buffer_links(shape: ModelShape, layout: StateDictLayout) -> Iterator[Link]:
    """The same of buffers, which all files of a layer hold; a reader needs one."""
    family = layout.family
    assert family.megatron is not None, "megatron_model refuses other families"
    for name, size in family.logical_buffers(shape).items():
        number = split_block(name)[0]
        if number in layout.layers if number is not None else layout.has_head:
            form = family.megatron.tensor(name, size, shape, layout.version, layout.fused)
            yield _cut(f"{BUFFER}/{name}", form, place=_place(shape, number, layout), layout=layout)


def are_alike(family: Family, shape: ModelShape) -> bool:
    """Whether all layers have the same tensors; those of other models are not stacked."""
    of_block: dict[int, set[str]] = {}
    for name in family.logical_shapes(shape):
        number, rest = split_block(name)
        if number is not None:
            of_block.setdefault(number, set()).add(rest)
    megatron = family.megatron
    if megatron is not None and not megatron.stacks:
        return False
    two = megatron is not None and megatron.place is not None
    return two or len({frozenset(names) for names in of_block.values()}) <= 1


def has_experts(shape: ModelShape, layout: StateDictLayout) -> bool:
    """Whether some tensors of theirs are those of single experts."""
    family = layout.family
    assert family.megatron is not None, "megatron_model refuses other families"
    sizes = family.logical_shapes(shape).items()
    forms = (family.megatron.tensor(name, size, shape, layout.version, layout.fused) for name, size in sizes)
    return any(form.apart is not None for form in forms)


def extra_states(shape: ModelShape, layout: StateDictLayout) -> Iterator[tuple[LayerPlace, str]]:
    """The modules of a state dict's layers that Megatron-Core asks for an extra state."""
    family, held = layout.family, dict[int, set[str]]()
    assert family.megatron is not None, "megatron_model refuses other families"
    for name, size in family.logical_shapes(shape).items():
        if (number := split_block(name)[0]) is not None:
            form = family.megatron.tensor(name, size, shape, layout.version, layout.fused)
            held.setdefault(number, set()).add(form.tensor.rpartition(".")[0])
    for number in layout.layers:
        place = _place(shape, number, layout)
        assert place is not None, "a layer of a block"
        for module in _EXTRA_STATE:
            linear = module.replace("core_attention", "linear_proj")
            if linear in held[number]:
                yield place, module


def _place(shape: ModelShape, number: int | None, layout: StateDictLayout) -> LayerPlace | None:
    """The layer of a block in this state dict; None: outside the blocks."""
    if number is None:
        return None
    megatron = layout.family.megatron
    if megatron is not None and megatron.place is not None:
        return megatron.place(shape, number)
    return LayerPlace(_stack(layout), number - layout.layers.start, len(layout.layers))


def _stack(layout: StateDictLayout) -> str:
    """The module that holds the layers of a model with one stack."""
    megatron = layout.family.megatron
    return megatron.stack if layout.written and megatron is not None else "decoder"


def _cut(ours: str, form: Form, *, place: LayerPlace | None, layout: StateDictLayout) -> Link:
    """The link of a form for one state dict: its layer, its part of the axis that tp cuts, and padding."""
    lengths, theirs_in, ours_in = dict(form.lengths), dict(form.theirs_in), dict(form.ours_in)
    front, further, name = form.tensor.rpartition("transformer_layer.")  # of a layer of later tokens
    for begins, other in layout.renamed.items() if place is not None or further else ():
        name = f"{other}{name.removeprefix(begins)}" if name.startswith(begins) else name
    theirs, dims = f"{layout.prefix}{front}{further}{name}", form.theirs
    if place is not None:
        at = "" if layout.stacked else f"{place.number}."
        theirs = f"{layout.prefix}{place.stack}.layers.{at}{name}"
    elif form.tensor.startswith("decoder."):  # the last norm
        own = layout.family.megatron.last_norm if layout.written and layout.family.megatron else "final_layernorm"
        theirs = f"{layout.prefix}{_stack(layout)}.{own}{form.tensor.removeprefix('decoder.final_layernorm')}"
    if place is not None and layout.stacked:
        dims = f"layer {dims}"
        theirs_in["layer"] = (place.number, place.num_layers)
    if form.cut:
        length = lengths[form.cut]
        vocabulary = "embedding" in ours or ours.endswith(("head.weight", "head_bias.bias"))
        part = (layout.padded_rows if vocabulary else length) // layout.tp_size
        first = min(layout.tp_rank * part, length)
        lengths[form.cut] = min(first + part, length) - first
        ours_in[form.cut] = (first, length)
        before, extent = form.theirs_in.get(form.cut, (0, part * layout.tp_size))  # each part is cut by itself
        theirs_in[form.cut] = (before // layout.tp_size, extent // layout.tp_size)
    return link((ours, form.ours), (theirs, dims), lengths=lengths, ours_in=ours_in, theirs_in=theirs_in)
