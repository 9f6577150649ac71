"""Which command starts pretrain_gpt.py, with which arguments and on how many ranks."""

from __future__ import annotations

import pytest

from mdata import UsageError
from trainer.migrate.arguments import PROGRAMS
from trainer.migrate.launcher import find_launch
from trainer.migrate.migrate import as_toml, migrate


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("pretrain_gpt.py --a", 1),
        ("python -u /opt/megatron/pretrain_gpt.py --a", 1),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py --a", 8),
        ("torchrun --nproc_per_node=8 --nnodes=2 pretrain_gpt.py --a", 16),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py --a", None),
        ("torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py --a", None),
        ("python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --a", 4),
        ("srun -n 12 python pretrain_gpt.py --a", 12),
        ("srun -N 2 --ntasks-per-node=8 python pretrain_gpt.py --a", 16),
        ("srun -n \u00b2 python pretrain_gpt.py --a", None),
        ("srun -n " + "9" * 5000 + " python pretrain_gpt.py --a", None),
        ("for f in *; do touch $f; done\ncat > x <<E\na\nE\ntorchrun --nproc-per-node 2 pretrain_gpt.py --a", 2),
        ("mpirun -np 4 python pretrain_gpt.py --a", 4),
        ("#SBATCH --nodes=3 --ntasks-per-node=8\nsrun bash -c 'cd x && python pretrain_gpt.py --a'", 24),
        ("cd x && CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun pretrain_gpt.py --a 2>&1 | tee log", 1),
        ("srun -N2 -n16 python pretrain_gpt.py --a", 16),
        ("srun -N2 --ntasks-per-node 8 python pretrain_gpt.py --a", 16),
        ("srun -n$N python pretrain_gpt.py --a", None),
        ("srun python pretrain_gpt.py --a", None),
        ("#SBATCH -n16\nsrun python pretrain_gpt.py --a", 16),
        ("mpirun --np 4 python pretrain_gpt.py --a", 4),
        ("mpirun python pretrain_gpt.py --a", None),
        ("deepspeed --num_gpus 8 pretrain_gpt.py --a", None),
        ("accelerate launch --num_processes 8 pretrain_gpt.py --a", None),
        ("ls pretrain_gpt.py && echo python pretrain_gpt.py && torchrun --nproc-per-node 2 pretrain_gpt.py --a", 2),
        ("mkdir -p runs\necho starting\nexec torchrun pretrain_gpt.py --a &\nwait", 1),
        ("torchrun --nproc-per-node 8 megatron/pretrain_bert.py --a", 8),
        ("srun -n 4 bash -c 'python pretrain_t5.py --a'", 4),
    ],
)
def test_launches(text, ranks):
    launch = find_launch(text)
    assert launch.arguments == ("--a",) and launch.world_size == ranks
    assert launch.program in text and launch.program in PROGRAMS


@pytest.mark.parametrize(
    ("text", "nodes", "lines"),
    [
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --a", 1, ["mtrain train run.toml --nproc 8"]),
        (
            "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --a",
            2,
            ["torchrun --nnodes 2 --nproc-per-node 8", "srun mtrain train run.toml"],
        ),
        (
            "torchrun --nproc_per_node 8 --nnodes $N pretrain_gpt.py --a",
            None,
            ["torchrun --nnodes MACHINES --nproc-per-node RANKS"],
        ),
        ("#SBATCH --nodes=4\ntorchrun --nproc_per_node 8 pretrain_gpt.py --a", 1, ["mtrain train run.toml --nproc 8"]),
        ("mpirun -np 16 -H a:8,b:8 python pretrain_gpt.py --a", None, ["--nnodes MACHINES"]),
        ("#SBATCH --nodes=4\nsrun -n 8 python pretrain_gpt.py --a", 4, ["--nnodes 4 --nproc-per-node 2"]),
    ],
)
def test_how_a_run_on_several_machines_is_started(text, nodes, lines):
    launch = find_launch(text)
    assert launch.nodes == nodes
    found = as_toml(migrate([], 1), title="x", world_size=launch.world_size, nodes=launch.nodes)
    assert all(line in found for line in lines) and ("--nproc " in found) == (nodes == 1)


def test_a_command_with_too_few_ranks_is_no_advice():
    words = ["--num-layers", "4", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
    found = as_toml(migrate(words, 8), title="x", world_size=4, nodes=1)
    assert "The command has 4 ranks, but tp x pp x cp needs a multiple of 8." in found and "--nproc 4" not in found
    assert "--nnodes MACHINES --nproc-per-node RANKS" in found
    assert "mtrain train run.toml --nproc 8" in as_toml(migrate(words, 8), title="x", world_size=8, nodes=1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no Python script"),
        ("ls", "no Python script"),
        ("sbatch <<EOF\npython pretrain_gpt.py\nEOF", "no Python script, and pretrain_gpt.py in a text or a here-doc"),
        ("python pretrain_ict.py --a", "mtrain lacks two encoders for retrieval"),
        ("torchrun pretrain_vlm.py --a", "an encoder of images"),
        ("torchrun examples/detxoify_lm/finetune_gpt.py --lr 1", "use mtrain finetune MODEL DATA"),
        ("python tools/preprocess_data.py --input a", "use mdata preprocess, which takes its options"),
        (". ./common.sh; run", "`. ./common.sh`, a file that is not read"),
        ("srun -n 8 bash -c 'A=pretrain_gpt.py" + 20 * "; A+=$A$A" + "'", "10,000,000 characters"),
        ("python pretrain_gpt.py\npython pretrain_gpt.py", "2 such commands"),
        ("python pretrain_gpt.py 'a", "line 1: ' is never closed"),
        ("$(" * 5000, "recursion"),
        ("sh -c 'python pretrain_gpt.py \"a'", "is never closed"),
    ],
)
def test_what_starts_no_gpt_is_refused(text, found):
    with pytest.raises(UsageError) as caught:
        find_launch(text)
    assert found in str(caught.value) and len(str(caught.value).splitlines()) <= 4
