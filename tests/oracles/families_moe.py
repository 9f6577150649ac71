"""Models with experts of Megatron-Core against the product's, for the program in families.py.

Compared in every layout whose note is empty: logits, routing, gradients, 20 steps with their balance losses, and the
biases of experts. What is another function there: capacity by position keeps tokens at random, so its routing is taken
from the file, and only outputs are compared; the global balance loss depends on the order of microbatches, so it is
left out, and only outputs are compared. With per-token gradients Megatron weights a microbatch's balance by all of its
tokens, where ours are the loss tokens; the seeds are changed accordingly here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankContext, run_ranks
from tests.oracles import families
from tests.oracles.frame import unlike
from tests.trainer.engines import assemble, logical, reduced
from tests.trainer.models import megatron
from trainer.config.sections import ModelSection, MoESection, RunConfig
from trainer.layers.experts import MoE
from trainer.layers.router import Routing, RowLayout
from trainer.models.stage import Microbatch, NamedLoss
from trainer.optim.schedules import rates
from trainer.run.engine import Engine

BIAS = 1e-7
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # ranks, mesh
    "one rank": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "tp2sp_etp2": (2, {"tp": 2, "sequence_parallel": True}),
    "ep2": (2, {"ep": 2, "expert_dispatch": "all_to_all"}),
    "ep2_allgather": (2, {"ep": 2, "expert_dispatch": "gather"}),
    "tp2sp_ep2_etp1": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
    "tp2sp_ep2_etp2_dp2": (4, {"tp": 2, "sequence_parallel": True, "ep": 2}),
    "pp2_ep2_dp2": (4, {"pp": 2, "ep": 2, "expert_dispatch": "all_to_all"}),
}
OTHER_BALANCE = ("global_aux_loss",)
_BALANCE = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "none": "none", "global_aux_loss": "none"}
_LOSSES = {"balance": ("load_balancing_loss", "seq_load_balancing_loss"), "z": ("z_loss",)}


def cases(reference: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """(what, comparison) of a file of families/moe."""
    yield "outputs", functools.partial(outputs, reference)
    extra = reference.model["extra"]
    if extra["moe_router_load_balancing_type"] in OTHER_BALANCE or extra.get("moe_token_drop_policy") == "position":
        return
    yield "gradients", functools.partial(gradients, reference)
    layouts = {"one rank": {}, **reference.info.get("layouts", {})}
    for layout in (name for name, told in layouts.items() if not told.get("note")):
        yield layout, functools.partial(steps, reference, layout)


def variant(reference: Any) -> str:
    """A file of the variants of oracle/model: one microbatch; gradients have those of the balance losses in them."""
    like = copy.copy(reference)
    like.model = {"num_query_groups": reference.model["num_attention_heads"], "rotary_base": 10_000, **reference.model}
    data, out = reference.part("batch/"), reference.part("out/")
    like.train = {"seq": data["tokens"].shape[1]}
    model = families._model(like, config_of)
    for bias in model.buffers():
        bias.zero_()
    labels, mask = data["labels"], data["loss_mask"]
    batch = Microbatch(tokens_BS=data["tokens"], labels_BS=labels, loss_mask_BS=mask, losses={}, counts={})
    with torch.no_grad():
        logits = model.logits(data["tokens"])[..., : model.shape.vocab_size]
    if bad := unlike(logits, out["logits"], families.LOGITS):
        return f"logits: {bad}"
    loss, losses_N = model((), batch)
    if bad := unlike(losses_N.view(mask.shape), out["per_token_loss"] * mask, families.LOGITS):
        return f"losses of tokens: {bad}"
    means = {name: beside.sum / beside.weight for name, beside in (batch.losses or {}).items()}
    told = reference.info["losses"]["moe_aux"]
    for kind, names in _LOSSES.items():
        found = [float(mean.detach()) for name, mean in means.items() if name.startswith(f"{kind}_")]
        wanted = [mean for name in names for mean in told.get(name, []) if mean]
        if len(found) != len(wanted) or any(abs(a / b - 1) > families.NORM for a, b in zip(found, wanted, strict=True)):
            return f"losses {kind} {found} instead of {wanted}"
    factors = {name: beside.factor for name, beside in (batch.losses or {}).items()}
    (loss / mask.sum() + sum(factors[name] * mean for name, mean in means.items())).backward()
    return families.unlike_norm(model, reference)


def config_of(reference: Any, *, average: str, micro_batch: int, mesh: Mapping[str, Any]) -> RunConfig:
    """The run; every option of theirs is read."""
    told, extra = reference.model, dict(reference.model["extra"])
    config = families._config(
        reference, average=average, micro_batch=micro_batch, mesh=mesh, length=reference.train["seq"]
    )
    for name in ("add_bias_linear", "moe_grouped_gemm", "moe_token_dispatcher_type"):
        extra.pop(name, None)
    frequency, extra["moe_layer_freq"] = extra.get("moe_layer_freq", 1), None
    moe = MoESection(
        num_experts=extra.pop("num_moe_experts"),
        top_k=extra.pop("moe_router_topk"),
        ffn_hidden_size=extra.pop("moe_ffn_hidden_size"),
        interval=frequency if isinstance(frequency, int) else 1,
        layers=() if isinstance(frequency, int) else tuple(frequency),
        score=extra.pop("moe_router_score_function", "softmax"),
        normalize_weights=not extra.pop("moe_router_pre_softmax", False),
        weight_scale=extra.pop("moe_router_topk_scaling_factor", None),
        groups=extra.pop("moe_router_num_groups", None),
        groups_per_token=extra.pop("moe_router_group_topk", None),
        expert_bias=extra.pop("moe_router_enable_expert_bias", False),
        expert_bias_rate=extra.pop("moe_router_bias_update_rate", 1e-3),
        balance=_BALANCE[extra.pop("moe_router_load_balancing_type")],
        balance_factor=extra.pop("moe_aux_loss_coeff", 0.0),
        z_loss_factor=extra.pop("moe_z_loss_coeff", 0.0),
        capacity_factor=extra.pop("moe_expert_capacity_factor", None),
        capacity_of="microbatch" if "moe_expert_capacity_factor" in told["extra"] else "row",
        drop={"probs": "weight", "position": "position"}[extra.pop("moe_token_drop_policy", "probs")],
        shared_ffn_hidden_size=extra.pop("moe_shared_expert_intermediate_size", None),
        shared_gate=extra.pop("moe_shared_expert_gate", False),
    )
    extra.pop("moe_pad_expert_input_to_capacity", None)  # slots of tokens that were not chosen, of weight 0
    extra.pop("moe_layer_freq")
    model: ModelSection = replace(
        config.model,
        num_kv_heads=told["num_query_groups"],
        rope_theta=float(told["rotary_base"]),
        activation_clamp=extra.pop("activation_func_clamp_value", None),
        activation_offset=extra.pop("glu_linear_offset", 0.0),
        bias=True if told["add_bias_linear"] else "qkv" if extra.get("add_qkv_bias") else False,
        qk_norm=extra.pop("qk_layernorm", False),
        attention_sinks=megatron.SINKS[extra.pop("softmax_type", None)],
        window=extra.pop("window_size", (-1, 0))[0] + 1 or None,
        window_interval=extra.pop("window_attn_skip_freq", None),
        moe=moe,
    )
    extra.pop("add_qkv_bias", None)
    assert not extra, f"options that nothing here reads: {extra}"
    return replace(config, model=model)


def batch_of(reference: Any, step: int) -> Microbatch:
    """A global batch."""
    data = {name: x[step % len(x)] for name, x in reference.part("data/").items()}
    return Microbatch(tokens_BS=data["tokens"], labels_BS=data["labels"], loss_mask_BS=data["loss_mask"])


def outputs(reference: Any) -> str:
    """Logits of the first microbatch, losses of the tokens of all, and the routing of the first."""
    model, out = families._model(reference, config_of), reference.part("out/")
    batch = batch_of(reference, 0)
    routers = [layer.router for layer in model.modules() if isinstance(layer, MoE)]
    maps = [_rows_first(out[f"router_map_{i}"], 2).bool() for i in range(len(routers))]
    probabilities = [_rows_first(out[f"router_probs_{i}"], 2) for i in range(len(routers))]
    at_random = reference.model["extra"].get("moe_token_drop_policy") == "position"
    for router, kept_NE in zip(routers, maps, strict=True):
        router.expert_bias = None if router.expert_bias is None else torch.zeros_like(router.expert_bias)
        if at_random:
            router.kept = functools.partial(_kept, kept_NE)
    seen: list[Routing] = []
    hooks = [router.register_forward_hook(lambda _, __, result: seen.append(result)) for router in routers]
    first = families.rows_of(batch, slice(0, 2))
    with torch.no_grad():
        if bad := unlike(
            model.logits(first.tokens_BS)[..., : model.shape.vocab_size], out["logits_microbatch0"], families.LOGITS
        ):
            return f"logits: {bad}"
        for hook in hooks:
            hook.remove()
        for number in range(1 if at_random else 4):
            part = slice(2 * number, 2 * number + 2)
            _, losses_N = model((), families.rows_of(batch, part))
            counted = out["per_token_loss"][part] * batch.loss_mask_BS[part]
            if bad := unlike(losses_N.view(counted.shape), counted, families.LOGITS):
                return f"losses of tokens: {bad}"
    for number, (routing, map_NE, probability_NE) in enumerate(zip(seen, maps, probabilities, strict=True)):
        experts = map_NE.shape[1]
        ours_NE = torch.zeros(len(map_NE), experts + 1).scatter_(1, routing.expert_NK, routing.weight_NK)[:, :experts]
        chosen_NE = torch.zeros_like(ours_NE).scatter_(1, routing.expert_NK.clamp(max=experts - 1), 1.0) > 0
        if not torch.equal((chosen_NE & (ours_NE > 0)), map_NE & (probability_NE > 0)):
            return f"routing of layer {number} with experts: other experts"
        if bad := unlike(ours_NE, probability_NE, families.LOGITS):
            return f"routing of layer {number} with experts: weights: {bad}"
    return ""


def _kept(kept_NE: Tensor, expert_NK: Tensor, weight_NK: Tensor, rows: RowLayout) -> Tensor:
    return kept_NE.gather(1, expert_NK)


def _rows_first(x_NE: Tensor, rows: int) -> Tensor:
    """Theirs begins with the first tokens of all rows."""
    return x_NE.view(-1, rows, x_NE.shape[1]).transpose(0, 1).reshape(x_NE.shape)


def _of_all_tokens(stage: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
    """Weigh balance losses by all tokens, as Megatron does for gradients per token."""
    _, batch = inputs
    tokens = batch.loss_mask_BS.sum() if batch.loss_tokens is None else batch.loss_tokens
    for name, loss in batch.losses.items():
        share = batch.tokens_BS.numel() / float(tokens)
        batch.losses[name] = NamedLoss(loss.sum, loss.weight, loss.factor * share)


def _engine(context: RankContext, reference: Any, config: RunConfig) -> Engine:
    engine = families._engine(context, reference, config)
    if engine.model_buffers is not None:
        engine.model_buffers.values.zero_()
    if reference.model.get("per_token"):
        for stage in engine.executor.stages.values():
            stage.register_forward_hook(_of_all_tokens)  # type: ignore[attr-defined]
    return engine


def _mine(engine: Engine, reference: Any, step: int) -> list[Microbatch]:
    batch, size = batch_of(reference, step), engine.plan.micro_batch
    numbers = range(engine.dp.rank, engine.plan.global_batch // size, engine.dp.size)
    return [families.rows_of(batch, slice(size * number, size * number + size)) for number in numbers]


def _average(reference: Any) -> str:
    return "token" if reference.model.get("per_token") else "megatron"


def _rank_gradients(context: RankContext, path: Any, config: RunConfig) -> Any:
    reference = families.Reference(path)
    engine = _engine(context, reference, config)
    batches = _mine(engine, reference, 0)
    own_means = config.train.loss_average == "megatron"
    engine.add_gradients(batches, own_means=own_means)
    tokens = float(batch_of(reference, 0).loss_mask_BS.sum())
    return reduced(engine, len(batches) * engine.dp.size if own_means else tokens)


def gradients(reference: Any) -> str:
    """Those of the first step of four microbatches."""
    config = config_of(reference, average=_average(reference), micro_batch=2, mesh={})
    parts = [part for one in run_ranks(_rank_gradients, 1, reference.path, config) for part in one]
    found = families._theirs(config, {name: torch.from_numpy(values) for name, values in assemble(parts).items()})
    if bad := families._unlike_gradients(reference, found):
        return bad
    whole = reference.part("grad/")
    return next(
        (f"{name}: {bad}" for name, x in whole.items() if (bad := unlike(found[name], x, families.WHOLE_GRADIENT))),
        "",
    )


def _rank_steps(context: RankContext, path: Any, config: RunConfig) -> list[dict[str, Any]]:
    reference = families.Reference(path)
    engine, out = _engine(context, reference, config), []
    for step in range(engine.plan.steps):
        size = engine.plan.global_batch
        now = rates(config.optimizer, engine.plan.schedule, steps=step, samples=step * size, batch=size)
        report = engine.step(_mine(engine, reference, step), now.learning_rate, weight_decay=now.weight_decay).read()
        biases = (
            []
            if engine.model_buffers is None
            else logical(engine.model_buffers.holds, engine.model_buffers.values.clone())
        )
        out.append({"loss": report.loss, "norm": report.grad_norm, "named": dict(report.named_losses), "bias": biases})
    return out


def steps(reference: Any, layout: str) -> str:
    """Twenty steps of a layout against the log of one process."""
    ranks, mesh = LAYOUTS[layout]
    config = config_of(reference, average=_average(reference), micro_batch=2, mesh=mesh)
    of_ranks = run_ranks(_rank_steps, ranks, reference.path, config)
    for number, told in enumerate(reference.info["steps"]):
        found = [of_rank[number] for of_rank in of_ranks]
        if bad := _unlike_step(told, found):
            return f"step {told['step']}: {bad}"
    return ""


def _unlike_step(told: Mapping[str, Any], of_ranks: list[dict[str, Any]]) -> str:
    found = of_ranks[0]
    if any(
        (one["loss"], one["norm"], one["named"]) != (found["loss"], found["norm"], found["named"]) for one in of_ranks
    ):
        return "ranks report different numbers"
    if abs(found["loss"] - told["loss_token_weighted"]) > families.LOSS:
        return f"loss {found['loss']} instead of {told['loss_token_weighted']}"
    if abs(found["norm"] / told["grad_norm"] - 1) > families.NORM:
        return f"norm {found['norm']} instead of {told['grad_norm']}"
    for kind, names in _LOSSES.items():
        wanted = next((told["aux"][name] for name in names if name in told["aux"]), [])
        values = [value for name, value in found["named"].items() if name.startswith(f"{kind}_")]
        if len(values) != len(wanted) or any(
            abs(a / b - 1) > families.NORM for a, b in zip(values, wanted, strict=True)
        ):
            return f"losses {kind} {values} instead of {wanted}"
    if "expert_bias_after" in told:
        biases = assemble([part for one in of_ranks for part in one["bias"]])
        for (name, bias), wanted in zip(sorted(biases.items()), told["expert_bias_after"], strict=True):
            if bad := unlike(torch.from_numpy(bias), torch.tensor(wanted), BIAS):
                return f"{name}: {bad}"
    return ""
