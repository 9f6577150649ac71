"""`mtrain prove`: an interrupted run against an uninterrupted one, and the differences that it must find."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.mtrain import main
from cli.mtrain_prove import proof_text
from mdata import UsageError
from tests.helpers.ranks import run_alone
from tests.helpers.runs import make_config, make_mix
from trainer.checkpoint.location import checkpoints_of
from trainer.config.parse import dump_config, load_config
from trainer.config.sections import CheckpointSection, MeshSection, PrecisionSection
from trainer.kernels.plain import AdamConstants, AdamState, adamw_
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run import determinism
from trainer.run.determinism import make_deterministic
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics
from trainer.run.prove import COMPUTED, compare, prove
from trainer.run.run_folder import owned_folder
from trainer.run.step_report import SkippedSteps, StepReport
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prove")
    mix = {**make_mix(folder, ["first", "second", "held"]), "mix": folder / "mix.json"}
    made = make_config(folder / "run", blend=mix["mix"], valid=[mix["held"]], steps=8, eval_interval=2, eval_samples=5)
    return replace(made, mesh=MeshSection(), checkpoint=CheckpointSection(interval=2, keep=9))


def alone(config):
    return train(config, join_world(Mesh(1), placement=Placement()))


def curve(folder):
    return [[line.get(name) for name in COMPUTED] for line in read_metrics(Path(folder))]


def test_a_run_that_ends_early_and_goes_on_has_the_curve_of_one_that_does_not(config, tmp_path):
    whole, parts = (replace(config, run=replace(config.run, folder=str(tmp_path / name))) for name in ("a", "b"))
    alone(whole)
    parts = replace(parts, train=replace(parts.train, exit_interval=3))
    assert [alone(parts).step for _ in range(3)] == [3, 6, 8]
    assert curve(tmp_path / "b") == curve(tmp_path / "a")


def test_a_run_in_fp16_can_end_while_the_loss_scale_comes_down(config, tmp_path):
    """Its first steps are skipped, but their state is sound; the same command would repeat them for ever."""
    half = replace(config, precision=PrecisionSection(dtype="fp16"), train=replace(config.train, exit_interval=3))
    whole, parts = (replace(half, run=replace(half.run, folder=str(tmp_path / name))) for name in ("a", "b"))
    alone(replace(whole, train=replace(whole.train, exit_interval=None)))
    assert [alone(parts).step for _ in range(3)] == [3, 6, 8]
    assert curve(tmp_path / "b") == curve(tmp_path / "a")
    assert not read_metrics(tmp_path / "a")[2]["grad_norm"], "a skipped step"
    assert not prove(half, tmp_path / "proof", restart=2, steps=5, train=alone).differences


def test_a_run_does_not_end_early_behind_a_step_without_a_checkpoint(config, tmp_path, monkeypatch):
    """A gradient that is not finite may mean that the run has diverged; it ends after the next sound step."""
    engine_step = Engine.step

    def step(self, batches, rate, **how):
        found = engine_step(self, batches, rate, **how)
        steps.append(0)
        return found

    steps: list[int] = []
    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(SkippedSteps, "leaves_sound", lambda self, report: len(steps) > 4)
    early = replace(
        config,
        run=replace(config.run, folder=str(tmp_path / "run")),
        train=replace(config.train, exit_interval=3),
        checkpoint=CheckpointSection(),
    )
    assert alone(early).step == 5
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))] == ["step-5"]


def test_only_one_run_writes_to_a_folder_of_checkpoints(config, tmp_path):
    first = replace(config, checkpoint=CheckpointSection(folder=str(tmp_path / "both")))
    world = join_world(Mesh(1), placement=Placement())
    second = replace(first, run=replace(first.run, folder=str(tmp_path / "second")))
    with owned_folder(first, world), pytest.raises(UsageError, match=r"both/\.lock is held"):
        alone(second)
    assert alone(replace(second, train=replace(second.train, steps=1))).step == 1
    assert not (tmp_path / "both" / ".lock").exists()
    one = replace(second, checkpoint=CheckpointSection(folder=f"{second.run.folder}/."))
    assert alone(replace(one, train=replace(one.train, steps=2))).step == 2, "one folder for both"


@pytest.mark.parametrize(("report", "sound"), [
    ({"applied": True, "grad_norm": 2.0}, True),
    ({}, True),
    ({"loss_scale": 1.0}, False),
    ({"loss": float("nan")}, False),
])  # fmt: skip
def test_a_skipped_step_is_sound_as_long_as_the_loss_scale_can_fall(report, sound):
    step = StepReport(
        **{"loss": 1.0, "num_tokens": 9, "grad_norm": float("inf"), "applied": False, "loss_scale": 8.0} | report
    )
    skipped = SkippedSteps(34, smallest_scale=1.0, batch="")
    skipped.add(1, step)
    assert skipped.leaves_sound(step) == sound
    assert SkippedSteps(0, smallest_scale=1.0, batch="").leaves_sound(step) == step.applied, "a constant scale"


def test_a_run_folder_says_where_its_checkpoints_are_wherever_it_is_read(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = replace(
        config,
        run=replace(config.run, folder="run"),
        train=replace(config.train, steps=1),
        checkpoint=CheckpointSection(folder="kept"),
    )
    alone(moved)
    monkeypatch.chdir(tmp_path / "run")
    assert checkpoints_of(tmp_path / "run") == tmp_path / "kept"
    assert (tmp_path / "kept" / "step-1").is_dir()


def test_the_best_checkpoints_are_those_of_the_last_evaluation_too(config, tmp_path):
    """Of the two best nothing else stays, though the last one is known only after its own save."""
    best = replace(
        config,
        run=replace(config.run, folder=str(tmp_path / "run")),
        checkpoint=CheckpointSection(interval=2, keep=1, keep_best=1),
    )
    alone(best)
    losses = {line["step"]: line["valid"] for line in read_metrics(tmp_path / "run") if line.get("valid")}
    (least,) = [step for step, one in losses.items() if one == min(losses.values(), key=lambda v: sum(v.values()))]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {"step-8", f"step-{least}"}


def test_an_interrupted_run_is_proved_equal(config, tmp_path):
    proof = prove(config, tmp_path, restart=2, steps=5, train=alone)
    assert not proof.differences and proof.steps == 5 and proof.slices > 20
    assert len(read_metrics(tmp_path / "straight")) == len(read_metrics(tmp_path / "interrupted")) == 5
    assert proof_text(proof).startswith("equal: 5 steps and ")


def test_noise_behind_the_restart_is_found_at_its_step(config, tmp_path, monkeypatch):
    """The last bit of one weight, after step 3 of the run that was restarted."""
    real, starts, steps = Engine.step, [0], [0]

    def step(self, *arguments, **options):
        steps[0] += 1
        if starts[0] == 3 and steps[0] == 2:
            weight = self.buffers.parameters.values
            weight[7] = torch.nextafter(weight[7], torch.tensor(torch.inf))
        return real(self, *arguments, **options)

    def counted(config):
        starts[0], steps[0] = starts[0] + 1, 0
        alone(config)

    monkeypatch.setattr(Engine, "step", step)
    proof = prove(config, tmp_path, restart=2, steps=5, train=counted)
    named = [one.what for one in proof.differences]
    assert named[0].endswith("of step 4") and any(name.startswith("tensor weight/") for name in named)
    assert proof_text(proof).startswith(f"not equal: {len(named)} differences")


def test_a_missing_step_and_another_counter_are_named(config, tmp_path):
    prove(config, tmp_path, restart=1, steps=2, train=alone)
    lines = (tmp_path / "straight/metrics.jsonl").read_text().splitlines()
    (tmp_path / "straight/metrics.jsonl").write_text(lines[0] + "\n")
    proof = compare(tmp_path / "straight", tmp_path / "interrupted", steps=2)
    assert {one.what: one.straight for one in proof.differences}["loss of step 2"] == "missing"


@pytest.mark.parametrize(
    ("restart", "steps", "said"),
    [(5, 5, "--restart 5 with --steps 5"), (0, 3, "--restart 0"), (2, 9, "more than train")],
)
def test_numbers_of_steps_that_do_not_fit_are_refused(config, tmp_path, restart, steps, said):
    with pytest.raises(UsageError, match=said):
        prove(config, tmp_path, restart=restart, steps=steps, train=alone)
    assert not list(tmp_path.iterdir())


def test_the_command_on_a_run_folder_with_deterministic_kernels(config, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config))
    words = ["run.deterministic=true", "--steps", "3", "--restart", "1", "--nproc", "1", "--json"]
    assert main(["prove", str(folder), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["differences"]) == (3, []) and [path.name for path in folder.iterdir()] == [
        "config.toml"
    ]


def _made_deterministic(context, file):
    import torch._inductor.config

    for name in determinism.VARIABLES:
        os.environ.pop(name, None)
    make_deterministic(load_config(file))
    chooses = torch._inductor.config.triton.autotune_pointwise
    return torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"), chooses


def test_a_process_is_made_deterministic_when_the_run_says_so(config):
    file = Path(config.run.folder).with_suffix(".toml")
    for asked, expected in ((False, (False, None, True)), (True, (True, ":4096:8", False))):
        file.write_text(dump_config(replace(config, run=replace(config.run, deterministic=asked))))
        assert run_alone(_made_deterministic, str(file)) == expected
    assert set(determinism.VARIABLES) >= {"NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"}


def _compiled(context, file):
    """The numbers of the compiled kernels that two steps use."""
    make_deterministic(load_config(file))
    used, made = [], []

    def backend(graph, examples):
        made.append(graph)
        number = len(made)

        def run(*arguments):
            used.append(number)
            return graph(*arguments)

        return run

    update = torch.compile(adamw_, backend=backend)
    state = [torch.ones(100) for _ in range(5)]
    numbers, applied = torch.ones(5), torch.tensor(True)
    for _ in range(2):
        for start, stop, decay in ((0, 40, 0.1), (40, 50, 0.0), (50, 53, 0.1), (53, 93, 0.1), (93, 100, 0.0)):
            weight, first, second, parameter, gradient = (tensor[start:stop] for tensor in state)
            moments, constants = AdamState(weight, first, second, parameter), AdamConstants(0.9, 0.99, 1e-8, decay)
            update(moments, gradient, numbers, applied, constants)
    return used


def test_which_compiled_kernel_runs_does_not_depend_on_the_calls_before(config):
    """Else the first step after a start differs in the last bits from the same step of a run that goes on."""
    file = Path(config.run.folder).with_suffix(".toml")
    file.write_text(dump_config(replace(config, run=replace(config.run, deterministic=True))))
    assert run_alone(_compiled, str(file)) == [1, 2, 3, 1, 4] * 2
