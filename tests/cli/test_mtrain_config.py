"""`mtrain config`: every setting, one of them, and a run of Megatron-LM's as TOML."""

from __future__ import annotations

import json
import os
import tomllib
from typing import get_args

import pytest

from cli.mtrain import main
from cli.mtrain_config import MOST_BYTES
from trainer.config.sections import FamilyName

RUN = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path corpus"
    " --vocab-file v.json"
)


@pytest.fixture
def every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.migrate.migrate.setting_problem", lambda name, value: None)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["config", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_setting_and_one(capsys):
    code, out, err = told(capsys)
    assert code == 0 and not err and "[model]" in out and "# seed = 1234" in out
    code, out, _ = told(capsys, "--key", "model.norm")
    assert code == 0 and out.splitlines()[0] == "model.norm: normalization in each layer and before the head"
    assert told(capsys, "--key", "norm")[1].startswith(out) and "kernels.norm: " in told(capsys, "--key", "norm")[1]
    assert told(capsys, "--key", "rope_interval")[1] == told(capsys, "--key", "model.rope_interval")[1]
    both = [told(capsys, "--key", key)[1] for key in ("model.num_heads", "model.mamba.num_heads")]
    assert told(capsys, "--key", "num_heads")[1] == "".join(both)
    assert "model.bias" in told(capsys, "--key", "model")[1]
    section = told(capsys, "--key", "model.bert")[1]
    assert (
        section.count("model.bert.") == section.count("\n") // 2
        and told(capsys, "--key", "model.bert.norm")[1] in section
    )
    families = ", ".join(map(repr, get_args(FamilyName)))
    assert told(capsys, "--key", "model.family")[1].endswith(f"one of {families}; default: 'gpt'\n")
    assert told(capsys, "--key", "run.folder")[1].endswith("a string, required\n")
    assert told(capsys, "--key", "model.num_kv_heads")[1].endswith("integer >= 1; default: derived from num_heads\n")
    assert told(capsys, "--key", "train.evaluate")[1].endswith("true or false; default: true\n")
    assert told(capsys, "--key", "rope_fraction")[1].endswith("number >= 0.01 and <= 1; default: 1.0\n")
    assert told(capsys, "--key", "rope_original_length")[1].endswith("integer >= 1; default: not set\n")
    code, out, err = told(capsys, "--key", "model.norm", "--from-megatron", RUN)
    assert code == 2 and not out and "--key and --from-megatron are given together" in err
    code, out, err = told(capsys, "--key", "model.nrm")
    assert code == 2 and not out and "did you mean model.norm?" in err


def test_a_run_as_toml(capsys, every_key):
    code, out, err = told(capsys, "--from-megatron", RUN)
    assert code == 0 and not err
    assert tomllib.loads(out)["train"]["global_batch"] == 8  # micro batch x 4 ranks
    assert "--nproc 4" in out and "--vocab-file v.json: the tokenizer is that of the corpus manifest" in out
    assert json.loads(told(capsys, "--from-megatron", RUN, "--json")[1])["settings"]["model"]["num_layers"] == 2


def test_arguments_of_a_script_belong_into_its_quotes(capsys):
    code, _, err = told(capsys, "--from-megatron", "train_gpt.sh", "checkpoints", "corpus")
    assert code == 2 and "try: --from-megatron 'SCRIPT ARGUMENT ...', all in the same quotes" in err


def test_a_script_with_its_own_arguments(tmp_path, capsys, every_key):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\nOUT=$1\n" + RUN.replace("--lr 1e-3", "--lr 1e-3 --save $OUT") + "\n")
    assert tomllib.loads(told(capsys, "--from-megatron", f"{script} runs/one")[1])["run"]["folder"] == "runs/one"
    code, out, err = told(capsys, "--from-megatron", str(script))
    assert (
        code == 2
        and not out
        and "--save has a value that cannot be resolved here: <argument_1>; give the script's arguments" in err
    )


def test_all_refused_arguments_at_once(capsys, every_key):
    code, out, err = told(
        capsys, "--from-megatron", f"{RUN} --heterogeneous-layers-config-path x.json --nonsense --eod-mask-loss"
    )
    assert code == 2 and not out
    assert "has 3 problems" in err and err.count("\n  - ") == 3
    assert "--heterogeneous-layers-config-path x.json: no model here supports it" in err


def test_the_program_is_named_and_its_local_kernels_are_ours(capsys, every_key):
    bert = RUN.replace("pretrain_gpt.py", "pretrain_bert.py")
    code, out, _ = told(capsys, "--from-megatron", f"{bert} --spec local")
    assert code == 0 and "# From Megatron-LM: pretrain_bert.py\n" in out
    assert "#   --spec local: this value changes nothing\n" in out
    code, _, err = told(capsys, "--from-megatron", f"{bert} --spec my.module spec")
    assert code == 2 and "error: pretrain_bert.py: --spec my.module spec: no model here supports it" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "argument --from-megatron: the value is empty"),
        ("   ", "argument --from-megatron: the value is blank"),
        ("no_such_file.sh", "No such file"),
        ("nonsense", "No such file"),
        (".", "cannot read the script ."),
        ("python train.py --lr 1", "expected one command that starts one of pretrain_gpt.py"),
        ("pretrain_gpt.py --num-layers '2", "is never closed"),
        ("for x in 1; do pretrain_gpt.py", "a block without its `done`"),
        ("python pretrain_ict.py --lr 1", "mtrain lacks two encoders"),
        ("/dev/zero", "not a regular file"),
        ("pretrain_gpt.py \x1b[31m", "is where an argument is expected"),
    ],
)
def test_wrong_input_is_told_in_short(text, expected, capsys):
    code, out, err = told(capsys, "--from-megatron", text)
    assert code == 2 and not out and expected in err and "\x1b" not in err
    assert len([line for line in err.splitlines() if not line.startswith("  - ")]) <= 4


def test_a_file_that_is_no_text(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = told(capsys, "--from-megatron", str(path))
    assert code == 2 and "is not a text file" in err and len(err.splitlines()) <= 4


def test_a_script_is_a_regular_file_of_a_scripts_size(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "large.sh").write_text("#" * (MOST_BYTES + 1))
    for name, text in (("pipe.sh", "not a regular file"), ("large.sh", "1,048,577 bytes")):
        code, _, err = told(capsys, "--from-megatron", str(tmp_path / name))
        assert code == 2 and text in err and len(err.splitlines()) <= 4
