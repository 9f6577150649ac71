"""`python -m tests.oracles.families FOLDER`: compare models of Megatron-Core with the product's families.

FOLDER has the form of oracle/families (folders of NAME.safetensors and NAME.json) or of oracle/model, of which
variants/ is read. A line for each kind, then `N of M cases equal`; exit code 0 only if all are. A kind of a later part
is listed as waiting and not counted. An unknown kind, a case that cannot be read and an empty folder are failures.

Options: `--kind NAME` (may be repeated) compares only that kind.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.ranks import RankContext, RankError, RankHang, run_ranks
from tests.oracles import families_moe, families_t5
from tests.oracles.frame import MALFORMED, Case, Program, unknown, unlike, unreadable
from tests.trainer.engines import assemble, layouts, reduced
from tests.trainer.models import megatron
from trainer.config.sections import (
    BertSamplesSection,
    BertSection,
    DataSection,
    MambaSection,
    MeshSection,
    MLASection,
    ModelSection,
    MTPSection,
    RunConfig,
    RunSection,
)
from trainer.convert.links import Linked, TensorInfo
from trainer.convert.megatron_names import StateDictLayout, megatron_links
from trainer.layers.attention import Sequences
from trainer.models.family import family_of
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.mtp import later_tokens
from trainer.models.gpt.shape import later_losses
from trainer.models.mamba.shape import allocated
from trainer.models.stage import Microbatch
from trainer.optim.schedules import rates
from trainer.parallel.collectives import Group
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.params import Place
from trainer.run.engine import Engine

# A probe adds up the roundings of Megatron-LM's fp32; ours are in fp64.
LOGITS, LOSS, NORM, PROBE = 1e-5, 5e-6, 1e-5, 4e-6
WHOLE_GRADIENT = 1e-6
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # ranks, mesh
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2_ep2": (2, {"ep": 2}),
    "tp2sp_ep2": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "tp2sp_dp2": (4, {"tp": 2, "sequence_parallel": True}),
}


class Reference:
    """One pair of files."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        self.info: Mapping[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        self.model, self.train = self.info["model"], self.info.get("train", {})
        self.tensors = load_file(path)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Tensors below a prefix: fp32, or int64."""
        return {
            name.removeprefix(prefix): x.float() if x.is_floating_point() else x.long()
            for name, x in self.tensors.items()
            if name.startswith(prefix)
        }


def rows_of(batch: Any, part: slice) -> Any:
    """Some rows of a microbatch."""
    fields = {name: x[part] for name in batch.__dataclass_fields__ if isinstance(x := getattr(batch, name), Tensor)}
    return replace(batch, **fields)


# ---- BERT


def bert(reference: Reference) -> Iterator[Case]:
    """A file of bert_t5/: logits, gradients, 20 steps of one and of four microbatches, and the steps of each layout."""
    case = functools.partial(_case, "bert", reference)
    yield case("logits", functools.partial(_bert_outputs, reference, _bert_batch(reference, 0)))
    yield case("gradients", functools.partial(_gradients, reference, _bert_config))
    for log, mode in (("micro1", ("token", 8)), ("micro4", ("megatron", 2))):
        yield case(log, functools.partial(_steps, reference, _bert_config, log, mode, "one rank"))
    for layout in reference.info.get("layouts", {}):
        yield case(layout, functools.partial(_steps, reference, _bert_config, "micro4", ("megatron", 2), layout))


def bert_variant(reference: Reference) -> Iterator[Case]:
    """A file of variants/: logits, losses and gradients of one microbatch."""
    case, batch = functools.partial(_case, "bert", reference), _bert_batch(reference, None)
    yield case("logits", functools.partial(_bert_outputs, reference, batch))
    yield case("gradients", functools.partial(_variant_gradients, reference, batch))


def _bert_config(reference: Reference, *, average: str, micro_batch: int, mesh: Mapping[str, Any]) -> RunConfig:
    model, binary = reference.model, bool(reference.model.get("binary", reference.model.get("binary_head")))
    config = _config(reference, average=average, micro_batch=micro_batch, mesh=mesh, length=model.get("seq", 40))
    section = BertSection(norm="pre", binary_head=binary)
    data = DataSection(blend="unused", kind="bert", bert=BertSamplesSection(head=binary))
    return replace(config, model=replace(config.model, family="bert", bert=section), data=data)


def _bert_batch(reference: Reference, step: int | None) -> Microbatch:
    """A global batch: of a step, or the only one."""
    prefix = "batch/" if step is None else "data/"
    data = {name: x if step is None else x[step % len(x)] for name, x in reference.part(prefix).items()}
    pairs = bool(reference.model.get("binary", reference.model.get("binary_head")))
    return Microbatch(
        tokens_BS=data["tokens"],
        labels_BS=data["labels"],
        loss_mask_BS=data["loss_mask"],
        types_BS=data["tokentypes"],
        lengths_B=data["padding_mask"].sum(1).int(),
        swapped_B=data["sentence_order"] if pairs else None,
    )


def _bert_outputs(reference: Reference, batch: Microbatch) -> str:
    """Logits of real tokens, of pairs, and the losses of tokens that count; of padding they have no meaning."""
    model, out = _model(reference, _bert_config), reference.part("out/")
    real = torch.arange(batch.tokens_BS.shape[1]) < batch.lengths_B[:, None]  # type: ignore[index]
    logits = out["logits"] if "logits" in out else out["lm_logits"]
    with torch.no_grad():
        if bad := unlike(model.whole_logits(batch)[real], logits[real], LOGITS):
            return f"logits: {bad}"
        if "binary_logits" in out and (bad := unlike(model.pair_logits(batch), out["binary_logits"], LOGITS)):
            return f"logits of pairs: {bad}"
        named: dict[str, Any] = {}
        loss, losses_N = model((), replace(batch, losses=named))
    counted = out["per_token_loss"] * batch.loss_mask_BS
    if bad := unlike(losses_N.view(counted.shape), counted, LOGITS):
        return f"losses of tokens: {bad}"
    if "losses" in reference.info:
        said = reference.info["losses"]
        if bad := unlike(loss / batch.loss_mask_BS.sum(), torch.tensor(said["lm_loss"]).double(), LOSS):
            return f"lm_loss: {bad}"
        if "sop_loss" in said and (bad := unlike(named["sop"].sum / 3, torch.tensor(said["sop_loss"]), LOSS)):
            return f"sop_loss: {bad}"
    return ""


def _variant_gradients(reference: Reference, batch: Microbatch) -> str:
    model, named = _model(reference, _bert_config), {}
    loss, _ = model((), replace(batch, losses=named))
    total = loss / batch.loss_mask_BS.sum() + sum(one.sum / one.weight for one in named.values())
    total.backward()
    config = _bert_config(reference, average="token", micro_batch=3, mesh={})
    family, shape = family_of(config), model.shape
    grads = {}
    held = dict(model.named_parameters())
    for spec in family.parameters(shape, Place()):
        flat = held[spec.name].grad.flatten()
        for piece in spec.pieces:
            count = int(np.prod(piece.size))
            grads[piece.name] = flat[piece.offset : piece.offset + count].view(piece.size)
    return _unlike_gradients(reference, _theirs(config, grads))


# ---- T5


def t5(reference: Reference) -> Iterator[Case]:
    """A file of bert_t5/, or of variants/."""
    for what, compare in families_t5.cases(reference.path):
        yield _case("t5", reference, what, compare)


# ---- experts


def moe(reference: Reference) -> Iterator[Case]:
    """A file of moe/."""
    for what, compare in families_moe.cases(reference):
        yield _case("moe", reference, what, compare)


# ---- latent attention


def mla_mtp(reference: Reference) -> Iterator[Case]:
    """A file of mla_mtp/: logits, gradients, 20 steps, and the same in layouts without a note."""
    case = functools.partial(_case, "mla_mtp", reference)
    yield case("logits", functools.partial(_decoder_outputs, reference))
    yield case("gradients", functools.partial(_gradients, reference, _decoder_config))
    notes = {name: told.get("note", "") for name, told in reference.info["layouts"].items()}
    for layout in ("one rank", *(name.removesuffix("_fixed") for name, note in notes.items() if not note)):
        yield case(layout, functools.partial(_steps, reference, _decoder_config, "", ("megatron", 2), layout))


def _decoder_config(reference: Reference, *, average: str, micro_batch: int, mesh: Mapping[str, Any]) -> RunConfig:
    model, length = reference.model, reference.train["seq"]
    config = _config(reference, average=average, micro_batch=micro_batch, mesh=mesh, length=length)
    keys: dict[str, Any] = {"num_kv_heads": model["num_query_groups"]}
    if latent := model["mla"]:
        sizes = {name: latent[name] for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
        sizes |= {"qk_nope_head_dim": latent["qk_head_dim"], "qk_rope_head_dim": latent["qk_pos_emb_head_dim"]}
        keys = {"rope_interleaved": True}
        if latent["rope_type"] == "yarn":
            sizes |= {name: latent[name] for name in ("mscale", "mscale_all_dim")}
            keys |= {"rope_scaling": "yarn", "rope_factor": latent["rotary_scaling_factor"]}
            keys |= {"rope_original_length": latent["original_max_position_embeddings"]}
        keys["mla"] = MLASection(**sizes)
    if model["extra"].get("num_moe_experts"):
        plain = copy.copy(reference)
        of_experts = {name: value for name, value in model["extra"].items() if not name.startswith("mtp_")}
        plain.model = {**model, "extra": of_experts}
        moe = families_moe.config_of(plain, average=average, micro_batch=micro_batch, mesh=mesh).model.moe
        keys["moe"] = moe
    if depths := model["extra"].get("mtp_num_layers"):
        keys["mtp"] = MTPSection(num_layers=depths, loss_factor=model["extra"]["mtp_loss_scaling_factor"])
    return replace(config, model=replace(config.model, **keys))


def _decoder_batch(reference: Reference, step: int | None) -> Microbatch:
    data = {name: x[(step or 0) % len(x)] for name, x in reference.part("data/").items()}
    return Microbatch(tokens_BS=data["tokens"], labels_BS=data["labels"], loss_mask_BS=data["loss_mask"])


def _decoder_outputs(reference: Reference) -> str:
    """Logits of the first microbatch, those of later tokens, and losses of all tokens."""
    model, out = _model(reference, _decoder_config), reference.part("out/")
    batch = _decoder_batch(reference, 0)
    with torch.no_grad():
        for bias in model.buffers():
            bias.zero_()
        first = rows_of(batch, slice(0, 2))
        if bad := unlike(model.whole_logits(first), out["logits_microbatch0"], LOGITS):
            return f"logits: {bad}"
        for depth, logits_BSV in enumerate(_later_logits(model, first)):
            if bad := unlike(logits_BSV, out[f"mtp_logits_microbatch0_{depth}"], LOGITS):
                return f"logits of depth {depth + 1}: {bad}"
        _, losses_N = model((), batch)
    counted = out["per_token_loss"] * batch.loss_mask_BS
    return f"losses of tokens: {bad}" if (bad := unlike(losses_N.view(counted.shape), counted, LOGITS)) else ""


def _later_logits(model: Any, batch: Microbatch) -> Iterator[Tensor]:
    _, hidden_ND = model.final_norm(*model._through_blocks((), batch))
    later = later_tokens(batch, later_losses(model.shape), factor=1.0, cp=Group.single("cp"))
    for depth, tokens in zip(model.mtp.values(), later, strict=True):
        hidden_ND = model._deepen(depth, model._context(batch), model._token_rows(tokens.tokens_N), hidden_ND)
        logits_NV = (hidden_ND @ model._head().weight.T)[:, : model.shape.vocab_size]
        yield logits_NV.view(*batch.tokens_BS.shape, -1)


# ---- Mamba-2 and hybrids


def mamba(reference: Reference) -> Iterator[Case]:
    """A file of mamba/: logits, a mixer alone, gradients, initial values, 20 steps of layouts without a note."""
    case = functools.partial(_case, "mamba", reference)
    yield case("logits", functools.partial(_mamba_outputs, reference))
    yield case("mixer", functools.partial(_mixer_alone, reference))
    yield case("gradients", functools.partial(_gradients, reference, _mamba_config))
    yield case("initial values", functools.partial(_mamba_initial, reference))
    notes = {name: told.get("note", "") for name, told in reference.info["layouts"].items()}
    for layout in ("one rank", *(name for name, note in notes.items() if not note)):
        steps = functools.partial(_steps, reference, _mamba_config, "", ("megatron", 2), layout, beside=False)
        yield case(layout, steps)  # no log has the balance of experts


def patterns(path: Path) -> Iterator[Case]:
    """Megatron's allocation of layers by ratios."""
    for told in json.loads(path.read_text(encoding="utf-8")):
        layers, wanted = told["layers"], told["pattern"]
        found = allocated(layers, attention=told["attention_ratio"], mlp=told["mlp_ratio"])
        difference = "" if found == wanted else f"{found} instead of {wanted}"
        what = f"{path.stem} {layers}, {told['attention_ratio']:g}, {told['mlp_ratio']:g}"
        yield Case("mamba", what, functools.partial(str, difference))


