"""Adapters beside the weights of another folder: merged on reading, and as folders of Hugging Face's peft.

A checkpoint of a run with [model.lora] holds only adapters; so does a folder of peft, adapter_config.json with
adapter_model.safetensors. Both name the folder of the frozen weights, of which a checkpoint also has a hash. Once
opened, either is a model like any other: W + scale B A is computed in fp32 on reading, and rounded by the writer.
Settings of peft that change more than this are refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from blake3 import blake3
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.errors import few, os_errors_named, wanted_by
from mdata.tokenizers.base.tokenizer_folder import write_folder
from mdata.util import atomic_io
from trainer.checkpoint.location import location_of
from trainer.checkpoint.tiling import Rectangle
from trainer.config.sections import LoRASection, LoRATarget, SavedModule
from trainer.convert.hf_config import to_hf
from trainer.convert.hf_folder import SafetensorsSource, find_tokenizer
from trainer.convert.links import Link, Linked, Source, TensorInfo, link
from trainer.convert.model_folder import (
    Adapter,
    ModelFolder,
    Report,
    boxes,
    check_tensors,
    check_used,
    equal_tensors,
    no_run,
    read_json,
    read_pieces,
    with_new_rows,
)
from trainer.convert.safetensors_stream import write_safetensors
from trainer.models.family import Form

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_SAVED: Mapping[SavedModule, str] = {"embedding": "embed_tokens", "head": "lm_head"}  # ours -> peft's
_PREFIX, _KINDS = "base_model.model.", {"a": "lora_A", "b": "lora_B"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # settings of peft, with the values that we compute
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "layers_to_transform": ((), []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "trainable_token_indices": (),
    "target_parameters": ((), []),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "use_qalora": (False,),
}


class MergedWeights:
    """The tensors of a model with those of its adapters added; they are in at least fp32.

    Args:
        base: the first weights. adapters: by names such as "weight/blocks.0.attention.q.lora_a", and trained weights by
            their own names. scale: the factor of adapters.
    """

    def __init__(self, base: Source, adapters: Source, *, scale: float) -> None:
        self._base, self._adapters, self._scale = base, adapters, scale
        self.tensors = {
            name: info._replace(dtype=torch.promote_types(info.dtype, torch.float32)) if self._layer(name) else info
            for name, info in {**base.tensors, **adapters.tensors}.items()
            if name.startswith("weight/") and ".lora_" not in name
        }

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        if name in self._adapters.tensors:
            return self._adapters.read(name, box)
        piece = self._base.read(name, box)
        if not (layer := self._layer(name)):
            return piece
        (row, column), (rows, columns) = box
        rank = self._adapters.tensors[f"{layer}.lora_a"].shape[0]
        wide = self.tensors[name].dtype
        a, b = (
            self._adapters.read(f"{layer}.lora_{kind}", part).to(wide)
            for kind, part in (("a", ((0, column), (rank, columns))), ("b", ((row, 0), (rows, rank))))
        )
        return torch.addmm(piece.to(wide), b, a, alpha=self._scale)

    def _layer(self, name: str) -> str:
        """The layer of a weight with an adapter; "" without one."""
        layer = name.removesuffix(".weight")
        return layer if f"{layer}.lora_a" in self._adapters.tensors else ""


def weights_hash(model: ModelFolder) -> str:
    """A hash of names, shapes, types and values of a model's weights, independent of their files."""
    digest = blake3(max_threads=blake3.AUTO)
    for name, info in sorted(model.source.tensors.items()):
        if name.startswith("weight/"):
            digest.update(f"{name} {list(info.shape)} {info.dtype}\n".encode())
            for box in boxes(info, info.dtype):
                digest.update(model.source.read(name, box).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_base(model: ModelFolder, actual: str, *, expected: str, where: str) -> None:
    """Check that frozen weights are those with which the adapters of a checkpoint were trained, by their hash.

    Raises:
        UsageError: they differ. `where`: the checkpoint, for the message.
    """
    if actual != expected:
        raise UsageError(
            f"the adapters of {where} were trained beside other weights than those of {model.path}",
            found=f"weights with the hash {actual[:16]}...",
            expected=f"{expected[:16]}...",
            fix="put the weights that the run began with back, or name one checkpoint of them in checkpoint.init_from",
        )


def with_base(model: ModelFolder, open_model: Callable[..., ModelFolder]) -> ModelFolder:
    """A checkpoint of adapters with the weights that it names, merged; any other model as it is.

    Args:
        open_model: of convert.py, which calls this.
    """
    if (lora := model.config.model.lora) is None:
        return model
    named = model.config.checkpoint.init_from
    if not named:
        raise UsageError(
            f"{model.path} holds adapters of a run without checkpoint.init_from, whose other weights were drawn",
            fix="name the weights of a model in checkpoint.init_from, and train again",
        )
    if isinstance(place := location_of(named), Path) and not place.exists():
        raise UsageError(
            f"the base weights of the adapters in {model.path} are missing",
            found=f"checkpoint.init_from = {named}",
            fix="put them there, or a link to them; a relative path begins in the current folder",
        )
    try:
        base = base_of(open_model(place))
        if first := model.config.checkpoint.new_rows_from:
            rows = model.source.tensors["weight/embedding.weight"].shape[0]
            base = with_new_rows(base, first, rows, where=f"checkpoint.init_from = {named}")
    except UsageError as error:
        raise wanted_by(f"{model.path} holds adapters for checkpoint.init_from = {named}", error) from error
    check_base(base, weights_hash(base), expected=model.run.base, where=str(model.path))
    merged = _merged(model, Adapter(base, model.source, lora))
    return dataclasses.replace(merged, tokenizer=model.tokenizer or base.tokenizer)


def base_of(model: ModelFolder) -> ModelFolder:
    """The frozen weights of a folder with adapters; of others itself."""
    return model if model.adapter is None else model.adapter.base


def _merged(model: ModelFolder, adapter: Adapter) -> ModelFolder:
    config = dataclasses.replace(model.config.model, lora=None, vocab_size=adapter.base.vocab_size)
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, model=config),
        source=MergedWeights(adapter.base.source, adapter.source, scale=adapter.lora.scale),
        adapter=adapter,
    )


