"""Presets: the published numbers of parameters, keys that override them, and unknown names."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from mdata import UsageError
from trainer.config.parse import dump_config, load_config, parse_config, read_config
from trainer.config.presets import PRESETS, presets_like
from trainer.config.sections import Preset
from trainer.models.family import family_of
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import DataFacts, check
from trainer.plan.plan import make_plan

# Elements of the tensors that were published, of family gpt; another family's are in its own test.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "megatron-345m": 354_823_168,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352 + 11_610_067_968,  # the second: of the further layer
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
}


def _config(tmp_path, model: str):
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nfolder = "runs/x"\n[model]\n{model}\n[data]\nblend = "b"\n'
        "[train]\nsequence_length = 512\nglobal_batch = 1\nmicro_batch = 1\nsteps = 10\n[optimizer]\nlr = 1e-3\n"
    )
    return load_config(path)


OF_GPT = [name for name, keys in PRESETS.items() if keys.get("family", "gpt") == "gpt"]


@pytest.mark.parametrize("name", OF_GPT)
def test_presets_have_the_published_number_of_parameters(tmp_path, name):
    config = _config(tmp_path, f'preset = "{name}"')
    family = family_of(config)
    count = num_elements(family.parameters(family.shape(config, config.model.vocab_size), Place()))
    if name == "gpt3-175b":  # whose weights were not published
        assert count == pytest.approx(175e9, rel=0.005)
    else:
        assert count == PUBLISHED[name]
    assert check(config, 1, facts=None) == []


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12_879_925_248),
        ("qwen3-30b-a3b", 3_353_032_704),
        ("deepseek-v3", 37_552_282_624 + 11_610_067_968 - 248 * 3 * 7168 * 2048),
    ],
)
def test_of_experts_those_of_a_token_are_active(tmp_path, name, active):
    assert make_plan(_config(tmp_path, f'preset = "{name}"'), 1, facts=None).active_parameters == active


def test_a_key_wins_over_the_preset_and_is_written_down(tmp_path):
    config = _config(tmp_path, 'preset = "mistral-7b"\nnum_layers = 2\nbias = "qkv"')
    assert (config.model.num_layers, config.model.bias, config.model.window) == (2, "qkv", 4096)
    path = tmp_path / "again.toml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


COUNTED = ("mistral-7b", "olmo3-7b", "phi3-mini", "gemma2-2b", "gemma3-1b", "command-r7b", "pythia-160m")


@pytest.mark.parametrize("documents", [(), (100, 6000)])
@pytest.mark.parametrize("name", COUNTED)
def test_operations_count_windows_and_documents_in_every_family(tmp_path, name, documents):
    """By hand: 6 for each parameter that is multiplied, 12 x heads x width x the tokens that each layer attends to."""
    config = _config(tmp_path, f'preset = "{name}"\nmax_position = 8192')
    config = replace(config, train=replace(config.train, sequence_length=8192))
    facts = DataFacts(vocab_size=None, largest_id=None, eod=None, fingerprint=None, num_tokens=1 << 30)
    plan, model = make_plan(config, 1, facts=replace(facts, document_lengths=documents)), config.model
    attended = 0.0
    for layer in range(model.num_layers):
        windowed = model.window and not (model.window_interval and (layer + 1) % model.window_interval == 0)
        most = min(model.window, 8192) if windowed else 8192
        attended += sum(min(length, most) for length in documents) / len(documents) if documents else most
    multiplied = plan.num_parameters
    if not model.tie_embeddings:  # whose rows are looked up
        multiplied -= model.vocab_size * model.hidden_size
    assert plan.flops_per_token == 6 * multiplied + 12 * model.num_heads * plan.head_dim * attended


def test_a_key_of_a_sub_section_wins_over_the_preset(tmp_path):
    config = _config(tmp_path, 'preset = "stablelm2-12b"\n[model.gpt_neox]\nshared_norm = false')
    assert (config.model.gpt_neox.parallel_residual, config.model.gpt_neox.shared_norm) == (True, False)
    path = tmp_path / "again.toml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_only_a_key_that_was_written_is_blamed_for_what_it_needs(tmp_path):
    """Llama 3.2's rope_factor is the preset's; without its scaling it means nothing, and nobody wrote it."""
    config = _config(tmp_path, 'preset = "llama3.2-1b"\nrope_scaling = "none"')
    assert list(family_of(config).problems(config)) == []
    for value in ("8.0", "0.5"):  # the second is also below rope_beta_slow, which nothing reads either
        config = _config(tmp_path, f'preset = "llama3.2-1b"\nrope_scaling = "none"\nrope_beta_fast = {value}')
        (problem,) = family_of(config).problems(config)
        assert problem.startswith(f"model.rope_beta_fast={value} needs ")


def test_a_preset_counts_while_another_section_has_a_problem(tmp_path):
    """Checked in place of it was a model of one feature, whose heads rope could not rotate."""
    (tmp_path / "run.toml").write_text('[model]\npreset = "llama2-7b"\n')
    read = read_config(tmp_path / "run.toml")
    assert read.problems and (read.config.model.hidden_size, read.config.model.num_heads) == (4096, 32)


def test_an_unknown_preset_names_the_nearest(tmp_path):
    with pytest.raises(UsageError, match=r"model.preset is .*lama2-7b.*did you mean llama2-7b"):
        _config(tmp_path, 'preset = "lama2-7b"')
    _, problems = parse_config({"model": {"preset": 7}})
    assert any("model.preset is 7; expected one of" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("gpt2-small", "gpt2, gpt2-medium, gpt2-large or gpt2-xl"),
        ("GPT2_mediun", "gpt2-medium"),
        ("gpt3-small", "gpt3-175b"),
        ("llama-3-8b", "llama3-8b"),
        ("bert", "bert-base or bert-large"),
        ("lama2", "llama2-7b"),
        ("?", None),
    ],
)
def test_suggested_presets_are_of_the_same_models(name, like):
    assert presets_like(name) == like


def test_the_key_allows_the_presets_that_there_are():
    assert set(get_args(Preset)) == {*PRESETS}