def _mamba_config(reference: Reference, *, average: str, micro_batch: int, mesh: Mapping[str, Any]) -> RunConfig:
    model, length = reference.model, reference.train["seq"]
    config = _config(reference, average=average, micro_batch=micro_batch, mesh=mesh, length=length)
    extra = dict(model["extra"])
    del extra["is_hybrid_model"]
    section = MambaSection(
        pattern=model["pattern"],
        num_heads=extra.pop("mamba_num_heads", None),
        head_dim=extra.pop("mamba_head_dim"),
        num_groups=extra.pop("mamba_num_groups"),
        state_size=extra.pop("mamba_state_dim"),
        chunk_size=8,
    )
    keys: dict[str, Any] = {"family": "mamba", "num_kv_heads": model["num_query_groups"], "mamba": section}
    if extra:
        plain = copy.copy(reference)
        plain.model = {**model, "extra": extra}
        moe = families_moe.config_of(plain, average=average, micro_batch=micro_batch, mesh=mesh).model.moe
        keys["moe"] = moe
    return replace(config, model=replace(config.model, **keys))


def _mamba_outputs(reference: Reference) -> str:
    """Logits of the first microbatch, and losses of all tokens."""
    model, out = _model(reference, _mamba_config), reference.part("out/")
    batch = _decoder_batch(reference, 0)
    with torch.no_grad():
        if bad := unlike(model.whole_logits(rows_of(batch, slice(0, 2))), out["logits_microbatch0"], LOGITS):
            return f"logits: {bad}"
        _, losses_N = model((), batch)
    counted = out["per_token_loss"] * batch.loss_mask_BS
    return f"losses of tokens: {bad}" if (bad := unlike(losses_N.view(counted.shape), counted, LOGITS)) else ""


