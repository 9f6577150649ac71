"""Each script in examples/ is run; one whose library is not installed is skipped, and counted in the closing line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import mdata
from tests.helpers.house_rules import ROOT

EXAMPLES = ROOT / "examples"


def run(words: list[object], folder) -> str:
    """What a program prints, in a folder, without GPUs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        environment.pop(name, None)
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"text": f"{number} " + "words and words " * (number % 7 + 20)}) for number in range(60)]
    (folder / "in.jsonl").write_text("\n".join(rows))
    options = mdata.PreprocessOptions(
        input=folder / "in.jsonl", output_prefix=str(folder / "x"), tokenizer_type="ByteTokenizer", workers=1
    )
    mdata.preprocess(options)
    return folder / "x_text_document.json"


def expected_steps(corpus, *steps: int) -> list[str]:
    """What an example prints of the tokens of its steps, 8 samples each, without its loss."""
    data = mdata.open_dataset(corpus, sequence_length=64, seed=1234, num_samples=48)
    batches = iter(mdata.Loader(data, mdata.BatchPlan(8, 8, seed=1234)))
    sums = [next(batches)[0].tokens.sum() for _ in range(6)]
    return [f"step {step}: tokens {sums[step - 1]}" for step in steps]


def without_losses(output: str) -> list[str]:
    return [line[: line.index("loss")] + line[line.index("tokens") :] for line in output.splitlines() if "loss" in line]


def test_torch_dataloader_goes_on_behind_the_consumed_samples(corpus, tmp_path):
    script = EXAMPLES / "torch_dataloader.py"
    lines = without_losses(run([script, corpus], tmp_path))
    assert [line.partition(":")[0] for line in lines] == [f"{8 * step} samples" for step in range(1, 6)]
    assert without_losses(run([script, corpus, 24], tmp_path)) == lines[3:]


@pytest.mark.slow
def test_lightning_goes_on_from_its_checkpoint(corpus, tmp_path):
    pytest.importorskip("lightning")
    output = run([EXAMPLES / "lightning_fit.py", corpus, tmp_path / "run"], tmp_path)
    assert without_losses(output) == expected_steps(corpus, 1, 2, 3, 4, 5, 6)


@pytest.mark.slow
def test_accelerate_goes_back_to_its_checkpoint(corpus, tmp_path):
    pytest.importorskip("accelerate")
    output = run([EXAMPLES / "accelerate_loop.py", corpus, tmp_path / "run"], tmp_path)
    assert without_losses(output) == expected_steps(corpus, 1, 2, 3, 4, 5, 4, 5, 6)
    losses = output.splitlines()
    assert losses[3:5] == losses[5:7]


@pytest.mark.slow
def test_the_trainer_of_transformers_trains(corpus, tmp_path):
    pytest.importorskip("accelerate")
    output = run([EXAMPLES / "transformers_trainer.py", corpus, tmp_path / "run"], tmp_path)
    steps = [line.partition(":")[0] for line in output.splitlines() if line.startswith("step ")]
    assert steps == [f"step {step}" for step in range(1, 6)] and (tmp_path / "run" / "checkpoint-5").is_dir()


@pytest.mark.slow
def test_what_transformers_are_given_has_the_loss_of_our_labels(corpus):
    """And our own labels under the names of transformers have another: they would be shifted twice."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("transformers_trainer", EXAMPLES / "transformers_trainer.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    data = mdata.open_dataset(corpus, sequence_length=400, num_samples=16, kind="document")
    assert len(example.ForTransformers(data)) == 16
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=257, n_positions=401, n_embd=16, n_layer=1, n_head=1)
    ).eval()
    rows = data.read(range(16))
    assert (rows.loss_mask == 0).any()
    tokens, labels, mask = (torch.from_numpy(array) for array in (rows.tokens, rows.labels, rows.loss_mask))
    losses = torch.nn.functional.cross_entropy(model(tokens).logits.transpose(1, 2), labels, reduction="none")
    given = torch.utils.data.default_collate(example.ForTransformers(data).__getitems__(range(16)))
    torch.testing.assert_close(model(**given).loss, (losses * mask).sum() / mask.sum())
    wrong = model(input_ids=tokens, labels=torch.where(mask > 0, labels, -100)).loss
    assert abs(wrong - model(**given).loss) > 1e-4


@pytest.mark.slow
def test_train_loop_goes_on_in_another_layout(tmp_path):
    script = EXAMPLES / "train_loop.py"
    assert len(script.read_text().splitlines()) <= 60
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    lines = run([*torchrun, script, f"run.folder={tmp_path / 'run'}"], tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"tp 2 x dp 1, step {step}" for step in range(1, 6)),
        *(f"tp 1 x dp 2, step {step}" for step in (6, 7)),
    ]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"latest", "step-5", "step-7"}
