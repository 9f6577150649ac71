"""The comparison with oracle/families: what is equal, that it can fail, and a model of the form with its own twin."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.oracles import bert_twin, families_moe
from tests.oracles.families import KINDS, Reference, cases_of, compare, main
from tests.oracles.frame import answers

run = functools.partial(answers, compare)


@pytest.mark.parametrize("folder", ["model", pytest.param("families", marks=pytest.mark.soak)])
def test_berts_of_megatron_are_equal(oracles, folder):
    equal, lines, reasons = run(oracles / "oracle" / folder, "bert")
    assert equal and not reasons and len(lines) == 2


def test_logits_of_latent_attention_and_of_later_tokens_are_equal(oracles):
    cases = [case for case in cases_of(oracles / "oracle/families") if case.kind == "mla_mtp"]
    named = {case.name: case.compare for case in cases if case.name.endswith(" logits")}
    assert len(named) >= 4 and not any(compare_logits() for compare_logits in named.values())


@pytest.mark.soak
def test_latent_attention_and_later_tokens_of_megatron_are_equal(oracles):
    equal, _, reasons = run(oracles / "oracle/families", "mla_mtp")
    assert equal, reasons


def test_mixers_logits_and_patterns_of_megatron_are_equal(oracles):
    cases = [case for case in cases_of(oracles / "oracle/families") if case.kind == "mamba"]
    at_once = {case.name: case.compare for case in cases if case.name.endswith((" logits", " mixer"))}
    at_once |= {case.name: case.compare for case in cases if case.name.startswith("hybrid_patterns")}
    assert len(at_once) >= 19
    assert not [name for name, compare_case in at_once.items() if compare_case()]


@pytest.mark.soak
def test_mamba_and_hybrids_of_megatron_are_equal(oracles):
    equal, _, reasons = run(oracles / "oracle/families", "mamba")
    assert equal, reasons


@pytest.mark.soak
def test_decoders_of_megatron_are_equal(oracles):
    equal, _, reasons = run(oracles / "oracle/model", "gpt")
    assert equal, reasons


def test_decoders_with_experts_of_megatron_are_equal(oracles):
    equal, _, reasons = run(oracles / "oracle/model", "moe")
    assert equal, reasons


@pytest.mark.soak
def test_models_with_experts_of_megatron_are_equal(oracles):
    equal, _, reasons = run(oracles / "oracle/families", "moe")
    assert equal, reasons


@pytest.mark.parametrize("name", ["deepseek_like", "gptoss_like", "shared_gate", "capacity_probs"])
def test_outputs_and_routing_of_experts_are_equal(oracles, name):
    reference = Reference(oracles / f"oracle/families/moe/{name}.safetensors")
    assert families_moe.outputs(reference) == ""
    if name == "shared_gate":
        reference.model["extra"]["moe_router_topk"] = 3
        assert "logits: differs" in families_moe.outputs(reference), "the comparison can fail"


def test_what_cannot_be_compared_is_a_failure(tmp_path, capsys):
    assert run(tmp_path) == (False, ["0 of 0 cases equal"], []), "an empty folder"
    (tmp_path / "bert_t5").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "llava").mkdir()
    for name in ("bert_t5/bert_a", "new/b", "llava/c"):
        save_file({"weights/a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "bert_t5/bert_b.safetensors").write_bytes(b"nothing")
    (tmp_path / "bert_t5/bert_b.json").write_text('{"model": {}}')
    equal, lines, reasons = run(tmp_path)
    assert not equal
    assert lines == [
        "bert: 0 of 2 cases equal",
        "waiting: llava (part 25), 1 cases",
        "new: 0 of 1 cases equal",
        "0 of 3 cases equal",
    ]
    assert "unknown kind" in reasons[-1] and "cannot be read" in reasons[0] and "cannot be read" in reasons[1]
    assert main([str(tmp_path), "--kind", "nothing"]) == 1 and "nothing" not in KINDS
    assert capsys.readouterr().out == "0 of 0 cases equal\n"
    assert main([str(tmp_path / "none")]) == 1


# ---- a folder of the form, by plain tensors


def _step_losses(w: dict[str, Tensor], data: dict[str, Tensor], step: int, micro: int) -> tuple[Tensor, float, float]:
    """(the objective, the loss of all tokens, the loss of pairs) of a step in microbatches of this size."""
    total, (nats, tokens, pairs) = torch.zeros(()), torch.zeros(3)
    count = bert_twin.ROWS // micro
    for number in range(count):
        batch = {name: x[step % 4][number * micro : number * micro + micro] for name, x in data.items()}
        logits, ordered = bert_twin.outputs(w, batch)
        each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        pair = F.cross_entropy(ordered, batch["sentence_order"].long())
        total = total + ((each * mask).sum() / mask.sum() + pair) / count
        nats, tokens, pairs = nats + (each * mask).sum().detach(), tokens + mask.sum(), pairs + pair.detach() / count
    return total, float(nats / tokens), float(pairs)


def _log(micro: int, train: dict[str, Any]) -> list[dict[str, float]]:
    """The steps of AdamW with Megatron's schedule and decay."""
    w, data, log = {name: x.requires_grad_() for name, x in bert_twin.weights().items()}, bert_twin.data(), []
    optimizer = torch.optim.AdamW(
        [
            {"params": [x for x in w.values() if x.dim() > 1], "weight_decay": train["weight_decay"]},
            {"params": [x for x in w.values() if x.dim() == 1], "weight_decay": 0.0},
        ],
        betas=tuple(train["betas"]),
        eps=train["eps"],
    )
    for step in range(train["steps"]):
        total, loss, pairs = _step_losses(w, data, step, micro)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), train["clip_grad"])
        done = (step - train["warmup_iters"]) / (train["decay_iters"] - train["warmup_iters"])
        high, low = train["lr"], train["min_lr"]
        falling = low + (high - low) * (1 + math.cos(math.pi * done)) / 2
        rate = high * step / train["warmup_iters"] if done < 0 else falling
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        log.append({"step": step + 1, "lm_token_weighted": loss, "sop": pairs, "grad_norm": float(norm)})
    return log