def _mixer_alone(reference: Reference) -> str:
    """One mixer in fp64: what it gives, and every gradient."""
    model, number = _model(reference, _mamba_config), reference.info["mamba"]["mixer_layer"]
    mixer, told = model.blocks[str(number)].mixer.double(), reference.part("mixer/")
    u_BSD, wanted = told["u"].double().requires_grad_(), told["y"]
    y_ND = mixer(u_BSD.flatten(0, 1), Sequences(*u_BSD.shape[:2], None))
    y_ND.backward(told["dy"].double().flatten(0, 1))
    if bad := unlike(y_ND.detach().view(wanted.shape).float(), wanted, LOGITS / 10):
        return f"y: {bad}"
    found = {f"grad.{name}": parameter.grad for name, parameter in mixer.named_parameters()} | {"grad.u": u_BSD.grad}
    asked = {name: x for name, x in told.items() if name.startswith("grad.")}
    if found.keys() != asked.keys():
        return f"gradients of other tensors: {sorted(found.keys() ^ asked.keys())}"
    limits = ((name, LOGITS / 10 * max(1.0, float(x.abs().max()))) for name, x in asked.items())
    differences = ((name, unlike(found[name].float(), asked[name], limit)) for name, limit in limits)
    return next((f"{name}: {bad}" for name, bad in differences if bad), "")


