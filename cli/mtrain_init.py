"""Write a run.toml from the answers to at most nine questions.

Asks in the terminal; every answer is also an option, and --yes takes the defaults for the rest. Defaults follow from
the answers before: batch, learning rate and length from the size of the model, the layout from the GPUs (the fastest
that `mtrain plan --gpus` lists). The file passes `mtrain check`, and each of its lines is explained.

Examples:
  mtrain init --yes --output small.toml
  mtrain init --yes --data mix.json --model 350M --gpus 8 --length 10B --output large.toml
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mdata import UsageError
from mdata.dataset.mock_data import MOCK
from mdata.util import atomic_io
from trainer.config.parse import ReadConfig, inline_toml, parse_config, problems_error
from trainer.config.presets import PRESETS, presets_like
from trainer.models.family import family_named

from .console import Console, Parser
from .mtrain_plan import HARDWARE, gpus_described
from .terminal import standard_input

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.plan.check import DataFacts
    from trainer.plan.layouts import Layout

Tables = dict[str, dict[str, Any]]
Answer = TypeVar("Answer")

QUESTIONS = {  # by option
    "data": "blend or corpus manifest, a prefix of .bin and .idx, or mock",
    "model": "a published model such as llama3.2-1b, or a size such as 350M",
    "gpus": "GPUs on all machines; 0: train on the CPU",
    "sequence_length": "tokens of a sample",
    "batch_tokens": "tokens of a step, such as 1M",
    "length": "tokens of the run, such as 20B, or steps, such as '5000 steps'",
    "precision": "bf16, fp8, fp16 or fp32",
    "folder": "folder of the run",
    "tracker": "trackers: tensorboard, wandb, mlflow, trackio, prometheus, several separated by commas, or none",
}
ASKED_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus")  # a webhook also needs an address
PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "bf16": {"dtype": "bf16"},
    "fp8": {"dtype": "bf16", "fp8": "delayed"},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
}
MOCK_VOCABULARY = 32000
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class Recipe(NamedTuple):
    """What suits models of about this many parameters (Brown et al. 2020, table 2.1; below 125M extrapolated)."""

    parameters: float
    lr: float
    batch_tokens: int


RECIPES = (
    Recipe(10e6, 1e-3, 65536),
    Recipe(40e6, 8e-4, 131072),
    Recipe(125e6, 6e-4, 524288),
    Recipe(350e6, 3e-4, 524288),
    Recipe(760e6, 2.5e-4, 524288),
    Recipe(1.3e9, 2e-4, 1048576),
    Recipe(2.7e9, 1.6e-4, 1048576),
    Recipe(6.7e9, 1.2e-4, 2097152),
    Recipe(13e9, 1e-4, 2097152),
    Recipe(175e9, 6e-5, 3145728),
)


class NoLayoutError(UsageError):
    """Every layout of the GPUs lacks memory."""


class Draft(NamedTuple):
    """A configuration without its layout, and what the layout depends on."""

    tables: Tables
    gpus: int
    facts: DataFacts | None


def add_arguments(parser: Parser) -> None:
    """See `mtrain init --help`."""
    add = parser.add_argument_group("answers").add_argument
    for name, text in QUESTIONS.items():
        add(f"--{name.replace('_', '-')}", metavar="ANSWER", help=text)
    add = parser.add_argument_group("the file").add_argument
    add("--output", metavar="FILE", default="run.toml", help="the file to write (default: run.toml)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add("--yes", action="store_true", help="ask nothing: take the defaults for answers that are not given")
    add("--device", metavar="NAME", help="kind of GPU (default: that of this machine, or H100)")
    add("--nodes", type=int, metavar="N", help="machines (default: one per 8 GPUs)")
    parser.set_defaults(**dict.fromkeys(HARDWARE))


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Ask, choose a layout, check, and write the file."""
    from trainer.run.launch import survey

    output = Path(arguments.output)
    check_regular(output)
    if output.exists() and not arguments.overwrite:
        raise UsageError(f"{output} already exists", fix="give --overwrite, or another --output")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}", fix="create it, or another --output")
    draft = ask_all(_Questions(arguments, console))
    config, layout = with_layout(draft, arguments)
    ranks = max(draft.gpus, 1)
    checked = survey(ReadConfig(config, []), ranks, elsewhere=True)  # the file may be for another machine
    if checked.problems:
        raise checked.error("these answers")
    text = explained(draft.tables, command=f"mtrain train {output}")
    atomic_io.atomic_write(output, text.encode())
    ranks_there = f" --ranks {ranks}" if ranks not in (1, visible_gpus()) else ""
    lines = [
        f"wrote {output}: {summary(config, layout, ranks)}",
        *(f"on this machine: {text}" for text in checked.here),
    ]
    lines.append(f"next: mtrain check {shlex.quote(str(output))}{ranks_there}")
    console.result("\n".join(lines), {"output": str(output), "config": draft.tables, "ranks": ranks})


