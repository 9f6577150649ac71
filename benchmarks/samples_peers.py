"""How many random samples per second other libraries read, each with its own files of the same tokens.

    python benchmarks/samples_peers.py --cache FOLDER [--megatron-python PYTHON] [--tokens 2e8] [--json FILE]

Samples of 4,096 + 1 uint16 tokens of random ids, written once in the form of each library, then read in random order
by one process with one thread, page cache warm: megatron-core's GPTDataset, litdata (StreamingDataset, TokensLoader, by
number and shuffled), MosaicML streaming (MDS, by number and shuffled), HF datasets (a column of lists, numpy format), a
nanoGPT-style loop (a slice of a memmap for x and one for y, eight stacked), a loop that copies eight samples into one
buffer, and mdata's `dataset[k]` and `read`. Each library runs in an environment of its own that is made under FOLDER
with pip when it is not there; where it cannot be made, or megatron-core has no PYTHON, a line says so and the table
goes on. Rates are samples a processor second, the median of rounds; what a library does beside reading (torch tensors,
masks) is its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np

from mdata.samples.rows import Rows

ROOT = Path(__file__).resolve().parents[1]
LENGTH, BATCH, ROUNDS, ROUND_S = 4096, 8, 5, 0.3
Numbers = Any  # int64[8]
Reader = Callable[[Numbers], Iterable[Any]]


def tokens_of(folder: Path) -> np.ndarray:
    """The ids, mapped."""
    return np.memmap(folder / "a.bin", "<u2", "r")


def rows_of(folder: Path) -> np.ndarray:
    """The ids in rows of a sample and its last label."""
    tokens = tokens_of(folder)
    count = len(tokens) // (LENGTH + 1)
    return tokens[: count * (LENGTH + 1)].reshape(count, LENGTH + 1)


def rate(read: Reader, num_samples: int) -> float:
    """Samples a processor second; `read` gives the tokens of eight samples by their numbers, which are drawn here."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(ROUNDS + 1):
        count, ran = 0, time.process_time()
        while time.process_time() - ran < ROUND_S:
            for numbers in random.integers(0, num_samples, (8, BATCH)):
                for tokens in read(numbers):
                    assert len(tokens) in (LENGTH, LENGTH + 1), f"a sample of {len(tokens)} tokens"
                    count += 1
        found.append(count / (time.process_time() - ran))
    return statistics.median(found[1:])  # the first round fills caches


def by_number(tokens: Callable[[int], Any]) -> Reader:
    """One sample after another, each by its number."""
    return lambda numbers: map(tokens, numbers.tolist())


def in_its_order(make: Callable[[], Iterator[Any]], tokens: Callable[[Any], Any]) -> Reader:
    """The next samples of an iterator that begins again, whatever numbers are asked for."""

    def endless() -> Iterator[Any]:
        while True:
            yield from make()

    samples = endless()
    return lambda numbers: (tokens(next(samples)) for _ in numbers)


def nanogpt(folder: Path) -> dict[str, float]:
    """As get_batch of nanoGPT, with numpy in the place of torch: two slices a sample, each converted, then stacked."""
    tokens = tokens_of(folder)

    def batch(starts: Numbers) -> Any:
        x = np.stack([tokens[i : i + LENGTH].astype(np.int64) for i in starts])
        np.stack([tokens[i + 1 : i + 1 + LENGTH].astype(np.int64) for i in starts])
        return x

    return {"nanoGPT-style loop": rate(batch, len(tokens) - LENGTH)}


def copies(folder: Path) -> dict[str, float]:
    """What numpy can do: one copy a sample, with its conversion, into a buffer that is used again."""
    tokens = np.asarray(tokens_of(folder))  # a slice of a memmap is one too, which costs as much as a copy
    out = np.zeros((BATCH, LENGTH + 1), np.int64)

    def batch(starts: Numbers) -> Any:
        for row, start in enumerate(starts.tolist()):
            out[row] = tokens[start : start + LENGTH + 1]
        return out

    return {"numpy, one copy a sample": rate(batch, len(tokens) - LENGTH)}


def mdata(folder: Path) -> dict[str, float]:
    """Ours, one by one and eight at once."""
    sys.path.insert(0, str(ROOT))
    import mdata as ours

    data = ours.open(folder / "a", sequence_length=LENGTH)
    rows = Rows(np.zeros((BATCH, LENGTH + 1), np.int64))
    epoch = data.components[0].samples.samples_per_epoch
    return {
        "mdata, dataset[k]": rate(by_number(lambda k: data[k]["tokens"]), epoch),
        "mdata, read of 8": rate(lambda numbers: data.read(numbers, out=rows).text, epoch),
    }


def megatron(folder: Path) -> dict[str, float]:
    """megatron-core's GPTDataset."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import samples_build

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        data = samples_build.peer_maker(folder / "a", Path(cache))(None)
        return {"megatron-core": rate(by_number(lambda k: data[k]["tokens"]), len(data))}


def litdata(folder: Path) -> dict[str, float]:
    """Lightning's: optimised chunks of tokens."""
    import torch
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    out = folder / "litdata"
    if not out.exists():
        out.mkdir()
        writer = BinaryWriter(str(out), chunk_bytes="64MB", item_loader=TokensLoader(LENGTH + 1))
        for number, row in enumerate(rows_of(folder)):
            writer[number] = torch.from_numpy(row.astype(np.int64)).to(torch.uint16)
        writer.done()
        writer.merge()
    data = StreamingDataset(str(out), item_loader=TokensLoader(LENGTH + 1))
    found = {"litdata, by number": rate(by_number(data.__getitem__), len(data))}
    mixed = StreamingDataset(str(out), item_loader=TokensLoader(LENGTH + 1), shuffle=True)
    return found | {"litdata, shuffled": rate(in_its_order(lambda: iter(mixed), lambda tokens: tokens), len(mixed))}


