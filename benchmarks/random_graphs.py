"""Do CUDA graphs give the bits of passes that are computed anew? Random models in random layouts, on GPUs.

    torchrun --nproc-per-node=2 benchmarks/random_graphs.py [--seeds 0 100] [--seconds 500] [--steps 10] [--fp8]

Models and layouts are those of tests/trainer/models/test_random_models.py with sizes that a GPU's kernels take; each is
compared as benchmarks/cuda_graphs.py compares its layouts. Prints a line for each seed before it is trained and one
after it; exits 1 if one differs. Several of these can share the GPUs, with seeds of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cuda_graphs import DECODER, GLOBAL_BATCH, LENGTH, compare_on_all_ranks
from tests.trainer.models import test_random_models
from trainer.config.sections import (
    KernelsSection,
    MeshSection,
    ModelSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    T5SamplesSection,
)
from trainer.parallel.placement import Placement, find_placement
from trainer.parallel.world import open_store
from trainer.plan.check import check, why_not_beside
from trainer.run.determinism import make_deterministic

FACTORS = dict.fromkeys(("hidden_size", "head_dim", "state_size", "vocab_size", "q_lora_rank", "kv_lora_rank"), 8)
FACTORS |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8)
FACTORS |= dict.fromkeys(("ffn_hidden_size", "shared_ffn_hidden_size", "v_head_dim", "chunk_size", "window"), 16)
FACTORS |= dict.fromkeys(("rope_original_length", "relative_distance"), 16)


def enlarged(section: Any) -> Any:
    """A model, or a section of one, with sizes that a GPU's kernels take."""
    changed = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = enlarged(value)
        elif value is not None and (factor := FACTORS.get(field.name)):
            changed[field.name] = value * factor
    return replace(section, **changed)


def drawn(seed: int, ranks: int, *, fp8: bool) -> RunConfig:
    """A run of these ranks whose passes can be recorded, which `check` accepts."""
    chance = random.Random(seed)
    kinds = ("", "", "", *test_random_models.OTHERS)
    while True:
        config, drawn_ranks, _ = test_random_models._drawn(chance)
        if kind := chance.choice(kinds):
            model, data = test_random_models.OTHERS[kind](chance)
            config = replace(config, model=model, data=data)
        if ranks == 1:
            config = replace(config, mesh=MeshSection())
        elif drawn_ranks != ranks:
            continue
        of_kind = {"t5": T5SamplesSection(decoder_length=DECODER)} if config.data.kind == "t5" else {}
        train = replace(config.train, sequence_length=LENGTH, global_batch=GLOBAL_BATCH, steps=1000)
        recorded = KernelsSection(cuda_graphs="on", overlap_passes="off")
        config = replace(
            config,
            run=RunSection(folder="unused", deterministic=True),
            model=_sized(enlarged(config.model), chance),
            data=replace(config.data, blend="unused", **of_kind),
            train=train,
            kernels=recorded,
            precision=_precision(chance, fp8=fp8),
        )
        if chance.random() < 0.5 and not why_not_beside(config):
            config = replace(config, kernels=replace(recorded, overlap_passes="on"))
        if not check(config, ranks, facts=None):
            return config


def _sized(model: ModelSection, chance: random.Random) -> ModelSection:
    """With more layers than stages have, often."""
    return model if model.mamba or model.t5 else replace(model, num_layers=model.num_layers * chance.choice((1, 1, 2)))


def _precision(chance: random.Random, *, fp8: bool) -> PrecisionSection:
    if fp8 and chance.random() < 0.5:
        return PrecisionSection(dtype="bf16", fp8=chance.choice(("delayed", "current")))
    return PrecisionSection(dtype=chance.choice(("bf16", "bf16", "fp16", "fp32")))


def changes(config: RunConfig) -> dict[str, Any]:
    """What differs from the defaults, as KEY: value."""
    found: dict[str, Any] = {}
    parts = config.model, config.mesh, config.optimizer, config.recompute, config.precision, config.kernels, config.data
    for part in parts:
        for field in dataclasses.fields(part):
            if (value := getattr(part, field.name)) != field.default and value is not None:
                found[field.name] = str(value) if dataclasses.is_dataclass(value) else value
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Seeds in turn, until they or the seconds end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10**9), metavar=("FIRST", "END"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no model is begun after them")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fp8", action="store_true", help="half of the runs in FP8, which needs Transformer Engine")
    arguments = parser.parse_args(words)
    place, began, failed = find_placement(os.environ) or Placement(), time.time(), False
    store = open_store(place) if place.world_size > 1 else None
    for seed in range(*arguments.seeds):
        go_on = time.time() - began < arguments.seconds
        if store is not None:  # as the first rank says
            if place.rank == 0:
                store.set(f"go on {seed}", str(int(go_on)))
            go_on = store.get(f"go on {seed}") == b"1"
        if not go_on:
            break
        config = drawn(seed, place.world_size, fp8=arguments.fp8)
        make_deterministic(config)
        if place.rank == 0:
            print(json.dumps({"seed": seed, **changes(config)}, default=str), flush=True)
        own = PrefixStore(f"seed {seed}", store) if store else None
        answer = compare_on_all_ranks(config, place, own, arguments.steps)
        failed |= not answer["equal on all ranks"]
        if place.rank == 0:
            print(json.dumps({"seed": seed} | answer), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