def check_regular(output: Path) -> None:
    """Raise UsageError if a folder, or a device that --overwrite would replace by a file, has the name of the file."""
    if output.exists() and not output.is_file():
        kind = "a folder" if output.is_dir() else "not a regular file"
        raise UsageError(f"--output {output}: this is {kind}", fix="give another --output")


class _Questions:
    """Gives answers: from the options, from the terminal, or with --yes the defaults."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self._arguments, self._console = arguments, console

    def __call__(self, name: str, default: str, parse: Callable[[str], Answer]) -> Answer:
        """The answer to one of QUESTIONS.

        Args:
            default: as a user would type it.
            parse: raises a UsageError for an invalid answer, after which a terminal is asked again.
        """
        given = getattr(self._arguments, name)
        if given is not None or self._arguments.yes:
            return parse(default if given is None else given)
        while True:
            self._console.tell(f"{QUESTIONS[name]} [{default}]")
            line = standard_input().readline()
            if not line:
                raise UsageError(
                    f"no answer: {QUESTIONS[name]}",
                    fix=f"give --{name.replace('_', '-')} ANSWER, or --yes for the defaults",
                )
            try:
                return parse(line.strip() or default)
            except UsageError as error:
                if not standard_input().isatty():
                    raise
                self._console.error(str(error))


def ask_all(ask: _Questions) -> Draft:
    """Ask every question, in order: what a default depends on comes before it."""
    from trainer.run.data import open_data

    data = ask("data", _data_nearby(), str)
    opened = None if data == MOCK else open_data(parsed(_provisional(data)))
    facts = None if opened is None else opened.facts
    levels = set() if opened is None else {component.corpus.manifest.level for component in opened.train.components}
    visible = visible_gpus()
    size = "bert-base" if levels == {"sentence"} else "350M" if visible else "10M"
    model = ask("model", size, lambda text: model_keys(text, facts))
    kind = _kind(model, levels)
    provisional = _provisional(data) | {"model": model}
    provisional["data"] |= kind
    parameters = _parameters(provisional, facts)
    recipe = min(RECIPES, key=lambda recipe: abs(math.log(parameters / recipe.parameters)))
    gpus = ask("gpus", str(visible), lambda text: whole(text, "gpus", least=0))
    longest = PRESETS.get(model.get("preset", ""), {}).get("max_position", 512 if kind == {"kind": "t5"} else 4096)
    shortest = min((tokens for _, tokens in facts.components), default=longest) if facts else longest
    longest = min(longest, 4096, 1 << max(shortest - 1, 1).bit_length() - 1)
    tokens = ask("sequence_length", str(longest), lambda text: whole(text, "sequence-length"))
    batch = ask("batch_tokens", short(recipe.batch_tokens), lambda text: batch_rows(text, tokens, gpus))
    wanted = round(float(f"{TOKENS_PER_PARAMETER * parameters:.2g}"))
    available = facts.num_tokens if facts and facts.num_samples is not None else wanted
    length = ask("length", short(min(wanted, available)), _length)
    precision = ask("precision", "bf16" if gpus else "fp32", _precision)
    folder = ask("folder", _unused_folder(), str)
    trackers = ask("tracker", "none", _trackers)
    tables: Tables = {
        "run": {"folder": folder},
        "model": model,
        "data": {"blend": data, **kind},
        "mesh": {},
        "train": {"sequence_length": tokens, "global_batch": batch, "micro_batch": 1, **length},
        "optimizer": {"lr": recipe.lr, "min_lr": float(f"{recipe.lr / 10:.3g}"), "warmup_fraction": 0.01},
        "precision": dict(precision),
        "recompute": {},
        "track": {"to": trackers} if trackers else {},
    }
    if facts is not None and not facts.has_valid:
        tables["data"]["split"] = "99,1,0"
        try:
            open_data(parsed(tables))
        except UsageError:  # too few documents for a validation set
            del tables["data"]["split"]
    return Draft(tables, gpus, facts)


def _kind(model: Mapping[str, Any], levels: Collection[str]) -> dict[str, str]:
    """data.kind, where it is not the default: what the family trains on, or conversations where the data are such."""
    family = PRESETS.get(model.get("preset", ""), {}).get("family", "gpt")
    kinds = family_named(family).data_kinds
    if "gpt" not in kinds:
        return {"kind": kinds[0]}
    return {"kind": "chat"} if levels == {"chat"} else {}


def model_keys(answer: str, facts: DataFacts | None) -> dict[str, Any]:
    """The keys of [model] for a preset's name or a size, such as "350M".

    Raises:
        UsageError: it is neither.
    """
    vocab_size = facts.vocab_size if facts else MOCK_VOCABULARY
    if answer in PRESETS:
        larger = vocab_size is not None and vocab_size > PRESETS[answer]["vocab_size"]
        return {"preset": answer, **({"vocab_size": vocab_size} if larger else {})}
    if not re.fullmatch(r"[\d.]+[kmbKMB]?", answer):
        near = presets_like(answer)
        expected = f"a size such as 350M, or {', '.join(PRESETS)}"
        raise UsageError(f"unknown model {answer!r}", expected=expected, fix=f"{near}?" if near else None)
    keys = shape_of(number(answer, "model"), vocab_size or MOCK_VOCABULARY)
    return keys if facts and facts.vocab_size else {**keys, "vocab_size": MOCK_VOCABULARY}


def shape_of(parameters: int, vocab_size: int) -> dict[str, Any]:
    """Sizes of a Llama-like model with about this many parameters.

    The width is 64 to 128 times the depth, as in published models from 125M to 7B; embeddings are tied below 2B.
    """
    tied = parameters < 2e9
    grown = min(max(math.log(parameters / 125e6) / math.log(7e9 / 125e6), 0.0), 1.0)
    best: tuple[float, int, int] | None = None
    for hidden in (*range(64, 512, 64), *range(512, 2048, 256), *range(2048, 4096, 512), *range(4096, 16385, 1024)):
        in_layers = parameters - (1 if tied else 2) * vocab_size * hidden
        layers = max(2 * round(in_layers / (24 * hidden**2)), 2)  # even, for pipelines
        num_parameters = 12 * layers * hidden**2 + parameters - in_layers
        cost = abs(math.log(hidden / layers / (64 * 2**grown))) + 8 * abs(math.log(num_parameters / parameters))
        if best is None or cost < best[0]:
            best = cost, hidden, layers
    assert best is not None, "there are widths"
    _, hidden, layers = best
    head_dim = 64 if hidden < 2048 else 128
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": hidden // head_dim,
        "tie_embeddings": tied,
    }


def number(answer: str, option: str) -> int:
    """A whole number, such as "4096", "1.3B" or "1e9".

    Raises:
        UsageError: it is not one, or below 1.
    """
    matched = re.fullmatch(r"(\d+\.?\d*(?:e\d{1,2})?)([kmbt]?)", answer.replace(",", "").replace("_", "").lower())
    value = round(float(matched[1]) * UNITS[matched[2]]) if matched else 0
    if not 1 <= value < 10**18:
        raise UsageError(f"--{option} is {answer!r}", expected="a number such as 4096, 350M, 1.3B or 1e9")
    return value


def whole(answer: str, option: str, *, least: int = 1) -> int:
    """A whole number without a unit."""
    if not re.fullmatch(r"\d{1,9}", answer) or int(answer) < least:
        raise UsageError(f"--{option} is {answer!r}", expected=f"integer >= {least}")
    return int(answer)


def short(value: int) -> str:
    """The number as a user would type it: 524288, 20B."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if value >= factor and value % (factor // 10) == 0:
            return f"{value / factor:g}{unit}"
    return str(value)


