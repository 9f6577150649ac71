"""The configuration: what is read, overridden, refused and written back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from trainer.config.describe import describe
from trainer.config.parse import (
    AFTERWARDS,
    dump_config,
    key_names,
    load_config,
    parse_config,
    section_of,
    setting_problem,
    value_problems,
)
from trainer.config.sections import GPTNeoXSection, RunConfig
from trainer.plan.check import check

SMALL = """
[run]
folder = "run"
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
[data]
blend = "mix.json"
[train]
sequence_length = 16
global_batch = 8
micro_batch = 2
steps = 10
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(SMALL)
    return file


def problems(tables: dict[str, Any]) -> list[str]:
    config, found = parse_config(tables)
    assert (config is None) == bool(found)
    return found


def changed(section: str, **keys: Any) -> dict[str, Any]:
    tables = tomllib.loads(SMALL)
    tables.setdefault(section, {}).update(keys)
    return tables


def test_values_and_defaults(path):
    config = load_config(path)
    assert config.model.num_layers == 2
    assert config.run.seed == 1234
    assert config.mesh.tp == 1 and config.precision.dtype == "fp32" and config.checkpoint.keep == 2
    assert config.data.valid == ()


def test_the_tree_is_frozen(path):
    config = load_config(path)
    with pytest.raises(dataclasses.FrozenInstanceError, match="steps"):
        config.train.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=20", "train", "steps", 20),
        ("train.steps = 1_000", "train", "steps", 1000),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("optimizer.lr=2e-4", "optimizer", "lr", 2e-4),
        ("precision.dtype=bf16", "precision", "dtype", "bf16"),
        ('precision.dtype="bf16"', "precision", "dtype", "bf16"),
        ("mesh.sequence_parallel=true", "mesh", "sequence_parallel", True),
        ("data.blend=0.7 a 0.3 b", "data", "blend", "0.7 a 0.3 b"),
        ("data.blend=a=b", "data", "blend", "a=b"),
        ("run.folder=2024-01-01", "run", "folder", "2024-01-01"),
        ("run.folder=7", "run", "folder", "7"),
        ("data.split=98,1,1", "data", "split", "98,1,1"),
        ('data.valid=["a", "b"]', "data", "valid", ("a", "b")),
        ("model.preset=none", "model", "preset", None),
        ("model.num_kv_heads=none", "model", "num_kv_heads", None),
        ("recompute.mode=none", "recompute", "mode", "none"),
    ],
)
def test_overrides_win(path, override, section, key, value):
    got = getattr(getattr(load_config(path, [override]), section), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("override", ["steps=20", "train.steps", "train=20", ".steps=1", "train.=1", ""])
def test_an_override_without_its_form_is_refused(path, override):
    with pytest.raises(UsageError, match=r"is not an override; expected section\.key=value"):
        load_config(path, [override])


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (changed("modle"), "there is no section [modle]; did you mean model?"),
        ({**tomllib.loads(SMALL), "num_layers": 3}, "num_layers = 3 is in no section; write it below [model]"),
        ({**tomllib.loads(SMALL), "numlayers": 3}, "numlayers = 3 is in no section; did you mean model.num_layers?"),
        (changed("train", stepps=3), "there is no key train.stepps; did you mean steps?"),
        (changed("train", lr=3), "there is no key train.lr; did you mean optimizer.lr?"),
        (
            changed("mesh", xx=2),
            "there is no key mesh.xx; expected one of tp, cp, pp, ep, etp, expert_dispatch, expert_buffer, schedule, ",
        ),
        (
            changed("train", steps="ten"),
            "train.steps is 'ten'; expected integer >= 1",
        ),
        (changed("train", steps=True), "train.steps is True; expected integer >= 1"),
        (changed("train", steps=2.0), "train.steps is 2.0; expected integer >= 1"),
        (changed("train", steps=-1), "train.steps is -1; expected integer >= 1"),
        (
            changed("model", num_layers=1 << 40),
            "model.num_layers is 1099511627776; expected integer >= 1 and < 65536",
        ),
        (changed("train", steps=1 << 63), "train.steps is a number of 64 bits; expected integer >= 1"),
        (changed("train", steps=10**5000), "train.steps is a number of 16610 bits; expected"),
        (changed("optimizer", lr=10**5000), "optimizer.lr is a number of 16610 bits; expected number >= 0"),
        (changed("run", folder="a\udcff"), r"run.folder is 'a\udcff', which is not UTF-8; expected a string"),
        (changed("data", valid=["\ud800"]), r"data.valid is ['\ud800']; expected a list of strings"),
        (changed("run", folder=[0] * 999), f"run.folder is {str([0] * 999)[:200]} ...; expected a string"),
        (changed("optimizer", lr="x"), "optimizer.lr is 'x'; expected number >= 0"),
        (changed("optimizer", lr=float("nan")), "optimizer.lr is nan; expected number >= 0"),
        (changed("optimizer", lr=float("inf")), "optimizer.lr is inf; expected number >= 0"),
        (
            changed("optimizer", beta1=1.0),
            "optimizer.beta1 is 1.0; expected number >= 0 and < 1",
        ),
        (changed("run", folder=7), "run.folder is 7; expected a string"),
        (changed("mesh", sequence_parallel=1), "mesh.sequence_parallel is 1; expected true or false"),
        (
            changed("precision", dtype="fp8"),
            "precision.dtype is 'fp8'; expected one of 'fp32', 'bf16', 'fp16', 'fp64'",
        ),
        (
            changed("data", valid="a"),
            'data.valid is \'a\'; expected a list of strings, such as ["a", "b"]',
        ),
        (changed("data", valid=[1]), 'data.valid is [1]; expected a list of strings, such as ["a", "b"]'),
        (
            {**tomllib.loads(SMALL), "train": 3},
            "train = 3 is not a section; write [train] and put its keys below it",
        ),
    ],
)
def test_each_problem_has_its_words(tables, text):
    assert any(found.startswith(text) for found in problems(tables))


