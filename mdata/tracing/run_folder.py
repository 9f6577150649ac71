"""Opens the data of a training run for tracing: from data.json of its run folder, or of a checkpoint.

Run folders of before data.json are read by legacy_run.py. Relative paths in a record start in the folder where the run
was started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import DatasetOptions, MegatronOrder
from mdata.dataset.eval_sets import EvaluationSplit, evaluated_samples, evaluation_sets
from mdata.dataset.mock_data import MOCK
from mdata.dataset.run_paths import data_path
from mdata.errors import UsageError
from mdata.progress import SILENT, Progress
from mdata.tracing.eval_steps import EvaluationSteps
from mdata.tracing.legacy_run import is_legacy_run, legacy_record
from mdata.tracing.run_record import RECORD, RunRecord, has_record, read_record
from mdata.tracing.run_steps import Steps
from mdata.tracing.tracer import Tracer
from mdata.util.option_synonyms import nearest

_SHOWN = 4


def is_run(path: str | Path) -> bool:
    """Whether a path or an address is the folder of a run, or one of its checkpoints."""
    return is_legacy_run(path) or has_record(path)


def find_record(folder: str | Path) -> RunRecord:
    """What the run of a folder reads.

    Raises:
        UsageError: not a run folder, or written by another version. DamageError: a file that cannot be read.
    """
    if (record := read_record(folder)) is not None:
        return record
    if not is_legacy_run(folder):
        raise UsageError(f"{folder} is not a run folder", expected=f"{RECORD}, as `mtrain train` writes it")
    return legacy_record(Path(folder))


def trace_run(
    folder: str | Path,
    *,
    blend: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    progress: Progress = SILENT,
) -> Tracer:
    """Open the data of a run as the run did: its training data, or one of its validation or test sets.

    Args:
        folder: the run folder or a checkpoint, or its address in object storage.
        blend: the data, if it has been moved.
        validation, test: the name of a set to use instead of the training data; at most one of them.
        progress: receives a note on arrays that are built.

    Raises:
        UsageError: not a run folder, an unknown version, no such set, or data that differs from the run's.
        DamageError: a file that cannot be read.
    """
    record = find_record(folder)
    if record.now.blend == MOCK:
        raise UsageError(f"{folder} was trained on mock data: its tokens come from no document")
    dataset = _open_training(folder, record, blend=blend, progress=progress)
    options = dataset.options
    steps = Steps(
        [span.steps for span in record.spans],
        seed=options.seed,
        in_order=isinstance(options.order, MegatronOrder),
        total=record.num_steps,
    )
    if validation is not None and test is not None:
        raise UsageError("both a validation set and a test set are named", expected="one of them")
    if validation is not None:
        return _trace_set(folder, record, dataset, steps, split="valid", name=validation, progress=progress)
    if test is not None:
        return _trace_set(folder, record, dataset, steps, split="test", name=test, progress=progress)
    return Tracer(dataset, steps, skip=record.skip)


def _open_training(folder: str | Path, record: RunRecord, *, blend: str | None, progress: Progress) -> Dataset:
    # A trace only reads; the run has already checked whether corpora may be mixed.
    keys = record.options | {"tokenizer_unknown": "ok"}
    if isinstance(cache := keys.get("cache"), str):
        keys["cache"] = data_path(cache, folder, record.started_in)
    try:
        options = DatasetOptions.from_keys(keys)
    except TypeError as error:
        raise UsageError(
            f"{folder} was written by another version: {error}", fix="use the mdata that trained the run"
        ) from error
    assert record.now.blend is not None, "the last span names its blend"
    path = blend or data_path(record.now.blend, folder, record.started_in)
    try:
        dataset = Dataset.from_options(path, options, progress=progress)
    except UsageError as error:
        if blend or Path(path).exists():
            raise
        fix = "run from the folder in which the run was started, or give the data's new path with --blend"
        raise UsageError(str(error).splitlines()[0], fix=fix) from error
    if (data_id := record.now.data_id) is not None:
        fix = "restore the data of the run, or give its path with --blend"
        _check_same(f"{folder} was trained on", dataset, data_id, identity=record.identity, fix=fix)
    return dataset


def _check_same(subject: str, dataset: Dataset, data_id: str, *, identity: Mapping[str, object], fix: str) -> None:
    """Refuse data whose order differs from the run's.

    Raises:
        UsageError: names the fields that differ, if they are recorded.
    """
    if data_id == dataset.data_id:
        return
    before, now = identity, dataset.identity
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)] if before else []
    raise UsageError(
        f"{subject} different data, or in a different order",
        found=", ".join(f"{name} {now.get(name)}" for name in names[:_SHOWN]) or f"data id {dataset.data_id}",
        expected=", ".join(f"{name} {before.get(name)}" for name in names[:_SHOWN]) or f"data id {data_id}",
        fix=fix,
    )


def _trace_set(
    folder: str | Path,
    record: RunRecord,
    train: Dataset,
    steps: Steps,
    *,
    split: EvaluationSplit,
    name: str,
    progress: Progress,
) -> Tracer:
    recorded = record.valid if split == "valid" else record.test
    sets: Mapping[str, Dataset] = {}
    if recorded is not None:
        paths = [data_path(path, folder, record.started_in) for path in recorded.paths]
        asked = recorded.num_samples
        sets = evaluation_sets(train, split, paths=paths, num_samples=asked, allow_overlap=True, progress=progress)
    if recorded is None or name not in sets:
        kind = "validation" if split == "valid" else "test"
        close = nearest(name, sets)
        raise UsageError(
            f"the run has no {kind} set called {name}",
            expected=", ".join(sets) or f"the run has no {kind} set",
            fix=f"{close}?" if close else None,
        )
    if recorded.data_ids is not None and (data_id := recorded.data_ids.get(name)) is not None:
        _check_same(f"set {name} of {folder} was", sets[name], data_id, identity={}, fix="restore the set")
    evaluated = evaluated_samples(sets[name], recorded.eval_samples)
    return Tracer(sets[name], EvaluationSteps(evaluated, steps, interval=recorded.interval))