def _probes(gradients: dict[str, Tensor]) -> dict[str, Any]:
    def of(x: Tensor) -> dict[str, Any]:
        flat = x.flatten().double()
        wave = torch.cos(0.7 * torch.arange(len(flat), dtype=torch.float64) + 0.3)
        return {"norm": float(flat.norm()), "first4": flat[:4].tolist(), "probe": float((flat * wave).sum())}

    return {name: of(x) for name, x in gradients.items()}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the oracle's form whose numbers the twin computed."""
    root = tmp_path_factory.mktemp("twin")
    weights, data = bert_twin.weights(), bert_twin.data()
    with torch.no_grad():
        first = {name: x[0] for name, x in data.items()}
        logits, pairs = bert_twin.outputs(weights, first)
        flat = logits.flatten(0, 1), first["labels"].long().flatten()
        losses = F.cross_entropy(*flat, reduction="none").view(bert_twin.ROWS, bert_twin.LENGTH)
    leaves = {name: x.requires_grad_() for name, x in bert_twin.weights().items()}
    total, _, _ = _step_losses(leaves, data, 0, 2)
    gradients = dict(zip(leaves, torch.autograd.grad(total, [*leaves.values()]), strict=True))
    train = {
        "steps": 6, "global_batch": bert_twin.ROWS, "lr": 3e-3, "min_lr": 3e-4, "init_lr": 0.0, "warmup_iters": 2,
        "decay_iters": 6, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0,
    }  # fmt: skip
    model = {
        "kind": "bert", "num_layers": bert_twin.LAYERS, "hidden_size": bert_twin.WIDTH,
        "num_attention_heads": bert_twin.HEADS, "binary": True, "ffn_hidden_size": bert_twin.INNER,
        "vocab_size": bert_twin.VOCABULARY, "max_position_embeddings": bert_twin.LENGTH + 4,
        "seq": bert_twin.LENGTH, "normalization": "LayerNorm", "add_bias_linear": True,
        "gated_linear_unit": False, "activation": "gelu", "tie_embeddings": True,
        "position_embedding": "learned_absolute", "extra": {},
    }  # fmt: skip
    told = {
        "model": model,
        "train": train,
        "logs": {"micro1": _log(bert_twin.ROWS, train), "micro4": _log(2, train)},
        "layouts": {"tp2sp": {}},
        "gradients": _probes(gradients),
    }
    (root / "bert_t5").mkdir()
    (root / "bert_t5/bert_twin.json").write_text(json.dumps(told))
    tensors = {f"weights/{name}": x.detach().bfloat16() for name, x in weights.items()}
    tensors |= {f"data/{name}": x for name, x in data.items()}
    tensors |= {"out/logits": logits, "out/binary_logits": pairs, "out/per_token_loss": losses}
    save_file(tensors, root / "bert_t5/bert_twin.safetensors")
    return root


def test_the_twin_is_equal(twin):
    equal, lines, reasons = run(twin)
    assert equal, reasons
    assert lines == ["bert: 5 of 5 cases equal", "5 of 5 cases equal"]


def test_each_case_of_the_twin_can_fail(twin, tmp_path):
    (tmp_path / "bert_t5").mkdir()
    told = json.loads((twin / "bert_t5/bert_twin.json").read_text())
    told["gradients"]["binary_head.bias"]["probe"] += 1e-4
    told["logs"]["micro1"][5]["sop"] += 1e-4
    told["logs"]["micro4"][5]["lm_token_weighted"] += 1e-4
    told["model"]["layernorm_epsilon"] = 2e-5
    (tmp_path / "bert_t5/bert_twin.json").write_text(json.dumps(told))
    (tmp_path / "bert_t5/bert_twin.safetensors").write_bytes((twin / "bert_t5/bert_twin.safetensors").read_bytes())
    equal, lines, reasons = run(tmp_path)
    assert not equal and lines[0] == "bert: 0 of 5 cases equal" and len(reasons) == 5