@pytest.mark.parametrize(
    ("section", "key", "value", "meant"),
    [
        ("train", "steps", 1e3, "1000"),
        ("precision", "dtype", "bf61", "bf16"),
        ("run", "deterministic", "True", "true"),
        ("run", "on_lost_node", "weit", "wait"),
        ("track", "to", "tensorboard", '["tensorboard"]'),
        ("track", "to", ["wandb", "mlfow"], '["wandb", "mlflow"]'),
        ("track", "to", "none", "[]"),
        ("precision", "dtype", "fp8", None),
        ("track", "to", ["wandb", 3], None),
        ("track", "to", [], None),
        ("train", "steps", float("inf"), None),
        ("run", "profile", 3, None),
    ],
)
def test_a_value_that_resembles_an_allowed_one_is_corrected(section, key, value, meant):
    found = [
        problem for problem in problems(changed(section, **{key: value})) if problem.startswith(f"{section}.{key}")
    ]
    assert [problem.partition("; did you mean ")[2] for problem in found] == (
        [] if value == [] else [f"{meant}?" if meant else ""]
    )


def test_missing_keys_are_named_in_one_problem_with_what_they_should_be():
    tables = tomllib.loads(SMALL)
    del tables["train"]["micro_batch"], tables["run"]
    assert problems(tables) == ["required and missing: run.folder (a string), train.micro_batch (integer >= 1)"]
    del tables["optimizer"]["lr"]
    tables["run"], tables["train"]["micro_batch"] = {"folder": "a"}, 1
    assert problems(tables) == ["optimizer.lr is missing; it is required: number >= 0"]


def test_all_problems_come_at_once(path):
    path.write_text(SMALL.replace("steps = 10", 'steps = "ten"\nlr = 1').replace("num_heads", "num_haeds"))
    with pytest.raises(UsageError) as error:
        load_config(path, ["nonsense", "optimizer.lr=-1"])
    lines = str(error.value).splitlines()
    assert lines[0] == f"{path} has 6 problems:"
    assert all(line.startswith("  - ") for line in lines[1:7])
    assert lines[7:] == [f"  try: {AFTERWARDS}"]