def stand_in(*modules: str, **names: Any) -> None:
    """Put modules that have these names, and nothing else, where others look for them."""
    for module in modules:
        sys.modules[module] = module_from_spec(ModuleSpec(module, None))
        vars(sys.modules[module]).update(names)


def mosaicml(folder: Path) -> dict[str, float]:
    """MosaicML's: MDS shards of one array a sample."""
    stand_in("torchvision", "torchvision.transforms")  # for its pictures; loads only beside the torch it was built for
    stand_in("torchvision.datasets", VisionDataset=object)
    stand_in("torchvision.transforms.functional", to_tensor=None)
    from streaming import MDSWriter, StreamingDataset

    out = folder / "mds"
    if not out.exists():
        with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
            for row in rows_of(folder):
                writer.write({"tokens": np.array(row)})
    data = StreamingDataset(local=str(out), shuffle=False, batch_size=8)
    found = {"MosaicML MDS, by number": rate(by_number(lambda k: data[k]["tokens"].astype(np.int64)), len(data))}
    mixed = StreamingDataset(local=str(out), shuffle=True, batch_size=8)
    read = in_its_order(lambda: iter(mixed), lambda sample: sample["tokens"].astype(np.int64))
    return found | {"MosaicML MDS, shuffled": rate(read, len(mixed))}


def huggingface(folder: Path) -> dict[str, float]:
    """HF datasets: a column of lists, mapped Arrow files."""
    import datasets

    out = folder / "hf"
    if not out.exists():
        rows = rows_of(folder)
        features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"))})
        made = datasets.Dataset.from_generator(
            lambda: ({"tokens": row} for row in rows), features=features, cache_dir=str(folder / "hf-cache")
        )
        made.save_to_disk(str(out))
    data = datasets.load_from_disk(str(out)).with_format("numpy")
    return {"HF datasets": rate(by_number(lambda k: data[k]["tokens"].astype(np.int64)), len(data))}


# torch is named with the libraries that want it, or pip takes its newest, and gigabytes of CUDA with that.
TORCH = "torch==2.13.0"
# Name -> (what pip installs; nothing: no environment of its own, the reader)
PEERS: dict[str, tuple[list[str], Callable[[Path], dict[str, float]]]] = {
    "copies": ([], copies),
    "nanogpt": ([], nanogpt),
    "megatron": ([], megatron),
    "litdata": ([TORCH, "litdata==0.2.76"], litdata),
    "mosaicml-streaming": ([TORCH, "mosaicml-streaming==0.13.0"], mosaicml),
    "datasets": (["datasets==5.2.0"], huggingface),
    "mdata": ([], mdata),
}


def python_of(name: str, arguments: argparse.Namespace) -> str:
    """The interpreter that has a peer, its environment made where it is not there.

    Raises:
        RuntimeError: it cannot be had; says why.
    """
    packages = PEERS[name][0]
    if name == "megatron":
        if not arguments.megatron_python:
            raise RuntimeError("no --megatron-python")
        return str(arguments.megatron_python)
    if not packages:
        return sys.executable
    if not arguments.cache:
        raise RuntimeError("no --cache for its environment")
    home = arguments.cache.resolve() / name
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        for command in (
            [sys.executable, "-m", "venv", str(home)],
            [str(python), "-m", "pip", "install", "-q", *packages],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pip: {done.stderr.strip().splitlines()[-1]}")
        (home / "complete").touch()
    return str(python)


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Rates of a peer, in its environment.

    Raises:
        RuntimeError: there is none, or it fails.
    """
    command = [python_of(name, arguments), __file__, "--peer", name, "--folder", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_pair(prefix: Path, tokens: int) -> None:
    """Random ids in documents of 1,000, as a pair."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import samples

    ids = np.random.default_rng(1).integers(0, 50_000, tokens, dtype=np.uint16)
    samples.write_pair(prefix, np.full(tokens // 1000, 1000, np.int32), tokens=ids[: tokens // 1000 * 1000])


def main() -> None:
    """Measure all that can be had, or do one peer's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder for environments; they stay there for the next time")
    parser.add_argument("--megatron-python", help="the interpreter that has megatron-core")
    parser.add_argument("--tokens", type=float, default=2e8)
    parser.add_argument("--only", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--peer", choices=tuple(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(PEERS[arguments.peer][1](arguments.folder)))
        return
    found: dict[str, float] = {}
    print(f"{'one process, one thread':<28}{'samples a CPU second':>22}")
    with tempfile.TemporaryDirectory() as folder:
        make_pair(Path(folder) / "a", int(arguments.tokens))
        for name in arguments.only:
            try:
                rates = measure(name, Path(folder), arguments)
            except RuntimeError as problem:
                print(f"{name:<28}{'skipped':>22}  {problem}", flush=True)
                continue
            for way, value in rates.items():
                print(f"{way:<28}{value:>22,.0f}", flush=True)
            found |= rates
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
