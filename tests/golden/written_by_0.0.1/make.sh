#!/usr/bin/env bash
# How files.tar.xz was made, by mdata 0.0.1 at commit d53298de: every file by a command of that time, from text written for
# this test. Not to be made again: what later code writes proves nothing about older files.
# It was run in the empty folder /tmp/older, which the job folders name, with `mdata` and `mtrain` on PATH.
# tests/test_older_files.py reads the archive.
set -euo pipefail
export OMP_NUM_THREADS=1

python - <<'PYTHON'
import json
import random

WORDS = "a an and at by day for from group in is it life man of on people school state that the time way with world year".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "!"]


def sentence(draw):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12))) + "."


def write(name, seed, rows):
    draw = random.Random(seed)
    with open(name, "w") as file:
        for number in range(rows):
            text = " ".join(sentence(draw) for _ in range(draw.randint(0, 5)))
            file.write(json.dumps({"text": text, "number": number}) + "\n")


write("prose_1.jsonl", 1, 25)
write("prose_2.jsonl", 5, 15)
write("code.jsonl", 2, 30)
write("valid.jsonl", 3, 12)
draw = random.Random(4)
with open("talk.jsonl", "w") as file:
    for _ in range(8):
        turns = [{"role": role, "content": sentence(draw)} for role in ("user", "assistant") * draw.randint(1, 2)]
        file.write(json.dumps({"messages": turns}) + "\n")
open("vocab.txt", "w").write("\n".join([*SPECIAL, *WORDS, "role", "user", "assistant"]) + "\n")
PYTHON

words="--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"

# Corpora: plain, with held-out documents, in partitions, conversations, one merged by reference from a job's parts, its copy,
# a subset, a shuffled one, two of a split, and one that was adopted.
mdata preprocess --input code.jsonl --output-prefix code $words --append-eod --workers 1
mdata preprocess --input valid.jsonl --output-prefix valid $words --append-eod --workers 1
mdata preprocess --input code.jsonl --output-prefix held $words --append-eod --workers 1 --holdout 0.2
mdata preprocess --input code.jsonl --output-prefix parts $words --append-eod --workers 1 --partitions 2
mdata preprocess --input talk.jsonl --output-prefix talk --chat --chat-template plain --workers 1 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$(dirname "$0")/../tokenizer"
prose="--input prose_1.jsonl prose_2.jsonl $words --append-eod"
mdata launch local --parts 2 --cpus 1 -- preprocess --output-prefix prose $prose
mdata launch local --parts 2 --cpus 1 --merge copy -- preprocess --output-prefix lost $prose
mdata sample code_text_document.json --tokens 100 --seed 5 --output-prefix drawn
mdata shuffle code_text_document.json --seed 6 --output-prefix mixed
mdata split code_text_document.json --shares 1 1 --output-prefix half
for end in bin idx; do cp code_text_document.$end adopted.$end; done
mdata adopt adopted --full $words

# Blends: a table with a group, a cap, phases and a validation set; Megatron's words; its lists per split; a changed one.
cat >mix.toml <<'TOML'
[[component]]
path = "prose_text_document.json"
name = "prose"
weight = 0.7

[[component]]
path = "half_1_document.json"
weight = 0.5
group = "code"
max_epochs = 50

[[component]]
path = "half_2_document.json"
weight = 0.5
group = "code"

[group]
code = 0.3

[[phase]]
samples = 12

[[phase]]
shares = { prose = 0.4, code = 0.6 }

[valid]
valid = "valid_text_document.json"
TOML
mdata blend mix.toml -o mix.json --samples 64 --sequence-length 16
mdata blend 0.7 prose_text_document 0.3 code_text_document -o words.json
mdata blend --train-data-path 2 prose_text_document 1 drawn_document --valid-data-path valid_text_document -o lists.json
mdata blend --from words.json --at-sample 8 --sequence-length 16 --set code=0.6 -o changed.json

# A run whose layout changes at each checkpoint.
cat >run.toml <<'TOML'
[run]
folder = "run"

[model]
num_layers = 2
hidden_size = 4
num_heads = 2

[data]
blend = "mix.json"

[train]
sequence_length = 16
global_batch = 4
micro_batch = 2
steps = 16
exit_interval = 2
eval_interval = 4
eval_samples = 4

[optimizer]
lr = 1e-2
warmup_steps = 2

[checkpoint]
interval = 2
keep = 4
TOML
mtrain train run.toml --nproc 2 mesh.tp=2 mesh.sequence_parallel=true
mtrain train run.toml --nproc 2 mesh.pp=2
mtrain train run.toml --nproc 2 optimizer.sharding=parameters
mtrain train run.toml --nproc 1
# What two more steps give is recorded; the run is left as it was before them.
cp -r run before
mtrain train run.toml --nproc 2 mesh.tp=2 mesh.sequence_parallel=true
cp run/metrics.jsonl expected.jsonl
rm -r run
mv before run
python -c "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability())" >machine.txt

# What the commands say of these files, each after its own command line.
mkdir said
say() { (echo "$*"; "$@") >"said/$(ls said | wc -l)"; }
for manifest in *_document.json talk_messages_chat.json adopted.json mix.json words.json lists.json changed.json; do
  say mdata inspect --json "$manifest"
done
for step in 1 4 7 16; do say mdata trace run --json --tokens --length 0 --step "$step"; done
say mdata trace run --json --text --token 300
say mdata trace run --json --component prose --document 31
say mdata trace run --json --component half_2 --origin code.jsonl:20 --until-step 16
say mdata trace run --json --validation valid --sample 3
for blend in words lists changed; do
  for sample in 7 8 33; do say mdata trace $blend.json --json --tokens --length 0 --sequence-length 16 --sample $sample; done
done
say mdata trace words.json --json --tokens --length 0 --sequence-length 16 --order megatron --num-samples 64 --sample 20
say mdata trace words.json --json --tokens --length 0 --sequence-length 16 --kind packed --sample 9
say mdata trace talk_messages_chat.json --json --tokens --length 0 --sequence-length 64 --kind chat --sample 2
say mdata trace parts_text_document.json --json --tokens --length 0 --sequence-length 16 --split valid --split-shares 80,20,0 --sample 1
for corpus in code_text_document prose_text_document mixed_document talk_messages_chat; do say mdata cat --json $corpus.json; done
for step in 2 4 6 8; do say mtrain inspect --json run/checkpoints/step-$step; done

# The second job loses a part and its result.
sha256sum lost_text_document.bin lost_text_document.idx >lost.sha256
rm lost_text_document.* lost-00002-of-00002_*
# said/21, 22 and 26 were corrected later: 0.0.1 gave the ranks of the last mesh for steps of an earlier one.
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf ../files.tar.xz .