def test_one_problem_is_one_sentence(path):
    with pytest.raises(UsageError) as error:
        load_config(path, ["train.steps=-1"])
    assert str(error.value) == f"{path}: train.steps is -1; expected integer >= 1\n  try: {AFTERWARDS}"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read"),
        *((text, "not a TOML file") for text in (b"a = ", b"\xff", b"a = " + b"[" * 3000, b"a = " + b"9" * 5000)),
    ],
)
def test_an_unreadable_file_is_a_usage_error(tmp_path, content, what):
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=what) as error:
        load_config(file)
    assert len(str(error.value).splitlines()) <= 4


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
VALUES = {
    "str": TEXT,
    "bool": st.booleans(),
    "Positive": st.integers(1, 2**62),
    "Count": st.integers(0, 2**62),
    "Amount": st.floats(0, 1e30),
    "Fraction": st.floats(0, 1, exclude_max=True),
    "Small": st.floats(1e-30, 1, exclude_max=True),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
}


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    base, _ = parse_config(tomllib.loads(SMALL))
    assert base is not None
    sections = {}
    for field in dataclasses.fields(base):
        section = getattr(base, field.name)
        drawn = {f.name: draw(VALUES[f.type]) for f in dataclasses.fields(section) if f.type in VALUES}
        sections[field.name] = dataclasses.replace(section, **drawn)
    return RunConfig(**sections)


@given(configs())
def test_dumped_configurations_read_back_the_same(config):
    assert value_problems(config) == []
    again, found = parse_config(tomllib.loads(dump_config(config)))
    assert found == [] and again == config


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000])
def test_an_override_that_no_parser_takes_is_text(path, value):
    assert load_config(path, [f"run.folder={value}"]).run.folder == value
    with pytest.raises(UsageError, match=r"train\.steps is '"):
        load_config(path, [f"train.steps={value}"])


def test_values_of_a_tree_built_in_python_are_checked(path):
    config = load_config(path)
    broken = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=-1))
    assert value_problems(broken) == ["train.steps is -1; expected integer >= 1"]