def _mamba_initial(reference: Reference) -> str:
    """Shapes, ends and spread of a fresh initialization; the draws are others."""
    config = _mamba_config(reference, average="token", micro_batch=8, mesh={})
    family, whole = family_of(config), dict[str, Tensor]()
    for spec in family.parameters(family.shape(config, reference.model["vocab_size"]), Place()):
        flat = torch.empty(spec.numel, dtype=torch.float64)
        initialize_([ElementRange(spec, 0, spec.numel, flat)], seed=1)
        for piece in spec.pieces:
            box = tuple(slice(first, first + count) for first, count in zip(piece.start, piece.size, strict=True))
            values = flat[piece.offset : piece.offset + int(np.prod(piece.size))]
            whole.setdefault(piece.name, torch.empty(piece.shape, dtype=flat.dtype))[box] = values.view(piece.size)
    found = _theirs(config, whole)
    for name, told in reference.info["init_statistics"].items():
        if list(found[name].shape) != told["shape"]:
            return f"{name}: shape {list(found[name].shape)} instead of {told['shape']}"
        spread, error = float(found[name].std(correction=0)), 4 * max(told["std"], 1e-9) / found[name].numel() ** 0.5
        if abs(float(found[name].mean()) - told["mean"]) > 2 * error or abs(spread - told["std"]) > 2 * error:
            return f"{name}: mean {float(found[name].mean()):g}, std {spread:g} instead of {told}"
    return ""


