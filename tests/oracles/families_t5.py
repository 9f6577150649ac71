"""T5s of Megatron-Core against the product's, for the program in families.py: logits, gradients, 20 steps, layouts.

A case is a function that says what differs, "" if nothing does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.ranks import RankContext, run_ranks
from tests.oracles.frame import unlike
from tests.trainer.engines import assemble, layouts, reduced
from tests.trainer.models import megatron
from trainer.config.sections import (
    DataSection,
    MeshSection,
    ModelSection,
    RunConfig,
    RunSection,
    T5SamplesSection,
    T5Section,
)
from trainer.convert.links import Linked, TensorInfo
from trainer.convert.megatron_names import StateDictLayout, megatron_links
from trainer.models.family import family_of
from trainer.models.stage import EncoderTokens, Microbatch
from trainer.optim.schedules import rates
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place
from trainer.run.engine import Engine

LOGITS, LOSS, NORM, PROBE, WHOLE_GRADIENT = 1e-5, 5e-6, 1e-5, 2e-6, 1e-6
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # ranks, mesh
    "one rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2sp": (2, {"tp": 2, "sequence_parallel": True}),
    # Megatron-Core has no pipeline for T5: its numbers of one rank are those of ours.
    "pp2": (2, {"pp": 2}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2, "schedule": "zb_h1"}),
}
Compare = Callable[[], str]
_TRAIN = {
    "steps": 20, "global_batch": 2, "lr": 1e-3, "min_lr": 0.0, "init_lr": 0.0, "warmup_iters": 1,
    "decay_iters": 20, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "clip_grad": 1.0,
}  # fmt: skip


def cases(path: Path) -> Iterator[tuple[str, Compare]]:
    """(what, comparison) of a file of families/bert_t5, or of the variants of oracle/model."""
    info = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    yield "logits", functools.partial(_outputs, path)
    yield "gradients", functools.partial(_gradients, path)
    if "logs" not in info:
        return
    for log, mode in (("micro1", ("token", 8)), ("micro4", ("megatron", 2))):
        yield log, functools.partial(_steps, path, log, mode, "one rank")
    for layout in (*info["layouts"], "pp2", "tp2_pp2"):
        yield layout, functools.partial(_steps, path, "micro4", ("megatron", 2), layout)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in load_file(path).items()}
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), tensors


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _config(info: Mapping[str, Any], *, average: str, micro_batch: int, mesh: Mapping[str, Any]) -> RunConfig:
    model, train = info["model"], {**_TRAIN, **info.get("train", {})}
    layers = [model.get(short, model.get(f"{name}_layers")) for short, name in (("enc", "encoder"), ("dec", "decoder"))]
    tied: bool = model["tie_embeddings"]
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(
            family="t5",
            t5=T5Section(encoder_layers=layers[0], head_bias=tied),
            num_layers=sum(layers),
            hidden_size=model["hidden_size"],
            num_heads=model["num_attention_heads"],
            head_dim=model.get("kv_channels"),
            ffn_hidden_size=model["ffn_hidden_size"],
            vocab_size=model["vocab_size"],  # theirs counts the padding as ids
            max_position=model["max_position_embeddings"],
            position=megatron.POSITIONS[model["position_embedding"]],
            norm=model["normalization"].lower(),
            activation=megatron.activation(model),
            bias=model["add_bias_linear"],
            tie_embeddings=tied,
        ),
        data=DataSection(blend="unused", kind="t5", t5=T5SamplesSection(decoder_length=model.get("seq_dec", 20))),
        mesh=MeshSection(**mesh),
        train=megatron.train_section(
            train, sequence_length=model.get("seq", 36), micro_batch=micro_batch, loss_average=average
        ),
        optimizer=megatron.optimizer_section(train),
    )


def _batch(tensors: Mapping[str, Tensor], step: int, rows: slice = slice(None)) -> Microbatch:
    data = {name: x[step % len(x)][rows] for name, x in _part(tensors, "data/").items()}
    data |= {name: x[rows] for name, x in _part(tensors, "batch/").items()}  # a variant has one
    return Microbatch(
        tokens_BS=data["decoder_tokens"].long(),
        labels_BS=data["labels"].long(),
        loss_mask_BS=data["loss_mask"],
        lengths_B=data["decoder_padding"].sum(1).int(),
        encoder=EncoderTokens(data["encoder_tokens"].long(), data["encoder_padding"].sum(1).int()),
    )


class _Tensors:
    """A source of tensors in memory."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self.held = held
        self.tensors = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in held.items()}

    def read(self, name: str, box: Any) -> Tensor:
        return self.held[name][tuple(slice(first, first + count) for first, count in zip(*box, strict=True))]


def _renamed(config: RunConfig, tensors: Mapping[str, Tensor], *, to_ours: bool) -> dict[str, Tensor]:
    """All tensors under the names, and in the forms, of the other side."""
    family, rows = family_of(config), config.model.vocab_size or 0
    layout = StateDictLayout(family=family, layers=range(config.model.num_layers), padded_rows=rows)
    links = list(megatron_links(family.shape(config, rows), layout, state=""))
    source = Linked(_Tensors(tensors), links if to_ours else [one.flipped() for one in links])
    return {
        name: source.read(name, (tuple(0 for _ in info.shape), info.shape)) for name, info in source.tensors.items()
    }


