"""Logits and every gradient of Hugging Face's models, with random weights and tiny shapes, in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.engines import microbatch
from tests.trainer.shapes import LLAMA
from trainer.layers.rope import frequencies, magnitude
from trainer.layers.shapes import RopeShape
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.shape import GPTShape
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
INSIDE = {
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.out": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
GPT2_OUTSIDE = {"embedding.weight": "wte.weight", "positions.weight": "wpe.weight"}
GPT2_INSIDE = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _llama(name, theirs):
    """Our parameter from their tensors by name."""
    if not name.startswith("blocks."):
        return theirs[OUTSIDE.get(name, "lm_head.weight")]
    _, number, part = name.split(".", 2)
    part, kind = part.rsplit(".", 1)
    return torch.cat([theirs[f"model.layers.{number}.{found}.{kind}"] for found in INSIDE[part]])


def _gpt2(name, theirs):
    """Their linear layers hold transposed weights."""
    if not name.startswith("blocks."):
        found = GPT2_OUTSIDE.get(name) or name.replace("final_norm", "ln_f")
        return theirs[f"transformer.{found}"]
    _, number, part = name.split(".", 2)
    part, kind = part.rsplit(".", 1)
    found = theirs[f"transformer.h.{number}.{GPT2_INSIDE[part]}.{kind}"]
    return found.t() if found.dim() == 2 else found


def _shape(**changes) -> GPTShape:
    given = {name: getattr(LLAMA, name) for name in GPTShape.__dataclass_fields__}
    return GPTShape(**(given | {"vocab_size": 96, "padded_vocab_size": 128, "norm_epsilon": 1e-6} | changes))


def _models():
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = transformers
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
    learned = {
        "num_kv_heads": 4,
        "position": "learned",
        "max_position": 64,
        "norm": "layernorm",
        "ffn_hidden_size": 128,
    }
    learned |= {"activation": "gelu", "bias": True, "tie_embeddings": True, "norm_epsilon": 1e-5}
    scaled = RopeShape(scaling="llama3", factor=8.0, original_length=16)
    window = {"window": 5}
    from trainer.kernels.scores import ScoreShape

    return {
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**gpt2, **off), _shape(**learned), _gpt2),
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, **rope), _shape(), _llama),
        "llama3": (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, rope_parameters=llama3), _shape(rope=scaled), _llama),
        "mistral": (
            hf.MistralForCausalLM,
            hf.MistralConfig(**SIZES, **rope, sliding_window=5),
            _shape(scores=ScoreShape(**window)),
            _llama,
        ),
        "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SIZES, **rope), _shape(bias="qkv"), _llama),
        "qwen3": (
            hf.Qwen3ForCausalLM,
            hf.Qwen3Config(**SIZES, **rope, head_dim=16),
            _shape(qk_norm=True, head_dim=16),
            _llama,
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_logits_and_gradients_are_theirs(name):
    kind, config, shape, find = _models()[name]
    torch.manual_seed(1)
    theirs = kind(config).float().train()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model = build_gpt(
        shape, Place(), groups={"tp": Group.single("tp")}, dtype=torch.float32, device=torch.device("cpu")
    )
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            found = find(key, weights)
            parameter.zero_()[: len(found)].copy_(found)
    tokens, labels = torch.randint(0, 96, (2, 2, 12))
    logits = theirs(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(model.logits(tokens)[..., :96], logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    loss, _ = model((), microbatch(tokens, labels, torch.ones(2, 12)))
    (loss / labels.numel()).backward()
    gradients = {key: parameter.grad for key, parameter in weights.items()}
    for key, parameter in model.named_parameters():
        expected = find(key, gradients)
        error = (parameter.grad[: len(expected)] - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max() + 1e-8, key  # a bias of keys has no gradient but rounding


def test_scaled_frequencies_are_theirs():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    for scaling, kind, more in (("yarn", "yarn", {}), ("linear", "linear", {}), ("llama3", "llama3", None)):
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if more is None else more
        sizes = SIZES | {"hidden_size": 256, "max_position_embeddings": 128}
        config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": kind, **given, **more})
        expected, size = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        rope = RopeShape(scaling=scaling, factor=4.0, original_length=32)
        torch.testing.assert_close(frequencies(rope, 64).float(), expected.float(), rtol=1e-6, atol=0)
        assert magnitude(rope) == pytest.approx(size)


def test_ntk_stretches_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    """bloc97's rule; the library has only the form that depends on the length."""
    plain, scaled = (frequencies(RopeShape(scaling=kind, factor=4.0), 64) for kind in ("none", "ntk"))
    assert (plain[0] / scaled[0]).item() == pytest.approx(1)
    assert (plain[-1] / scaled[-1]).item() == pytest.approx(4)