# ---- what models of all kinds have


def _case(kind: str, reference: Reference, what: str, compare: Callable[[], str]) -> Case:
    return Case(kind, f"{reference.name} {what}", compare)


def _config(reference: Reference, *, average: str, micro_batch: int, mesh: Mapping[str, Any], length: int) -> RunConfig:
    """The parts that all models share."""
    model, train = reference.model, {**_TRAIN, **reference.train}
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(
            num_layers=model["num_layers"],
            hidden_size=model["hidden_size"],
            num_heads=model["num_attention_heads"],
            ffn_hidden_size=model["ffn_hidden_size"],
            vocab_size=model["vocab_size"],  # theirs counts the padding as ids
            max_position=model["max_position_embeddings"],
            position=megatron.POSITIONS[model["position_embedding"]],
            norm=model["normalization"].lower(),
            norm_epsilon=model.get("layernorm_epsilon", 1e-5),
            activation=megatron.activation(model),
            bias=model["add_bias_linear"],
            tie_embeddings=model["tie_embeddings"],
        ),
        data=DataSection(blend="unused"),
        mesh=MeshSection(**mesh),
        train=megatron.train_section(train, sequence_length=length, micro_batch=micro_batch, loss_average=average),
        optimizer=megatron.optimizer_section(train),
    )


_TRAIN = {
    "steps": 20, "global_batch": 8, "lr": 0.003, "min_lr": 0.0003, "init_lr": 0.0, "warmup_iters": 5,
    "decay_iters": 20, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "clip_grad": 1.0,
}  # fmt: skip
Configure = Callable[..., RunConfig]


class _Tensors:
    """A source of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.held = tensors
        self.tensors = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in tensors.items()}

    def read(self, name: str, box: Any) -> Tensor:
        return self.held[name][tuple(slice(first, first + count) for first, count in zip(*box, strict=True))]

    @classmethod
    def whole(cls, source: Any) -> dict[str, Tensor]:
        """All tensors of a source."""
        return {
            name: source.read(name, (tuple(0 for _ in info.shape), info.shape)) for name, info in source.tensors.items()
        }


def _links(config: RunConfig) -> list[Any]:
    family, rows = family_of(config), config.model.vocab_size
    assert rows is not None, "the vocabulary is part of the model"
    layout = StateDictLayout(family=family, layers=range(config.model.num_layers), padded_rows=rows, written=True)
    return list(megatron_links(family.shape(config, rows), layout, state=""))


def _ours(config: RunConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors as our logical ones."""
    return _Tensors.whole(Linked(_Tensors(theirs), _links(config)))