def batch_rows(answer: str, sequence_length: int, gpus: int) -> int:
    """Rows of a step of --batch-tokens, the nearest number; a multiple of the GPUs, where there are enough.

    Raises:
        UsageError: it is not a number, or less than a row.
    """
    tokens = number(answer, "batch-tokens")
    if tokens < sequence_length:
        raise UsageError(
            f"--batch-tokens {answer} is less than a row of {sequence_length} tokens",
            fix=f"--batch-tokens {sequence_length} or more, or a shorter --sequence-length",
        )
    rows = round(tokens / sequence_length)
    return max(round(rows / gpus), 1) * gpus if gpus and rows >= gpus else rows


def _length(answer: str) -> dict[str, int]:
    """The key of [train] for "20B" or "5000 steps"."""
    words = answer.split()
    if len(words) == 2 and words[1] in ("step", "steps"):
        return {"steps": number(words[0], "length")}
    return {"tokens": number(answer.removesuffix("tokens").strip(), "length")}


def _precision(answer: str) -> Mapping[str, str]:
    if answer not in PRECISIONS:
        raise UsageError(f"--precision is {answer!r}", expected=" or ".join(PRECISIONS))
    return PRECISIONS[answer]


def _trackers(answer: str) -> list[str]:
    names = [] if answer == "none" else [name.strip() for name in answer.split(",")]
    if unknown := [name for name in names if name not in ASKED_TRACKERS]:
        raise UsageError(f"--tracker is {unknown[0]!r}", expected=f"{', '.join(ASKED_TRACKERS)}, or none")
    return list(dict.fromkeys(names))