def _outputs(path: Path) -> str:
    """Logits of real tokens, and the losses of tokens that count; of padding they have no meaning."""
    info, tensors = _read(path)
    model, batch, out = _model(info, tensors), _batch(tensors, 0), _part(tensors, "out/")
    assert batch.lengths_B is not None
    real = torch.arange(batch.tokens_BS.shape[1]) < batch.lengths_B[:, None]
    with torch.no_grad():
        if bad := unlike(model.whole_logits(batch)[real], out["logits"][real], LOGITS):
            return f"logits: {bad}"
        _, losses_N = model((), batch)
    counted = out["per_token_loss"] * batch.loss_mask_BS
    return unlike(losses_N.view(counted.shape), counted, LOGITS)


def _model(info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    config = _config(info, average="token", micro_batch=2, mesh={})
    family, alone = family_of(config), {"tp": Group.single("tp")}
    shape = family.shape(config, config.model.vocab_size or 0)
    model = family.build(shape, Place(), groups=alone, dtype=torch.float32, device=torch.device("cpu"))
    whole, held = _renamed(config, _part(tensors, "weights/"), to_ours=True), dict(model.named_parameters())
    with torch.no_grad():
        for spec in family.parameters(shape, Place()):
            target = held.pop(spec.name).zero_().view(-1)
            for piece in spec.pieces:
                values = whole[piece.name].flatten()
                target[piece.offset : piece.offset + len(values)] = values
    assert not held, f"parameters outside of the table: {list(held)}"
    return model


def _engine(context: RankContext, config: RunConfig, tensors: Mapping[str, Tensor]) -> Engine:
    engine = layouts(context, config)
    whole, held = _renamed(config, _part(tensors, "weights/"), to_ours=True), engine.optimizer.state["weight"]
    engine.optimizer.gathers.release()
    for _, part, first in engine.optimizer.holds["weight"].slices():
        box = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
        values = whole[part.name][box].flatten()
        held[first : first + len(values)] = values
    engine.optimizer.publish()
    return engine


def _mine(engine: Engine, tensors: Mapping[str, Tensor], step: int) -> list[Microbatch]:
    """This rank's microbatches of a step, as the loader deals them out."""
    size = engine.plan.micro_batch
    numbers = range(engine.dp.rank, engine.plan.global_batch // size, engine.dp.size)
    return [_batch(tensors, step, slice(size * number, size * number + size)) for number in numbers]


def _rank_gradients(context: RankContext, path: Path, config: RunConfig) -> Any:
    engine = _engine(context, config, tensors := _read(path)[1])
    batches = _mine(engine, tensors, 0)
    engine.add_gradients(batches, own_means=True)
    return reduced(engine, len(batches) * engine.dp.size)


def _gradients(path: Path) -> str:
    """Those of the first step, in microbatches of two rows."""
    info, tensors = _read(path)
    config = _config(info, average="megatron", micro_batch=2, mesh={})
    parts = [part for one in run_ranks(_rank_gradients, 1, path, config) for part in one]
    found = _renamed(config, {name: torch.from_numpy(x) for name, x in assemble(parts).items()}, to_ours=False)
    if found.keys() != info["gradients"].keys():
        return f"gradients of other tensors: {sorted(found.keys() ^ info['gradients'].keys())[:4]}"
    for name, told in info["gradients"].items():
        flat, limit = found[name].flatten().double(), PROBE * max(1.0, told["norm"])
        probe = float((flat * torch.cos(0.7 * torch.arange(len(flat), dtype=torch.float64) + 0.3)).sum())
        for what, number in (("norm", float(flat.norm())), ("probe", probe)):
            if abs(number - told.get(what, number)) > limit:
                return f"{name}: {what} {number} instead of {told[what]}"
        if bad := unlike(flat[: len(told["first4"])], torch.tensor(told["first4"]).double(), limit):
            return f"{name}: first values: {bad}"
    whole = _part(tensors, "grad_micro4/")
    return next((f"{name}: {bad}" for name, x in whole.items() if (bad := unlike(found[name], x, WHOLE_GRADIENT))), "")


def _rank_steps(context: RankContext, path: Path, config: RunConfig) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    engine, out = _engine(context, config, tensors := _read(path)[1]), []
    for step in range(engine.plan.steps):
        size = engine.plan.global_batch
        now = rates(config.optimizer, engine.plan.schedule, steps=step, samples=step * size, batch=size)
        batches = _mine(engine, tensors, step)
        report = engine.step(batches, now.learning_rate, weight_decay=now.weight_decay).read()
        out.append((report.loss, report.grad_norm))
    return out


def _steps(path: Path, log: str, mode: tuple[str, int], layout: str) -> str:
    """Twenty steps against a log; `mode`: train.loss_average, and rows of a microbatch."""
    if layout not in LAYOUTS:
        return f"unknown layout {layout}"
    (ranks, mesh), (info, _) = LAYOUTS[layout], _read(path)
    found = run_ranks(_rank_steps, ranks, path, _config(info, average=mode[0], micro_batch=mode[1], mesh=mesh))
    wanted = info["logs"][log]
    if any(curve != found[0] for curve in found) or len(found[0]) != len(wanted):
        return f"ranks report different losses, or {len(found[0])} steps instead of {len(wanted)}"
    for told, (loss, norm) in zip(wanted, found[0], strict=True):
        if abs(loss - told["lm_token_weighted"]) > LOSS:
            return f"step {told['step']}: loss {loss} instead of {told['lm_token_weighted']}"
        if abs(norm / told["grad_norm"] - 1) > NORM:
            return f"step {told['step']}: norm {norm} instead of {told['grad_norm']}"
    return ""
