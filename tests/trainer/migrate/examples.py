"""Scripts like those of Megatron-LM's README and examples, rewritten: its arguments and values, our text."""

from __future__ import annotations

# 345M on one GPU: variables, backslashes, positional arguments.
GPT_345M = r"""
#!/bin/bash
# The 345M model on one GPU.
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINTS=$1
DATA=${2:-corpus_text_document}

GPT_ARGS="
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 4 --global-batch-size 8 \
    --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine \
    --train-iters 500000 --lr-decay-iters 320000 --lr-warmup-fraction .01 \
    --weight-decay 1e-2 --clip-grad 1.0 --fp16
"
torchrun pretrain_gpt.py $GPT_ARGS \
    --data-path $DATA --tokenizer-type GPT2BPETokenizer \
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
    --save $CHECKPOINTS --load $CHECKPOINTS > train.log 2>&1
"""

# The same model data parallel on the 8 GPUs of a machine: arrays.
GPT_8_GPUS = r"""
GPUS=8; NODES=1
WORLD=$(($GPUS*$NODES))
LAUNCH=(
    --nproc_per_node $GPUS   # all of this machine
    --nnodes $NODES --node_rank ${NODE_RANK:-0}
    --master_addr localhost --master_port 6000
)
MODEL=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16)
MODEL+=(--seq-length 1024 --max-position-embeddings 1024)
TRAINING=(
    --micro-batch-size 8
    --global-batch-size $((8 * WORLD))
    --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --train-iters 500000 --lr-decay-iters 320000 --lr-warmup-iters 3200
    --bf16 --attention-dropout 0 --hidden-dropout 0
)
if [ "$GPUS" -gt 1 ] && [[ -n "$WORLD" ]]; then
    TRAINING+=("--use-distributed-optimizer" "--overlap-grad-reduce")
else
    TRAINING+=(--no-such-argument)
fi
python -m torch.distributed.launch ${LAUNCH[@]} pretrain_gpt.py \
    "${MODEL[@]}" "${TRAINING[@]}" --data-path "0.7 a 0.3 b" --split 949,50,1 --save "runs/8 gpus"
"""

# 175B on 128 machines by Slurm: tensor and pipeline parallel, samples instead of steps, a ramp.
GPT_175B = r"""
#SBATCH --nodes=128 --ntasks-per-node=8 --job-name=gpt
DIR=`pwd`
DATA="0.2 one 0.3 two 0.5 three"
options=" \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
    --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
    --data-path ${DATA} --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 \
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 \
    --eval-iters 40 --eval-interval 1000 --save-interval 1000 --save checkpoints \
    --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
srun -l --output=$DIR/logs/%j.log sh -c "python -u ${DIR}/pretrain_gpt.py ${options}"
"""

# BERT 345M and T5 220M on the 8 GPUs of a machine, each layer on two of them.
BERT_345M = r"""
GPUS=${GPUS:-8}
DATA=${DATA:-corpus_text_sentence}
LAUNCH="--nproc_per_node $GPUS --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000"
python -m torch.distributed.launch $LAUNCH pretrain_bert.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 \
    --micro-batch-size 2 --global-batch-size 16 --train-iters 1000000 --lr 0.0001 --min-lr 1.0e-5 \
    --lr-decay-style linear --lr-decay-iters 990000 --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 \
    --fp16 --data-path $DATA --vocab-file vocab.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save $1 --load $1
"""

T5_220M = r"""
LAUNCH=(--nproc_per_node 8 --nnodes 1)
T5="--tensor-model-parallel-size 2 --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 \
    --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 \
    --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 64 --global-batch-size 512 \
    --lr 0.0001 --train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 \
    --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --vocab-extra-ids 100 \
    --init-method-std 0.015 --transformer-impl transformer_engine --attention-backend auto"
torchrun ${LAUNCH[@]} pretrain_t5.py $T5 --data-path corpus_text_sentence --vocab-file vocab.txt \
    --tokenizer-type BertWordPieceCase --split 99982,9,9 --log-interval 100 --save-interval 500 --eval-interval 1000 \
    --eval-iters 10 --distributed-backend nccl --save $1 --load $1
"""

# Llama 2 7B, as its weights would be finetuned; ARGS of the model are given, because no checkpoint says them.
LLAMA2 = r"""
TP=1
torchrun --nproc-per-node=8 pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 1 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --untie-embeddings-and-output-weights --use-rotary-position-embeddings --no-position-embedding \
    --normalization RMSNorm --swiglu --disable-bias-linear --no-masked-softmax-fusion \
    --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 \
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 1e-5 --lr-decay-style cosine \
    --data-path chat_text_document --split 100,0,0 --save tuned $MORE
"""
FINETUNE = "--load llama2 --finetune --use-checkpoint-args --no-load-optim --no-load-rng --exit-on-missing-checkpoint"