def _data_nearby() -> str:
    """A blend or the only corpus of this folder; otherwise mock."""
    corpora = sorted(path for level in ("document", "sentence", "chat") for path in Path().glob(f"*_{level}.json"))
    if Path("blend.json").is_file():
        return "blend.json"
    return str(corpora[0]) if len(corpora) == 1 else "mock"


def _unused_folder() -> str:
    """runs/first, or runs/2 and so on: an existing run would be continued."""
    names = itertools.chain(["runs/first"], (f"runs/{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def visible_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def _provisional(data: str) -> Tables:
    """The smallest configuration with this data, to learn what the data is."""
    return {
        "run": {"folder": "unknown"},
        "model": {"vocab_size": MOCK_VOCABULARY, **dict.fromkeys(("num_layers", "hidden_size", "num_heads"), 64)},
        "data": {"blend": data},
        "train": {"sequence_length": 64, "global_batch": 1, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-4},
    }


def parsed(tables: Tables) -> RunConfig:
    """The configuration in these tables."""
    config, problems = parse_config(tables)
    if config is None:
        raise problems_error("these answers", problems)
    return config


def _parameters(tables: Tables, facts: DataFacts | None) -> int:
    from trainer.plan.plan import make_plan

    return make_plan(parsed(tables), 1, facts=facts).num_parameters


def refuse_unread_hardware(arguments: argparse.Namespace, gpus: int, *, layout_keys: Sequence[str] = ()) -> None:
    """Refuse a description of GPUs where no layout is chosen for them.

    Args:
        gpus: 0: the run is for the CPU. layout_keys: settings of the command line that are the layout.
    """
    given = [f"--{name} {value}" for name in ("device", "nodes") if (value := getattr(arguments, name)) is not None]
    if given and (not gpus or layout_keys):
        why = f"{' '.join(layout_keys)} sets the layout" if gpus else "without GPUs the run is for the CPU"
        fix = f"leave {' and '.join(given)} out" if gpus else "give --gpus N, or leave it out"
        raise UsageError(f"{' and '.join(given)} would have no effect: {why}", fix=fix)


def with_layout(draft: Draft, arguments: argparse.Namespace) -> tuple[RunConfig, Layout | None]:
    """The configuration with the fastest layout that works, whose keys are added to the draft's tables."""
    from trainer.plan.layouts import SHARDINGS, find_layouts, problems_of_every_layout

    tables, train = draft.tables, draft.tables["train"]
    refuse_unread_hardware(arguments, draft.gpus)
    if not draft.gpus:
        train["micro_batch"] = math.gcd(train["global_batch"], 8)
        return parsed(tables), None
    arguments.gpus = draft.gpus
    hardware = gpus_described(arguments)
    for sharding in SHARDINGS[1:]:
        tables["optimizer"]["sharding"] = sharding
        layouts = find_layouts(parsed(tables), hardware, facts=draft.facts)
        layout = layouts[0]
        if not layout.problem:
            break
    else:
        if problems := problems_of_every_layout(parsed(tables), hardware, facts=draft.facts):
            raise problems_error("these settings", problems)
        name = f"{draft.gpus} x {hardware.device.name}"
        too_large = next((layout for layout in layouts if layout.memory_bytes), None)
        if too_large is None:  # the rows of a step, most often
            fix = "another number of --gpus, or more --batch-tokens"
            raise UsageError(f"no layout of {name} works", found=layout.problem, fix=fix)
        finetunes = "lora" in arguments
        smaller = "a smaller model" if finetunes else "a smaller --model"
        smaller = "--lora 16" if finetunes and not arguments.lora else smaller
        raise NoLayoutError(f"no layout of {name} works", found=too_large.problem, fix=f"more --gpus, or {smaller}")
    config = layout.config
    mesh: dict[str, Any] = {"tp": config.mesh.tp, "cp": config.mesh.cp, "pp": config.mesh.pp}
    if config.mesh.pp > 1:
        mesh |= {"schedule": config.mesh.schedule, "stage_balance": config.mesh.stage_balance}
    tables["mesh"] = {**mesh, "sequence_parallel": config.mesh.sequence_parallel}
    tables["recompute"] = {"mode": config.recompute.mode}
    train["micro_batch"] = config.train.micro_batch
    return parsed(tables), layout


def explained(tables: Tables, *, command: str) -> str:
    """The configuration as TOML, each key with its description."""
    from trainer.config.describe import describe, section_texts

    comments, sections = {key.name: key.comment for key in describe()}, section_texts()
    lines = [f"# Start, and continue, with: {command}", "# Every other setting: mtrain config"]
    nested = {
        name: keys
        for section, table in tables.items()
        for name, keys in (
            (section, table),
            *((f"{section}.{key}", value) for key, value in table.items() if f"{section}.{key}" in sections),
        )
    }
    for section, keys in nested.items():
        own = {key: value for key, value in keys.items() if f"{section}.{key}" in comments}
        if not own:
            continue
        lines += ["", f"# {sections[section]}", f"[{section}]"]
        for key, value in own.items():
            lines.append(f"{key} = {inline_toml(value)}  # {comments[f'{section}.{key}']}")
    return "\n".join(lines) + "\n"


def summary(config: RunConfig, layout: Layout | None, ranks: int) -> str:
    """One line: model, length, layout and, on GPUs, the estimated speed."""
    from trainer.plan.plan import make_plan
    from trainer.run.data import open_data

    plan = make_plan(config, ranks, facts=open_data(config).facts)
    count = plan.num_parameters
    parameters = f"{count:,}" if count < 1e6 else f"{count / 1e6:,.0f} million"
    text = f"{parameters} parameters, {plan.steps:,} steps of {plan.tokens_per_step:,} tokens"
    if layout is None:
        return f"{text}, on the CPU"
    hours = plan.steps * plan.tokens_per_step / layout.tokens_per_s / 3600
    lasts = f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.0f} days"
    mesh = f"tp {plan.tp}, cp {plan.cp}, pp {plan.pp}, dp {plan.dp}"
    return f"{text}\n{mesh}: about {layout.tokens_per_s:,.0f} tokens/s, {lasts} (estimates)"