def is_peft(path: Path) -> bool:
    """Whether this is a folder of an adapter."""
    return (path / CONFIG).is_file()


def open_peft(path: Path, open_model: Callable[..., ModelFolder]) -> ModelFolder:
    """An adapter that peft has written, merged with its weights.

    Raises:
        UsageError: unsupported settings, or missing frozen weights. DamageError: tensors are missing or do not fit.
    """
    settings = read_json(path / CONFIG, subject="the adapter's settings")
    _check_settings(path, settings)
    named = settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not Path(named).is_dir():
        raise UsageError(
            f"the base weights of the adapter {path} are missing",
            found=f"base_model_name_or_path = {named!r}",
            expected="a folder",
            fix=f"download them, and write their folder into {path / CONFIG}",
        )
    base = base_of(open_model(Path(named)))
    source = SafetensorsSource(path, dict.fromkeys(_stored_names(path), TENSORS))
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise DamageError(
            f"{path / CONFIG} is damaged", found=f"r = {rank!r}, lora_alpha = {alpha!r}", fix="restore it"
        )
    saved = _saved_links(base, model_type=_model_type(base))
    embedding = source.tensors.get(saved["embedding"].theirs.tensor)
    if embedding is not None and embedding.shape[0] > base.vocab_size:
        base = with_new_rows(base, base.vocab_size, embedding.shape[0], where=str(path))
        saved = _saved_links(base, model_type=_model_type(base))
    saved = {name: link for name, link in saved.items() if link.theirs.tensor in source.tensors}
    links = {
        target: list(_links(base, rank, targets=(target,), model_type=_model_type(base)))
        for target in get_args(LoRATarget)
    }
    targets = tuple(
        target for target, those in links.items() if any(link.theirs.tensor in source.tensors for link in those)
    )
    used = [*(link for target in targets for link in links[target]), *saved.values()]
    check_tensors(source.tensors, {link.theirs.tensor: link.theirs.shape for link in used}, where=path)
    fix = "train adapters of the linear layers of attention and MLP alone"
    read = {link.theirs.tensor for link in used}
    if base.config.model.tie_embeddings and saved:
        head = _tied_head(base, model_type=_model_type(base)).theirs.tensor
        pair = (head, saved["embedding"].theirs.tensor)
        if head in source.tensors and equal_tensors(source, pair, size=saved["embedding"].theirs.shape):
            read.add(head)
    check_used(source.tensors, read, where=path, fix=fix)
    scaled = alpha * math.sqrt(rank) if settings.get("use_rslora") else float(alpha)
    lora = LoRASection(rank=rank, alpha=scaled, targets=targets, modules_to_save=tuple(saved))
    adapter = Adapter(base, Linked(source, used), lora)
    config = dataclasses.replace(base.config, model=dataclasses.replace(base.config.model, lora=None))
    tokenizer = find_tokenizer(path) or base.tokenizer
    own = dataclasses.replace(base, path=path, format="peft", config=config, run=no_run(config), tokenizer=tokenizer)
    return _merged(own, adapter)


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    refused = [
        f"{name} = {settings[name]!r}"
        for name, values in _NEUTRAL.items()
        if settings.get(name) is not None and settings[name] not in values
    ]
    if others := sorted({*(settings.get("modules_to_save") or ())} - {*_SAVED.values()}):
        refused.append(f"modules_to_save = {others}")
    first = settings.get("init_lora_weights", True)
    if isinstance(first, str) and first not in ("gaussian", "orthogonal"):  # others change the frozen weights
        refused.append(f"init_lora_weights = {first!r}")
    if refused:
        raise UsageError(
            f"{path} is an adapter with settings that mtrain lacks",
            found=few(refused, 4),
            fix="merge it with peft (merge_and_unload), and use the merged folder",
        )