def test_no_torch_is_imported():
    code = (
        "import sys, trainer.plan.plan, trainer.parallel.mesh, trainer.pipeline.actions; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_many_unknown_keys_are_one_short_message(tmp_path, monkeypatch):
    """A known key is looked for beside the first ones only: for 10,000 of them that took a minute."""
    compared: list[str] = []

    def compare(name: str, names: object) -> None:
        compared.append(name)
        assert len(compared) < 200  # here, so that the test does not take a minute to fail

    monkeypatch.setattr("trainer.config.parse.nearest", compare)
    path = tmp_path / "run.toml"
    path.write_text(
        SMALL + "".join(f"x{number} = 1\n" for number in range(10_000)) + "".join(f"[s{n}]\n" for n in range(1000))
    )
    with pytest.raises(UsageError) as error:
        load_config(path, ["model." + "a." * 10_000 + "b=1", "c" * 10_000])
    lines = str(error.value).splitlines()
    assert len(lines) < 110 and all(len(line) < 400 for line in lines)
    assert lines[0].endswith("has 11,002 problems:") and "and 10902 more" in str(error.value)
    assert compared


@pytest.mark.parametrize(("name", "fix"), [("run.toml", "correct that line"), ("mix.json", "give a run's TOML file")])
def test_another_kind_of_file_is_not_to_be_corrected(name: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=rf"{name} is not a TOML file(.|\n)*{fix}"):
        load_config(tmp_path / name)


def test_a_file_in_another_encoding_is_to_be_saved_again(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL, encoding="utf-16")
    with pytest.raises(UsageError, match=r"found: not UTF-8: byte 0xff at byte 1\n  try: save it as UTF-8"):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize("text", ["a" + ".a" * 50_000 + " = 1", "a = " + "[" * 5000, "[a" + ".b" * 50_000 + "]"])
def test_a_bomb_is_no_toml_file(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=r"run.toml is not a TOML file\n  found: .* more than 64"):
        load_config(tmp_path / "run.toml")


def test_an_override_that_is_a_bomb_is_a_text(path):
    with pytest.raises(UsageError, match=r"model.num_layers is '\{a.a"):
        load_config(path, ["model.num_layers={a" + ".a" * 30_000 + " = 1}"])


def test_only_a_regular_file_is_read(tmp_path):
    (tmp_path / "run.toml").symlink_to("/dev/null")
    with pytest.raises(UsageError, match=r"run.toml is not a regular file\n  found: a device"):
        load_config(tmp_path / "run.toml")


NOT_SET = {key.name: key.expected for key in describe() if key.default is None and not key.required}


@pytest.mark.parametrize("name", sorted(NOT_SET))
def test_a_key_that_is_not_set_is_none(path, name):
    """Absent, none on the command line, and 0 or "" as files before 0.1 have it; it is absent from files again.

    A 0 that is a value of the key is kept.
    """
    section, _, key = name.rpartition(".")
    needed = [f"{one.name}=2" for one in describe() if one.required and one.name.startswith(f"{section}.")]
    more = needed if "." in section else []
    read = load_config(path, [*more, f"{name}=none"])
    is_number = NOT_SET[name].startswith(("integer", "number"))
    with_0 = NOT_SET[name].startswith("integer >= 0")
    for text in ("0", "0.0", '""') if is_number and not with_0 else ('""',):
        assert load_config(path, [*more, f"{name}={text}"]) == read
    if with_0:
        zero = load_config(path, [*more, f"{name}=0"])
        path.write_text(dump_config(zero))
        assert getattr(section_of(load_config(path), section), key) == 0
        with pytest.raises(UsageError, match=rf"{name} is 0.0; expected integer >= 0; did you mean 0\?"):
            load_config(path, [f"{name}=0.0"])
    assert getattr(section_of(read, section), key) is None
    assert f"\n{key} = " not in dump_config(read).split(f"[{section}]")[1].split("\n[")[0]
    if is_number:
        with pytest.raises(UsageError, match=rf"{name} is False; expected"):
            load_config(path, [f"{name}=false"])


def test_a_sub_section_without_keys_lacks_those_that_it_needs(path):
    path.write_text(path.read_text() + "\n[model.mla]\n[model.bert]\n")
    with pytest.raises(UsageError, match=r"missing: model.mla.kv_lora_rank \(integer >= 1\), ") as error:
        load_config(path)
    assert "model.bert" not in str(error.value)


def test_a_sub_section_is_read_overridden_checked_and_written(path):
    plain = load_config(path)
    assert plain.model.gpt_neox is None and "gpt_neox" not in dump_config(plain).split("[data]")[0].split("family")[0]
    name = "model.gpt_neox.parallel_residual"
    read = load_config(path, [f"{name}=false"])
    assert read.model.gpt_neox == GPTNeoXSection(parallel_residual=False) and read != plain
    assert "\n[model.gpt_neox]\nparallel_residual = false\n" in dump_config(read)
    path.write_text(dump_config(read))
    assert load_config(path) == read == load_config(path, [f"{name}=false"])
    assert load_config(path, [f"{name}=true"]).model.gpt_neox == GPTNeoXSection()
    empty, found = parse_config(changed("model", gpt_neox={}))
    assert empty and empty.model == plain.model and not found
    assert name in key_names() and setting_problem(name, 3) == f"{name} is 3; expected true or false"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({"parallel": True}, "there is no key model.gpt_neox.parallel; did you mean parallel_residual?"),
        ({"parallel_residual": 3}, "model.gpt_neox.parallel_residual is 3; expected true or false"),
        (3, "model.gpt_neox = 3 is not a section; write [model.gpt_neox] and put its keys below it"),
    ],
)
def test_what_is_wrong_in_a_sub_section_is_named(written, problem):
    assert problems(changed("model", gpt_neox=written)) == [problem]


def test_a_sub_section_of_another_family_is_refused(path):
    config = load_config(path, ["model.gpt_neox.parallel_residual=true", "model.vocab_size=64"])
    (problem,) = check(config, 1, facts=None)
    assert problem.startswith('[model.gpt_neox] is for model.family="gpt_neox", not "gpt"')
    assert check(load_config(path, ["model.family=gpt_neox", "model.vocab_size=64"]), 1, facts=None) == []


def test_a_key_of_a_preset_can_be_not_set(path):
    """Such a run is written with 0, because a key that is absent has the preset's value."""
    changes = ["model.preset=mistral-7b", "model.window=none", "model.vocab_size=none"]
    read = load_config(path, changes)
    assert read.model.window is None and read.model.vocab_size is None
    path.write_text(dump_config(read))
    assert load_config(path) == read


@pytest.mark.parametrize("override", ["model.num_layers=none", "data.prefetch=none", "train.evaluate=none"])
def test_a_key_that_always_has_a_value_cannot_be_none(path, override):
    with pytest.raises(UsageError, match="is 'none'; expected"):
        load_config(path, [override])