def _theirs(config: RunConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our logical tensors under their names."""
    return _Tensors.whole(Linked(_Tensors(ours), [one.flipped() for one in _links(config)]))


def _model(reference: Reference, configure: Configure) -> Any:
    """The whole model with their weights, without an engine."""
    config = configure(reference, average="token", micro_batch=8, mesh={})
    family = family_of(config)
    how = {"groups": {"tp": Group.single("tp")}, "dtype": torch.float32, "device": torch.device("cpu")}
    model = family.build(family.shape(config, reference.model["vocab_size"]), Place(), **how)
    whole, held = _ours(config, reference.part("weights/")), dict(model.named_parameters())
    with torch.no_grad():
        for spec in family.parameters(model.shape, Place()):
            target = held.pop(spec.name).zero_().view(-1)
            for piece in spec.pieces:
                box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                values = whole[piece.name][box].flatten()
                target[piece.offset : piece.offset + len(values)] = values
    assert not held, f"parameters outside of the table: {list(held)}"
    return model


def _engine(context: RankContext, reference: Reference, config: RunConfig) -> Engine:
    engine = layouts(context, config)
    whole, held = _ours(config, reference.part("weights/")), engine.optimizer.state["weight"]
    engine.optimizer.gathers.release()
    for _, part, first in engine.optimizer.holds["weight"].slices():
        box = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
        values = whole[part.name][box].flatten()
        held[first : first + len(values)] = values
    engine.optimizer.publish()
    if engine.model_buffers is not None:
        engine.model_buffers.values.zero_()
    return engine


def _mine(engine: Engine, reference: Reference, step: int) -> list[Microbatch]:
    """This rank's microbatches of a step, as the loader deals them out."""
    batch, size = BATCHES[reference.model["kind"]](reference, step), engine.plan.micro_batch
    numbers = range(engine.dp.rank, engine.plan.global_batch // size, engine.dp.size)
    return [rows_of(batch, slice(size * number, size * number + size)) for number in numbers]


def _rank_gradients(context: RankContext, path: Path, config: RunConfig) -> Any:
    reference = Reference(path)
    engine = _engine(context, reference, config)
    batches = _mine(engine, reference, 0)
    engine.add_gradients(batches, own_means=True)
    return reduced(engine, len(batches) * engine.dp.size)


def _gradients(reference: Reference, configure: Configure) -> str:
    """Those of the first step of four microbatches."""
    config = configure(reference, average="megatron", micro_batch=2, mesh={})
    parts = [part for one in run_ranks(_rank_gradients, 1, reference.path, config) for part in one]
    grads = {name: torch.from_numpy(values) for name, values in assemble(parts).items()}
    return _unlike_gradients(reference, _theirs(config, grads))


def _unlike_gradients(reference: Reference, found: Mapping[str, Tensor]) -> str:
    wanted = reference.info["gradients"]
    if found.keys() != wanted.keys():
        return f"gradients of other tensors: {sorted(found.keys() ^ wanted.keys())[:4]}"
    for name, told in wanted.items():
        flat = found[name].flatten().double()
        limit = PROBE * max(1.0, told["norm"])
        if abs(float(flat.norm()) - told["norm"]) > limit:
            return f"{name}: norm {float(flat.norm())} instead of {told['norm']}"
        probe = float((flat * torch.cos(0.7 * torch.arange(len(flat), dtype=torch.float64) + 0.3)).sum())
        if "probe" in told and abs(probe - told["probe"]) > limit:
            return f"{name}: probe {probe} instead of {told['probe']}"
        first = torch.tensor(told["first4"], dtype=torch.float64)
        if bad := unlike(flat[: len(first)], first, limit):
            return f"{name}: first values: {bad}"
    for name, whole in (reference.part("grad_micro4/") | reference.part("grad/")).items():
        if bad := unlike(found[name], whole, WHOLE_GRADIENT):
            return f"{name}: {bad}"
    return ""


def _rank_steps(context: RankContext, path: Path, config: RunConfig) -> list[tuple[float, ...]]:
    """(loss, gradient norm, losses of other names) of each step."""
    reference = Reference(path)
    engine, out = _engine(context, reference, config), []
    for step in range(engine.plan.steps):
        size = engine.plan.global_batch
        now = rates(config.optimizer, engine.plan.schedule, steps=step, samples=step * size, batch=size)
        batches = _mine(engine, reference, step)
        report = engine.step(batches, now.learning_rate, weight_decay=now.weight_decay).read()
        out.append((report.loss, report.grad_norm, *report.named_losses.values()))
    return out


def _steps(
    reference: Reference, configure: Configure, log: str, mode: tuple[str, int], layout: str, *, beside: bool = True
) -> str:
    """Twenty steps against a log; "": the only one. `mode`: train.loss_average, and rows of a microbatch.

    `beside`: whether it has the losses beside that of labels.
    """
    if layout not in LAYOUTS and layout != "one rank":
        return f"unknown layout {layout}"
    ranks, mesh = LAYOUTS.get(layout, (1, {}))
    config = configure(reference, average=mode[0], micro_batch=mode[1], mesh=mesh)
    found = run_ranks(_rank_steps, ranks, reference.path, config)
    if any(curve != found[0] for curve in found):
        return "ranks report different losses"
    wanted = reference.info["logs"][log] if log else reference.info["steps"]
    if len(found[0]) != len(wanted):
        return f"{len(found[0])} steps instead of {len(wanted)}"
    for told, (loss, norm, *named) in zip(wanted, found[0], strict=True):
        where = f"step {told['step']}"
        of_labels = told["lm_token_weighted"] if log else told["loss_token_weighted"]
        if abs(loss - of_labels) > LOSS:
            return f"{where}: loss {loss} instead of {of_labels}"
        if abs(norm / told["grad_norm"] - 1) > NORM:
            return f"{where}: norm {norm} instead of {told['grad_norm']}"
        pairs = [told["sop"]] if told.get("sop") else told.get("mtp_mean_of_microbatch_means") or []
        if beside and (len(named) != len(pairs) or any(abs(a - b) > LOSS for a, b in zip(named, pairs, strict=True))):
            return f"{where}: losses beside {named} instead of {pairs}"
    return ""


# ---- decoders of variants/


def gpt_variant(reference: Reference) -> Iterator[Case]:
    """A file of variants/: logits and losses of one microbatch, and gradients."""
    yield _case("gpt", reference, "all", functools.partial(_gpt, reference))


def _gpt(reference: Reference) -> str:
    shape = megatron.shape_of(dict(reference.model))
    groups, device = {"tp": Group.single("tp")}, torch.device("cpu")
    model = build_gpt(shape, Place(), groups=groups, dtype=torch.float32, device=device)
    megatron.fill(model, reference.part("weights/"))
    batch, out = reference.part("batch/"), reference.part("out/")
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    with torch.no_grad():
        logits = model.logits(tokens)[..., : shape.vocab_size]
    if bad := unlike(logits, out["logits"], LOGITS):
        return f"logits: {bad}"
    loss, losses_N = model((), Microbatch(tokens_BS=tokens, labels_BS=labels, loss_mask_BS=mask))
    if bad := unlike(losses_N.view(mask.shape), out["per_token_loss"] * mask, LOGITS):
        return f"losses of tokens: {bad}"
    (loss / mask.sum()).backward()
    return unlike_norm(model, reference)


def unlike_norm(model: torch.nn.Module, reference: Reference) -> str:
    """The difference between the norm of all gradients and theirs."""
    total = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())  # type: ignore[union-attr]
    wanted = sum(told["norm"] ** 2 for told in reference.info["gradients"].values())
    return "" if abs((total / wanted) ** 0.5 - 1) <= NORM else f"norm {total**0.5} instead of {wanted**0.5}"


def moe_variant(reference: Reference) -> Iterator[Case]:
    """A file of variants/ with experts."""
    yield _case("moe", reference, "all", functools.partial(families_moe.variant, reference))


# ---- the list

BATCHES: Mapping[str, Callable[[Reference, int | None], Microbatch]] = {"bert": _bert_batch, "llama": _decoder_batch}
# Kinds of oracle/families, and of the variants of oracle/model.
COMPARED: Mapping[str, Callable[[Reference], Iterator[Case]]] = {
    "bert": bert, "t5": t5, "moe": moe, "mla_mtp": mla_mtp, "mamba": mamba,
}  # fmt: skip
VARIANTS: Mapping[str, Callable[[Reference], Iterator[Case]]] = {
    "bert": bert_variant, "t5": t5, "gpt": gpt_variant, "moe": moe_variant,
}  # fmt: skip
LATER: Mapping[str, int] = {"llava": 25, "retro": 25}
KINDS = ("gpt", "bert", "t5", "moe", "mla_mtp", "mamba", "llava", "retro")


def cases_of(root: Path) -> Iterator[Case]:
    """Every case of a folder; what cannot be read, and what nobody knows, is a case that fails."""
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        if folder.name != "variants" and (root / "variants").is_dir():
            continue  # of oracle/model: other programs compare it
        for path in sorted(folder.glob("*.safetensors")):
            yield from _cases(path, variant=folder.name == "variants")
        for path in sorted(folder.glob("hybrid_patterns.json")):
            yield from patterns(path)


def _cases(path: Path, *, variant: bool) -> Iterator[Case]:
    kind = path.stem.partition("_")[0] if variant or path.parent.name == "bert_t5" else path.parent.name
    kind = "gpt" if kind == "llama" and variant else kind
    if kind in LATER:
        yield Case(kind, path.stem, lambda: "", LATER[kind])
        return
    comparers = VARIANTS if variant else COMPARED
    if kind not in comparers:
        yield Case(kind, path.stem, functools.partial(unknown, kind))
        return
    try:
        yield from list(comparers[kind](Reference(path)))
    except (*MALFORMED, SafetensorError) as error:
        yield Case(kind, path.stem, functools.partial(unreadable, repr(error)))


PROGRAM = Program("families", str(__doc__), KINDS, cases_of, fails=(RankError, RankHang))
compare, main = PROGRAM.compare, PROGRAM.main


if __name__ == "__main__":
    # Functions of __main__ cannot be sent to other processes.
    from tests.oracles import families

    sys.exit(families.main())