def _stored_names(path: Path) -> list[str]:
    """The tensors in the file of an adapter."""
    from safetensors import SafetensorError, safe_open

    if not (path / TENSORS).is_file():
        raise UsageError(f"{path} has no {TENSORS}", fix="save the adapter as safetensors (peft: save_pretrained)")
    with os_errors_named("reading the adapter"), (path / TENSORS).open("rb"):
        pass  # the library calls a file damaged that may not be read
    try:
        with safe_open(path / TENSORS, framework="pt") as file:
            return sorted(file.keys())
    except SafetensorError as error:
        raise DamageError(f"{path / TENSORS} is damaged", found=str(error), fix="download the file again") from error


def _model_type(base: ModelFolder, model_type: str = "") -> str:
    kind: str = to_hf(base.config, base.vocab_size, model_type=model_type)["model_type"]
    return kind


def write_peft(target: Path, model: ModelFolder, *, dtype: torch.dtype, model_type: str, report: Report) -> None:
    """Write a folder that peft loads beside the same weights; the folder is new or empty.

    Raises:
        UsageError: the source has no adapter, or the layers of transformers' model cannot have these.
    """
    if (adapter := model.adapter) is None:
        raise UsageError(f"{model.path} holds no adapter", fix="--to hf writes all weights")
    base, lora = adapter.base, adapter.lora
    targets = {name.split(".")[-2] for name in adapter.source.tensors}
    links = [
        link.flipped() for link in _links(base, lora.rank, targets=targets, model_type=_model_type(base, model_type))
    ]
    saved = _saved_links(base, model_type=_model_type(base, model_type))
    links += [saved[name].flipped() for name in lora.modules_to_save]
    layers_saved = [_SAVED[name] for name in lora.modules_to_save]
    if base.config.model.tie_embeddings and layers_saved:  # peft has a copy of each
        links.append(_tied_head(base, model_type=_model_type(base, model_type)).flipped())
        layers_saved.append(_SAVED["head"])
    theirs = Linked(adapter.source, links)
    entries = {name: TensorInfo(info.shape, dtype) for name, info in sorted(theirs.tensors.items())}
    target.mkdir(parents=True, exist_ok=True)
    write_safetensors(target / TENSORS, entries, pieces=read_pieces(theirs, entries, report=report))
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    layers = {name.split(".lora_")[0].split(".")[-1]: None for name in entries if ".lora_" in name}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path),
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if layers_saved:
        settings["modules_to_save"] = layers_saved
        if model.tokenizer is not None:  # it may have new tokens
            write_folder(target, dict(model.tokenizer.files))
    atomic_io.atomic_write(target / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def _saved_links(base: ModelFolder, *, model_type: str) -> dict[SavedModule, Link]:
    """Links between weights that are trained whole and peft's copies of them."""
    links: dict[SavedModule, Link] = {}
    for name in _SAVED:
        if name == "embedding" or not base.config.model.tie_embeddings:
            links[name] = _saved_link(base, f"{name}.weight", f"{name}.weight", model_type=model_type)
    return links


def _tied_head(base: ModelFolder, *, model_type: str) -> Link:
    """The copy of a tied embedding that peft stores as the head."""
    return _saved_link(base, "embedding.weight", "head.weight", model_type=model_type)


def _saved_link(base: ModelFolder, ours: str, theirs: str, *, model_type: str) -> Link:
    face = base.family.hugging_face
    assert face is not None, "to_hf refuses other families"
    size = base.family.logical_shapes(base.shape)[ours]
    (form,) = face.forms(theirs, size, base.shape, model_type)
    return link((f"weight/{ours}", form.ours), (f"{_PREFIX}{form.tensor}", form.theirs), lengths=form.lengths)


def _links(base: ModelFolder, rank: int, *, targets: Collection[str], model_type: str) -> Iterator[Link]:
    """Links between our adapters and peft's: A has the columns of the matrix, B has its rows.

    Raises:
        UsageError: a layer of transformers' model computes several matrices, or holds one transposed.
    """
    face = base.family.hugging_face
    assert face is not None, "to_hf refuses other families"
    for name, size in base.family.logical_shapes(base.shape).items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not name.startswith("blocks.") or layer.rpartition(".")[2] not in targets:
            continue
        forms: tuple[Form, ...] = face.forms(name, size, base.shape, model_type)
        form = forms[0]
        by_columns = len(forms) == 1 and not form.theirs_in and form.theirs.endswith(" column")
        if not by_columns:
            raise UsageError(
                f"peft cannot have an adapter of {layer.rpartition('.')[2]} alone in a model of type {model_type}",
                found=f"{name} in {form.tensor}",
                expected="a layer of its own",
                fix="--to hf writes the merged model",
            )
        theirs, lengths = f"{_PREFIX}{form.tensor.removesuffix('.weight')}", {**form.lengths, "rank": rank}
        for letter, ours_dims, theirs_dims in (
            ("a", "rank column", "rank column"),
            ("b", form.ours.replace(" column", " rank"), form.theirs.replace(" column", " rank")),
        ):
            ours = (f"weight/{layer}.lora_{letter}", ours_dims)
            yield link(ours, (f"{theirs}.{_KINDS[letter]}.weight", theirs_dims), lengths=lengths)
