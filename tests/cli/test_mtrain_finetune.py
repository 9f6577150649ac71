"""mtrain finetune: the file that it writes, what it trains on, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from cli import finetune_recipe
from cli.finetune_recipe import model_keys
from cli.mtrain import main
from cli.mtrain_init import parsed
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_chat, make_pairs, write_jsonl
from tests.trainer.convert.hf_models import save, save_tokenizer
from trainer.config.parse import load_config
from trainer.config.sections import LoRASection
from trainer.convert.convert import open_model
from trainer.convert.model_keys import effective
from trainer.parallel.mesh import mesh_of
from trainer.plan.devices import device_named
from trainer.run.metrics import read_metrics
from trainer.run.train import train
from trainer.tasks.loaded_model import Model

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template beside its tokenizer; chats, texts, and a corpus of another tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    tiny = save("llama2", folder / "tiny", max_position_embeddings=128)
    (tiny / "chat_template.jinja").write_text(TEMPLATE)
    make_chat(folder)
    (folder / "c.jsonl").rename(folder / "chats.jsonl")
    write_jsonl(folder / "texts.jsonl", 1, documents=120)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finetune(*words: str) -> int:
    return main(["finetune", *words])


def test_conversations_are_trained_and_the_same_command_continues(here, capsys):
    words = ("tiny", "chats.jsonl", "--epochs", "0.1", "--lr", "1e-3", "--sequence-length", "64")
    assert finetune(*words) == 0
    said = capsys.readouterr()
    run = here / "runs/tiny-chats"
    assert "conversations under 'messages'" in said.err and said.out.endswith("mtrain chat runs/tiny-chats\n")
    config = load_config(run / "run.toml")
    assert (config.data.kind, config.checkpoint.init_from, config.optimizer.lr) == ("chat", "tiny", 1e-3)
    assert (config.precision.dtype, config.train.sequence_length, config.model.max_position) == ("fp32", 64, 128)
    assert Model.load(run).context == 128, "the model's, whatever that of the rows"
    assert config.train.steps == 4 and (run / "checkpoints/step-4").is_dir()
    settings = json.loads((run / "tokenizer/tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE, "it stays with the tokenizer, for mtrain chat and exports"

    assert finetune(*words) == 0
    assert "step 4 is already done" in capsys.readouterr().out
    assert finetune(*words, "optimizer.weight_decay=0") == 2
    error = capsys.readouterr().err
    assert "run.toml already exists, with other settings" in error and "mtrain train runs/tiny-chats/run.toml" in error


def test_a_template_file_stays_with_the_tokenizer(here, capsys):
    """So nobody has to name it again to chat with the run, and an export has it."""
    mine = TEMPLATE.replace("assistant", "bot").replace("{{ m.role }}", "{{ m.role|replace('assistant', 'bot') }}")
    (here / "mine.jinja").write_text(mine)
    words = ("tiny", "chats.jsonl", "--epochs", "0.1", "--sequence-length", "64", "--chat-template")
    assert finetune(*words, "mine.jinja") == 0
    assert capsys.readouterr().out.endswith("mtrain chat runs/tiny-chats\n")
    settings = json.loads((here / "runs/tiny-chats/tokenizer/tokenizer_config.json").read_text())
    assert settings["chat_template"] == mine
    (here / "wrong.jinja").write_text("no template")
    for name, said in (("none.jinja", "none.jinja"), ("wrong.jinja", "wrong.jinja is not a chat template")):
        assert finetune(*words, name, "--folder", f"runs/{name}") == 2
        assert said in capsys.readouterr().err


def test_the_template_file_of_a_run_is_used_for_its_conversations(here):
    shutil.copytree(here / "tiny", here / "run")
    mine = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    facts = {"chat_template": "mine.jinja", "chat_template_source": mine}
    (here / "run/tokenizer_facts.json").write_text(json.dumps(facts))
    assert finetune("run", "chats.jsonl", "--print", "--epochs", "0.1", "--sequence-length", "64") == 0
    settings = json.loads((here / "runs/run-chats/data/tokenizer/tokenizer_config.json").read_text())
    assert settings["chat_template"] == mine


def test_adapters_are_trained_and_go_on_from_a_folder_of_peft(here, capsys):
    words = ("chats.jsonl", "--lora", "4", "--epochs", "0.1", "--sequence-length", "64", "model.lora.alpha=12.0")
    assert finetune("tiny", *words) == 0
    run = here / "runs/tiny-chats"
    config = load_config(run / "run.toml")
    assert config.model.lora == LoRASection(rank=4, alpha=12.0) and config.optimizer.lr == 1e-3
    assert "parameters (4,096 trained) in fp32" in capsys.readouterr().err
    assert main(["convert", str(run), "adapter", "--to", "peft"]) == 0
    trained, first, adapter = (Model.load(folder).logits([1, 2, 3]) for folder in (run, "tiny", "adapter"))
    assert torch.equal(trained, adapter) and not torch.allclose(trained, first, atol=1e-4)

    print_only = ("--print", "--quiet", "--json")
    for words, lora, rate in (
        (("--lora", "4"), {"rank": 4, "alpha": 12.0, "targets": ["q", "k", "v", "out", "gate", "up", "down"]}, 10),
        ((), None, 1),
    ):
        capsys.readouterr()
        assert finetune("adapter", "chats.jsonl", *words, *print_only) == 0
        tables = json.loads(capsys.readouterr().out)["config"]
        assert tables["model"].get("lora") == lora and tables["optimizer"]["lr"] == pytest.approx(rate * 1e-4)
    template = json.loads((here / "runs/adapter-chats/data/tokenizer/tokenizer_config.json").read_text())
    assert template["chat_template"] == TEMPLATE
    assert finetune("adapter", "chats.jsonl", "--lora", "8") == 2
    assert "holds adapters that differ from [model.lora]\n  found: rank 8" in capsys.readouterr().err
    (here / "tiny").rename(here / "moved")
    assert main(["train", "runs/tiny-chats/run.toml", "train.steps=9", "optimizer.decay_steps=9"]) == 2
    assert "checkpoint.init_from = tiny: there is no folder tiny" in capsys.readouterr().err
    assert main(["check", "runs/tiny-chats/run.toml"]) == 2
    assert "checkpoint.init_from = tiny: there is no folder tiny" in capsys.readouterr().err


def test_texts_are_packed_and_print_does_not_train(here, capsys):
    options = ("--print", "--gpus", "8", "--device", "H100", "--batch-tokens", "2K", "--valid", "texts.jsonl")
    assert finetune("tiny", "texts.jsonl", *options, "data.allow_overlap=true", "train.steps=7") == 0
    (here / "run.toml").write_text(capsys.readouterr().out)
    config = load_config(here / "run.toml")
    assert (config.data.kind, config.data.document_masks, config.precision.dtype) == ("packed", True, "bf16")
    assert (config.train.sequence_length, config.train.global_batch, config.train.steps) == (128, 16, 7)
    assert config.data.valid == ("runs/tiny-texts/data/valid/texts_text_document.json",)
    assert config.data.split == "100,0,0" and config.train.eval_interval
    assert sorted(path.name for path in (here / "runs/tiny-texts").iterdir()) == ["data"]


def test_rows_are_halved_until_a_layout_fits(here, capsys, monkeypatch):
    monkeypatch.setattr(finetune_recipe, "SHORTEST_ROW", 32)
    device = device_named("H100")
    assert device is not None
    monkeypatch.setattr("trainer.plan.layouts.USABLE", 900_000 / device.memory_bytes)  # rows of 128 need 952,128
    words = ("tiny", "texts.jsonl", "--print", "--gpus", "1", "--device", "H100", "--json")
    assert finetune(*words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["config"]["train"]["sequence_length"] == 64
    assert "rows of 128 tokens do not fit into memory; trying 64" in err
    assert finetune(*words, "--sequence-length", "128") == 2
    assert "no layout of 1 x H100 works" in capsys.readouterr().err


def test_steps_follow_from_rows_and_epochs(here, capsys):
    steps = []
    for epochs in ("1", "3"):
        words = ("--print", "--quiet", "--epochs", epochs, "--batch-tokens", "512", "--json")
        assert finetune("tiny", "texts.jsonl", *words) == 0
        steps.append(json.loads(capsys.readouterr().out)["config"]["train"])
    rows = steps[0]["eval_interval"]  # steps of an epoch
    assert steps[0]["global_batch"] == 4 and steps[0]["steps"] == rows and 3 * rows - 3 < steps[1]["steps"] <= 3 * rows


def test_pairs_are_trained_on_by_dpo(here, capsys):
    make_pairs(here, number=12)
    (here / "p.jsonl").rename(here / "pairs.jsonl")
    assert finetune("tiny", "pairs.jsonl", "--print") == 2
    assert "holds pairs of conversations\n  try: --dpo" in capsys.readouterr().err
    assert finetune("tiny", "chats.jsonl", "--dpo") == 2
    assert "--dpo: chats.jsonl holds no pairs of conversations" in capsys.readouterr().err
    assert not (here / "runs").exists(), "the first record says so, before all are tokenized"
    words = ("--dpo", "--beta", "0.2", "--epochs", "0.5", "--sequence-length", "128", "--folder", "dpo")
    assert finetune("tiny", "pairs.jsonl", *words, "--lr", "1e-3") == 0
    out, said = capsys.readouterr()
    assert "pairs of conversations under 'chosen'" in said and out.endswith("mtrain chat dpo\n")
    assert "DPO: log probabilities of " in said
    assert said.count("longer than a row of 128 tokens are left out: 7\n") == 1
    config = load_config(here / "dpo/run.toml")
    assert (config.data.kind, config.train.dpo_beta, config.optimizer.warmup_fraction) == ("pairs", 0.2, 0.1)
    (line, *_) = read_metrics(here / "dpo")
    assert line["loss"] == pytest.approx(math.log(2)) and line["named_losses"]["reward_margin"] == pytest.approx(0)


def test_instructions_are_conversations(here, capsys):
    for schema, record in (
        ("alpaca", {"instruction": "Add.", "input": "1", "output": "2", "text": "Below is"}),
        ("dolly", {"instruction": "Add.", "context": "1", "response": "2"}),
    ):
        (here / f"{schema}.jsonl").write_text((json.dumps(record) + "\n") * 8)
        assert finetune("tiny", f"{schema}.jsonl", "--print") == 0
        out, err = capsys.readouterr()
        assert f"conversations of {schema}" in err and 'kind = "chat"' in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none", "chats.jsonl"], "there is no folder none"),
        (["tiny", "none.jsonl"], "there is no data none.jsonl"),
        (["tiny", "empty.jsonl"], "empty.jsonl is empty"),
        (["tiny", "keys.jsonl"], "the first record of keys.jsonl has nothing to train on\n  found: keys 'prompt'"),
        (["tiny", "list.jsonl"], "nothing to train on\n  found: '[{}]'"),
        (["tiny", "c_messages_chat.json"], "in the data (ByteTokenizer of 257 ids)"),
        (["tiny", "other.json"], "other.json is not a manifest"),
        (
            ["tiny", "chats.jsonl", "--sequence-length", "129"],
            "found: model.max_position=128\n  try: --sequence-length 128",
        ),
        (["tiny", "chats.jsonl", "train.sequence_length=129"], "rows of 129 tokens are longer than those of tiny"),
        (["tiny", "chats.jsonl", "--epochs", "0"], "--epochs is 0.0"),
        (["tiny", "chats.jsonl", "--lora", "0"], "--lora is 0\n  expected: integer >= 1"),
        (["tiny", "chats.jsonl", "--lora", "-1"], "--lora is -1\n  expected: integer >= 1"),
        (["tiny", "pairs.jsonl", "--dpo", "--beta", "0"], "--beta is 0.0"),
        (["tiny", "pairs.jsonl", "--dpo", "train.dpo_beta=0"], "train.dpo_beta is 0"),
        (["tiny", "chats.jsonl", "--beta", "0.1"], "--beta is an option of --dpo"),
        (["tiny", "chats.jsonl", "--dpo", "--task", "classify"], "--task classify and --dpo exclude each other"),
        (["tiny", "chats.jsonl", "--lora", "4", "--task", "mnli"], "--task mnli and --lora exclude each other"),
        (["tiny", "chats.jsonl", "--epochs", "2", "train.steps=4"], "--epochs and train.* both say"),
        (["tiny", "chats.jsonl", "model.depth=4"], "there is no key model.depth"),
        (["tiny", "chats.jsonl", "train.stepz=4"], "there is no key train.stepz; did you mean steps?"),
        (["tiny", "chats.jsonl", "trian.steps=4"], "there is no section [trian]; did you mean train?"),
        (["tiny", "chats.jsonl", "--gpus", "900"], "--gpus 900: this machine has"),
        (
            ["tiny", "chats.jsonl", "--gpus", "0", "--device", "H100"],
            "--device H100 would have no effect: without GPUs",
        ),
        (
            ["tiny", "chats.jsonl", "--nodes", "1"],
            "--nodes 1 would have no effect: without GPUs the run is for the CPU",
        ),
        (
            ["tiny", "chats.jsonl", "mesh.tp=2", "--gpus", "2", "--print", "--nodes", "1"],
            "--nodes 1 would have no effect: mesh.tp=2 sets the layout\n  try: leave --nodes 1 out",
        ),
        (["bare", "chats.jsonl"], "bare has no tokenizer for the texts in chats.jsonl"),
        (
            ["tiny", "chats.jsonl", "--task", "mnli", "--add-tokens", "<new>"],
            "--add-tokens and --task exclude each other",
        ),
        (["tiny", "chats.jsonl", "--add-tokens", "<new>", "mesh.tp=2"], "mesh.tp=2 is a setting, and follows --add-"),
        (["tiny", "chats.jsonl", "--add-tokens", "<new>", "<|endoftext|>"], "the tokenizer has <|endoftext|> already"),
    ],
)
def test_what_cannot_be_trained_is_named_and_no_file_is_written(here, capsys, words, said):
    (here / "empty.jsonl").touch()
    (here / "keys.jsonl").write_text('{"prompt": "a"}\n')
    (here / "list.jsonl").write_text("[{}]\n")
    (here / "other.json").write_text('{"format": "x"}')
    if words[0] == "bare":
        shutil.copytree("tiny", "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert finetune(*words, "--quiet") == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") <= 4
    assert not list(here.glob("runs/*/run.toml"))
    option = {"--lora", "--beta", "--add-tokens", "--sequence-length"} & set(words)
    assert not option or not (here / "runs").exists(), "nothing is tokenized before the options are checked"


def _trained(context, config, folder):
    with contextlib.chdir(folder):
        train(config, context.join(mesh_of(config, context.world)))


@pytest.mark.parametrize("rows", [257, 300])
def test_new_tokens_begin_as_the_mean_and_are_exported(here, capsys, rows):
    """ChatML for a model that has never seen it: the vocabulary grows, or has rows that no token used."""
    before = open_model(save("llama2", here / "plain", max_position_embeddings=128, vocab_size=rows))
    new, first, size = ["<|im_start|>", "<|im_end|>"], 257, max(rows, 259)
    words = ("plain", "chats.jsonl", "--sequence-length", "64", "--epochs", "0.1", "--add-tokens", *new)
    assert finetune(*words) == 0
    said, run = capsys.readouterr(), here / "runs/plain-chats"
    assert f"rows {first} to {size - 1} of embedding and head begin as the mean" in said.out + said.err
    assert "plain is used" not in said.err, "the tokenizer has the tokens of ChatML"
    config = load_config(run / "run.toml")
    assert (config.model.vocab_size, config.checkpoint.new_rows_from) == (size, first)
    ranks = 2 if rows == first else 1
    one = [f"run.folder={here}/one", "train.steps=1", "optimizer.lr=1e-12", f"mesh.tp={ranks}"]
    run_ranks(_trained, ranks, load_config(run / "run.toml", one), here)
    start = open_model(here / "one")
    for name in ("embedding.weight", "head.weight"):
        width = start.source.tensors[f"weight/{name}"].shape[1]
        now = start.source.read(f"weight/{name}", ((0, 0), (size, width)))
        old = before.source.read(f"weight/{name}", ((0, 0), (first, width)))
        torch.testing.assert_close(now[:first], old, rtol=0, atol=1e-9)
        torch.testing.assert_close(now[first:], old.mean(0, keepdim=True).expand(size - first, -1), rtol=0, atol=1e-7)

    assert main(["convert", str(run), str(here / "hf"), "--to", "hf"]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(here / "hf"), AutoModelForCausalLM.from_pretrained(here / "hf")
    assert tokenizer.convert_tokens_to_ids(new) == [first, first + 1] and model.config.vocab_size == size
    assert tokenizer("a<|im_end|>")["input_ids"][-1] == first + 1
    wrong = ("train", str(run / "run.toml"), f"run.folder={here}/two", "checkpoint.new_rows_from=400")
    assert main([*wrong]) == 2 and "checkpoint.new_rows_from = 400 does not fit" in capsys.readouterr().err


def test_new_tokens_are_trained_whole_beside_adapters(here):
    save("llama2", here / "plain", max_position_embeddings=128, vocab_size=257)
    new = ["<|im_start|>", "<|im_end|>"]
    words = ("--sequence-length", "64", "--epochs", "0.1", "--lr", "1e-3", "--lora", "4", "--add-tokens", *new)
    assert finetune("plain", "chats.jsonl", "mesh.tp=2", *words) == 0
    run = here / "runs/plain-chats"
    config = load_config(run / "run.toml")
    assert config.model.lora == LoRASection(rank=4, modules_to_save=("embedding", "head"))
    assert (config.model.vocab_size, config.checkpoint.new_rows_from) == (259, 257)
    trained = Model.load(run).logits([1, 257, 3])
    for kind in ("peft", "hf"):
        assert main(["convert", str(run), kind, "--to", kind]) == 0
        assert torch.allclose(Model.load(here / kind).logits([1, 257, 3]), trained, atol=1e-6)
        assert AutoTokenizer.from_pretrained(here / kind).convert_tokens_to_ids(new) == [257, 258]

    peft = pytest.importorskip("peft")
    theirs = AutoModelForCausalLM.from_pretrained(here / "plain", dtype=torch.float32)
    theirs.resize_token_embeddings(259)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(theirs, here / "peft")(torch.tensor([[1, 257, 3]])).logits[0]
    assert torch.allclose(logits, trained, atol=1e-5)


def test_adapters_of_experts_are_refused_before_data_is_tokenized(here, capsys):
    save("mixtral", here / "experts", max_position_embeddings=128)
    assert finetune("experts", "chats.jsonl", "--lora", "4") == 2
    assert "--lora does not support [model.moe] of experts\n  try: leave --lora" in capsys.readouterr().err
    assert not (here / "runs").exists()


@pytest.mark.parametrize("valid", [None, "nothing", "empty.jsonl"])
def test_a_folder_of_another_run_and_bad_held_out_data_are_refused_before_data_is_tokenized(here, capsys, valid):
    (here / "empty.jsonl").touch()
    (here / "old").mkdir()
    for text in ("", 'checkpoint.init_from = "other"', 'checkpoint.init_from = "tiny"\ndata.blend = "old/data/a.json"'):
        (here / "old/run.toml").write_text(text)
        assert finetune("tiny", "chats.jsonl", "--folder", "old", *(("--valid", valid) if valid else ())) == 2
        expected = f"{valid}" if valid else "old/run.toml already exists, with other settings"
        assert expected in capsys.readouterr().err
    assert [path.name for path in (here / "old").iterdir()] == ["run.toml"]


def test_the_folder_of_a_run_that_another_command_began_is_refused_before_data_is_tokenized(here, capsys):
    (here / "base").mkdir()
    (here / "base/config.toml").write_text('run.folder = "base"\ndata.blend = "mix.json"')
    assert finetune("tiny", "chats.jsonl", "--folder", "base") == 2
    assert (
        "base/config.toml already exists, with other settings\n  try: --folder begins another run; mtrain train"
        in capsys.readouterr().err
    )
    assert [path.name for path in (here / "base").iterdir()] == ["config.toml"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_print_and_overwrite_leave_the_data_of_a_run_that_has_begun(here, capsys):
    shutil.copytree("tiny", "twin")
    sizes = ("--epochs", "0.1", "--sequence-length", "64", "--folder", "run", "--quiet")
    assert finetune("tiny", "chats.jsonl", *sizes) == 0
    before = contents(here / "run")
    for option, words, reason in (
        ("--print", ("twin", "chats.jsonl"), "run/config.toml already exists, with other settings"),
        ("--overwrite", ("twin", "chats.jsonl"), "run/config.toml already exists, with other settings"),
        ("--print", ("tiny", "texts.jsonl"), "run/config.toml already exists, with other settings"),
        ("--overwrite", ("tiny", "texts.jsonl"), "run/config.toml already exists, with other settings"),
        ("--print", ("tiny", "chats.jsonl", "--chat-train-on", "all"), "was assistant, is all\n  try: --folder begins"),
        ("--overwrite", ("tiny", "chats.jsonl", "--chat-train-on", "all"), "was assistant, is all\n  try: --folder"),
    ):
        capsys.readouterr()
        assert finetune(*words, *sizes, option) == 2, words
        error = capsys.readouterr().err
        assert reason in error and "--overwrite replaces" not in error and "another output prefix" not in error
        assert contents(here / "run") == before, words
    assert finetune("tiny", "chats.jsonl", *sizes, "--print") == 0, "of the same data the settings are printed"
    assert contents(here / "run") == before


def test_overwrite_replaces_the_data_of_a_run_that_has_not_begun(here, capsys):
    words = ("tiny", "chats.jsonl", "--print", "--quiet", "--sequence-length", "64")
    assert finetune(*words) == 0
    before = contents(here / "runs")
    assert finetune(*words, "--chat-train-on", "all") == 2
    error = capsys.readouterr().err
    assert "runs/tiny-chats/data has data that was tokenized from other input or with other options\n" in error
    assert "try: --folder begins another run, --overwrite replaces the data" in error
    assert contents(here / "runs") == before
    assert finetune(*words, "--chat-train-on", "all", "--overwrite") == 0
    assert contents(here / "runs") != before and not (here / "runs/tiny-chats/run.toml").exists()


def test_a_step_of_less_than_a_row_is_refused_and_one_of_fewer_rows_than_gpus_is_kept(here, capsys):
    assert finetune("tiny", "chats.jsonl", "--batch-tokens", "1", "--sequence-length", "64") == 2
    advice = "--batch-tokens 1 is less than a row of 64 tokens\n  try: --batch-tokens 64 or more, or a shorter"
    assert advice in capsys.readouterr().err and not (here / "runs").exists(), "before data is tokenized"
    assert finetune("tiny", "chats.jsonl", "--batch-tokens", "127", "--quiet") == 2
    assert "less than a row of 128 tokens\n  try: --batch-tokens 128" in capsys.readouterr().err
    for gpus, tokens, rows in (("0", "128", 1), ("0", "300", 2), ("8", "640", 5), ("8", "1300", 8)):
        device = ("--device", "H100") if gpus != "0" else ()
        words = ("--print", "--quiet", "--json", "--gpus", gpus, *device, "--batch-tokens", tokens)
        assert finetune("tiny", "chats.jsonl", *words) == 0
        assert json.loads(capsys.readouterr().out)["config"]["train"]["global_batch"] == rows
    words = ("--print", "--quiet", "--gpus", "3", "--device", "H100", "--batch-tokens", "128")
    assert finetune("tiny", "chats.jsonl", *words) == 2, "rows are not shortened for it"
    error = capsys.readouterr().err
    assert "no layout of 3 x H100 works\n  found: train.global_batch=1 is not a multiple of" in error
    assert "try: another number of --gpus, or more --batch-tokens" in error


def test_bad_records_stop_or_are_skipped(here, capsys):
    bad = here / "bad.jsonl"
    bad.write_text((here / "chats.jsonl").read_text() + '{"other": 1}\n')
    assert finetune("tiny", "bad.jsonl", "--print") == 3
    assert "(--on-error skip)" in capsys.readouterr().err
    assert finetune("tiny", "bad.jsonl", "--print", "--on-error", "skip") == 0
    assert "bad.jsonl: left out: 1 no-key" in capsys.readouterr().err


def test_a_first_line_that_is_not_json_is_shown(here, capsys):
    (here / "plain.jsonl").write_text("hello\n")
    assert finetune("tiny", "plain.jsonl", "--print") == 3
    assert "the first line of plain.jsonl is not JSON\n  found: 'hello'" in capsys.readouterr().err


def test_a_corpus_of_another_tokenizer_is_refused_with_both_named(here, capsys):
    assert finetune("tiny", "texts.jsonl", "--print", "--quiet") == 0
    capsys.readouterr()
    shutil.copytree("tiny", "other")
    save_tokenizer(here / "other")
    text = (here / "other/tokenizer.json").read_text()
    vocabulary = json.loads(text)
    pieces = vocabulary["model"]["vocab"]
    vocabulary["model"]["vocab"] = dict(zip(pieces, [*list(pieces.values())[::-1]], strict=True))
    (here / "other/tokenizer.json").write_text(json.dumps(vocabulary))
    corpus = "runs/tiny-texts/data/texts_text_document.json"
    assert finetune("other", corpus, "--print", "--quiet") == 2
    error = capsys.readouterr().err
    assert "another tokenizer than that of other" in error and error.count("HuggingFaceTokenizer of 257") == 2
    assert finetune("tiny", corpus, "--print", "--quiet") == 0


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gemma3"])
def test_the_model_section_describes_the_folder(tmp_path, name):
    model = open_model(save(name, tmp_path / name))
    tables = {
        "run": {"folder": "r"},
        "model": model_keys(model),
        "data": {"blend": "mock"},
        "train": {"sequence_length": 8, "global_batch": 1, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-4},
    }
    config = parsed(tables)
    assert effective(config) == effective(model.config) | {"vocab_size": model.vocab_size}
