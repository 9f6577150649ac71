"""Arguments of Megatron-LM's pretrain_gpt.py that need no setting of ours, and those that are refused: tables.

A row: the reason, then the arguments as `flag_table` of `flags.py` reads them. `--name`: nothing follows; `--name=1`:
one value, 1 if it is left out; `--name=*p2p`: one or more. A refused argument is accepted if it has its default value
(of --spec, pretrain_bert.py's other set of kernels).
REMOVED has names that Megatron-LM no longer takes, and what replaced them.
"""

NOT_NEEDED: tuple[tuple[str, str], ...] = (
    (
        "the pattern of layers says it; layers that add to the stream count as in hybrids there",
        "--is-hybrid-model",
    ),
    (
        "it names a kernel; here [kernels] and a self-test choose kernels, which changes rounding only",
        """--attention-backend=auto --no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl=native --use-flash-attn --no-persist-layer-norm
        --no-gradient-accumulation-fusion --transformer-impl=transformer_engine --symmetric-ar-type=
        --use-fused-weighted-squared-relu --use-kitchen-attention --kitchen-attention-backend=sdpa
        --disable-jit-fuser --flash-attention-version= --fused-residual-rmsnorm --use-transformer-engine-op-fuser
        --batch-invariant-backend=te_native --muon-fp32-matmul-prec=medium --muon-use-syrk
        --disable-mamba-mem-eff-path""",
    ),
    (
        "grouping and overlapping communication does not change results; here the layout decides it",
        """--no-clone-scatter-output-in-embedding --disable-gloo-process-groups --disable-tp-comm-overlap-ag
        --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad
        --disable-tp-comm-bulk-wgrad --tp-comm-bootstrap-backend=nccl --train-sync-interval=
        --no-async-tensor-model-parallel-allreduce --disable-tp-comm-split-ag --disable-tp-comm-split-rs
        --pipeline-model-parallel-comm-backend= --microbatch-group-size-per-virtual-pipeline-stage=
        --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush --distributed-backend=nccl
        --defer-embedding-wgrad-compute --wgrad-deferral-limit=0 --no-align-grad-reduce --ddp-num-buckets=
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --overlap-param-gather-with-optimizer-step
        --no-align-param-gather --no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p --local-rank=0
        --lazy-mpu-init --no-gradient-reduce-div-fusion --suggested-communication-unit-size=
        --num-distributed-optimizer-instances=1 --cp-comm-type=*p2p --hierarchical-context-parallel-sizes=*
        --nccl-communicator-config-path= --use-tp-pp-dp-mapping --high-priority-stream-groups=* --use-nccl-ub
        --use-sharp --delay-wgrad-compute --sharp-enabled-group= --disable-symmetric-registration
        --disable-async-tensor-model-parallel-allreduce --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad
        --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs
        --disable-clone-scatter-output-in-embedding --ddp-reduce-scatter-with-fp32-accumulation
        --create-all-gather-group --disable-align-grad-reduce
        --ddp-param-name-patterns-for-fp32-local-accumulation=* --no-use-layer-wise-param-layout --local_rank=
        --DDP-impl=local --no-contiguous-buffers-in-local-ddp""",
    ),
    (
        "memory and the garbage collector are managed here",
        """--distribute-saved-activations --empty-unused-memory-level=0 --manual-gc --manual-gc-interval=0
        --no-manual-gc-eval --disable-manual-gc-eval""",
    ),
    (
        "one checkpoint format, readable in any layout; checkpoints are complete and written in the background",
        """--no-save-optim --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
        --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo=fully_parallel
        --no-use-tokenizer-model-from-checkpoint-args --use-dist-ckpt --use-persistent-ckpt-worker
        --auto-detect-ckpt-format --dist-ckpt-format= --ckpt-format=torch_dist --ckpt-fully-parallel-save
        --no-ckpt-fully-parallel-save --async-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
        --dist-ckpt-strictness=assume_ok_unexpected --replication --replication-jump= --replication-factor=2
        --load-model-opt-format --no-strict-fsdp-dtensor-load --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
        --disable-use-tokenizer-model-from-checkpoint-args --disable-ckpt-fully-parallel-save
        --disable-strict-fsdp-dtensor-load --async-strategy=nvrx --async-ckpt-cpu-priority=10
        --async-ckpt-io-priority=3 --async-ckpt-use-cpu-shm --ckpt-fully-parallel-load-exchange-algo=broadcast
        --ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save-process-group=dp
        --ckpt-fully-parallel-load-process-group=dp --ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create
        --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
        --no-save-tokenizer-assets --disable-save-tokenizer-assets --dist-ckpt-workers=1
        --ckpt-drop-redundant-extra-state""",
    ),
    (
        "the tokenizer is that of the corpus manifest (mdata adopt records it for a pair without one)",
        """--vocab-file= --merge-file= --vocab-extra-ids=0 --tokenizer-model= --tiktoken-pattern=
        --tiktoken-num-special-tokens=1000 --tiktoken-special-tokens=* --tokenizer-metadata= --legacy-tokenizer
        --trust-remote-code --tokenizer-special-tokens=* --tokenizer-sentencepiece-legacy --tokenizer-hf-use-fast
        --tokenizer-hf-include-special-tokens --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-no-include-special-tokens --null-tokenizer-eod-id= --null-tokenizer-pad-id=-1
        --chat-template= --use-gigatoken""",
    ),
    (
        "the loader manages read-ahead, caches and files; batches do not depend on them",
        """--no-mmap-bin-files --num-workers=2 --no-create-attention-mask-in-dataloader --num-dataset-builder-threads=1
        --disable-msc --per-dataset-sequences-path= --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
        --allow-ambiguous-pad-tokens --enable-msc --data-impl=mmap --mmap-warmup""",
    ),
    (
        "watching and restarting ranks is left to the launcher: a stopped run continues with the same command",
        """--adlr-autoresume --adlr-autoresume-interval=1000 --enable-ft-package --calc-ft-timeouts --inprocess-restart
        --inprocess-max-iterations= --inprocess-monitor-thread-interval=1.0 --inprocess-monitor-process-interval=1.0
        --inprocess-progress-watchdog-interval=1.0 --inprocess-heartbeat-interval=30 --inprocess-soft-timeout=60
        --inprocess-hard-timeout=90 --inprocess-heartbeat-timeout=60 --inprocess-barrier-timeout=120
        --inprocess-completion-timeout=120 --inprocess-last-call-wait=1 --inprocess-termination-grace-time=1
        --inprocess-granularity=node --inprocess-active-world-size=1 --inprocess-empty-cuda-cache
        --ft-num-warmup-iters=5""",
    ),
    (
        "used only by other models and tasks (ICT, vision, RETRO, RL, inference)",
        """--onnx-safe=
        --encoder-tensor-model-parallel-size=0 --encoder-pipeline-model-parallel-size=0
        --pipeline-model-parallel-split-rank= --retriever-seq-length=256 --sample-rate=1.0
        --ict-head-size= --biencoder-projection-dim=0
        --biencoder-shared-query-context-model --ict-load= --bert-load= --titles-data-path=
        --query-in-block-prob=0.1 --use-one-sent-docs --evidence-data-path= --retriever-report-topk-accuracies=*
        --retriever-score-scaling --block-data-path= --embedding-path= --indexer-batch-size=128
        --indexer-log-interval=1000 --num-classes=1000 --img-h=224 --img-w=224 --num-channels=3 --patch-dim=16
        --classes-fraction=1.0 --data-per-class-fraction=1.0 --no-data-sharding --head-lr-mult=1.0
        --vision-pretraining --vision-pretraining-type=classify --vision-backbone-type=vit --swin-backbone-type=tiny
        --mask-type=random --mask-factor=1.0 --iter-per-epoch=1250 --dino-local-img-size=96
        --dino-local-crops-number=10 --dino-head-hidden-size=2048 --dino-bottleneck-size=256
        --dino-freeze-last-layer=1 --dino-norm-last-layer --dino-warmup-teacher-temp=0.04 --dino-teacher-temp=0.07
        --dino-warmup-teacher-temp-epochs=30
        --inference-batch-times-seqlen-threshold=-1 --max-tokens-to-oom=12000 --output-bert-embeddings
        --bert-embedder-type=megatron --flash-decode --inference-max-requests=8 --inference-max-seq-length=2560
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=40.0
        --inference-dynamic-batching-buffer-guaranteed-fraction=0.2
        --inference-dynamic-batching-buffer-overflow-factor= --inference-dynamic-batching-max-requests-override=
        --inference-dynamic-batching-max-tokens-override= --inference-rng-tracker --retro-project-dir=
        --retro-add-retriever --retro-cyclic-train-iters= --retro-encoder-layers=2
        --retro-encoder-hidden-dropout=0.1 --retro-encoder-attention-dropout=0.1 --retro-num-neighbors=2
        --retro-num-retrieved-chunks=2 --retro-attention-gate=1 --retro-no-verify-neighbor-count
        --inference-dynamic-batching-chunk-size=256 --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill=1
        --sft-tokenizer-prompt-format=nemotron-h-aligned --cache-mla-latents
        --inference-dynamic-batching-num-cuda-graphs=16 --rl-prompts-per-eval=32 --grpo-prompts-per-step=32
        --grpo-group-size=2 --grpo-iterations=2 --grpo-clamp-eps-lower=0.01 --grpo-clamp-eps-upper=0.01
        --grpo-kl-beta=0.001 --grpo-entropy-term-weight=0.0 --grpo-filter-groups-with-same-reward
        --grpo-default-temperature=1.0 --grpo-default-top-p=0 --langrl-inference-server-type=inplace_megatron
        --langrl-inference-server-conversation-template= --langrl-external-server --no-langrl-external-server
        --langrl-env-config= --rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training
        --no-rl-offload-kv-cache-during-training --rl-remove-kv-cache-during-training
        --no-rl-remove-kv-cache-during-training --rl-reset-cuda-graphs --no-rl-reset-cuda-graphs
        --rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction
        --no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef=
        --rl-calculate-intra-group-similarity --no-rl-calculate-intra-group-similarity --rl-use-sequence-packing
        --rl-sequence-packing-bin-size=8192 --rl-sequence-packing-algo=fifo --inference-max-batch-size=
        --inference-dynamic-batching-block-size=256 --inference-dynamic-batching-track-paused-request-events
        --decode-only-cuda-graphs --inference-dynamic-batching-unified-memory-level=0 --disable-chunked-prefill
        --inference-fuse-tp-communication --rl-default-temperature=1.0 --rl-default-top-p=0 --rl-default-top-k=-1
        --no-rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin=50 --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=
        --rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
        --rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=0
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
        --refit-method=gloo --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap
        --rl-parallel-generation-tasks=512 --rl-skip-bos-token --no-rl-skip-bos-token --use-legacy-static-engine
        --inference-dynamic-batching-paused-buffer-size-gb= --inference-dynamic-batching-max-requests=
        --inference-dynamic-batching-max-tokens= --enable-chunked-prefill
        --inference-dynamic-batching-cuda-graph-max-tokens=16384
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=16 --inference-logging-step-interval=0
        --inference-coordinator-port=12346 --inference-cuda-graph-scope= --inference-disable-triton-nvls-kernels
        --inference-grouped-gemm-backend=vllm --rl-generation-lag= --rl-max-inflight-requests=
        --rl-submission-granularity=B --rl-consumption-granularity=B --rl-durable-rollout-bank
        --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes=0 --rl-kv-cache-management-mode=persist
        --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs --rl-profile --rl-profile-dir= --rl-inference-parsers=*
        --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-track-generated-token-events
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=512 --num-speculative-tokens=0
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero
        --inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced
        --inference-dynamic-batching-prefix-caching-routing-alpha=0.5
        --inference-dynamic-batching-prefix-caching-mamba-gb=
        --inference-dynamic-batching-cuda-graph-sizing-distribution=exponential
        --inference-dynamic-batching-sampling-backend=torch --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode=legacy --inference-dynamic-batching-logprobs-mode=raw_logprobs
        --inference-text-gen-server-logging --no-inference-text-gen-server-logging
        --mamba-inference-conv-states-dtype=bf16 --mamba-inference-ssm-states-dtype=bf16
        --inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus""",
    ),
    (
        "it changes how work is launched on the GPU, not what is computed",
        """--enable-cuda-graph --cuda-graph-warmup-steps=3 --external-cuda-graph --cuda-graph-scope=*
        --cuda-graph-impl=none --cuda-graph-modules=* --optimizer-cuda-graph --te-rng-tracker""",
    ),
    (
        "scores are divided by the layer's number and multiplied by it again: the function is the same",
        "--apply-query-key-layer-scaling",
    ),
    (
        "softmax and loss are computed in fp32 here, and sums of products too",
        "--attention-softmax-in-fp32 --disable-bf16-reduced-precision-matmul",
    ),
    (
        "a step with a gradient that is not finite is skipped here, and a run with too many of them is stopped",
        "--no-check-for-nan-in-loss-and-grad",
    ),
    (
        "[spikes] compares every loss and gradient norm with earlier ones, and by default reports what stands out",
        "--check-for-spiky-loss --check-for-large-grads",
    ),
    (
        "SIGTERM and Ctrl-C end a run with a checkpoint here",
        "--exit-signal-handler --exit-signal-handler-for-dataloader --exit-signal-handler-for-training",
    ),
    (
        "random numbers are computed from the seed and the position here: there is no state to store",
        "--no-save-rng --no-load-rng",
    ),
    (
        "the weights of a checkpoint replace the initial ones",
        "--no-initialization",
    ),
    (
        "a missing checkpoint.init_from is always refused here",
        "--exit-on-missing-checkpoint",
    ),
    (
        "a run that continues uses the values of its run file, and prints the previous ones where they differ",
        "--override-opt_param-scheduler --override-opt-param-scheduler",
    ),
    (
        'optimizer.sharding = "state" is the default here',
        "--use-distributed-optimizer",
    ),
    (
        "each validation corpus is a separate set here, named after its file",
        "--multiple-validation-sets --validation-set-names=*",
    ),
    (
        "it only permits the use of other arguments",
        "--use-mcore-models --enable-experimental",
    ),
    (
        "it changes speed only, and products beside copies of tokens were slower here",
        "--tp-comm-overlap --tp-comm-overlap-cfg=",
    ),
    (
        "the watchdog finds and names a rank that makes no progress",
        "--distributed-timeout-minutes=10 --distributed-timeout-seconds-after-init=",
    ),
    (
        "initial weights are the same on every device and in every layout",
        "--use-cpu-initialization --init-model-with-meta-device",
    ),
    (
        'recompute.mode = "selective" decides what is recomputed',
        "--recompute-modules=*",
    ),
    (
        "it only observes the run; metrics.jsonl and report.html have losses, norms, rates and memory",
        """--record-memory-history --memory-snapshot-path=snapshot.pickle --log-throughput --log-progress
        --timing-log-level=0 --no-barrier-with-level-1-timing --timing-log-option=minmax --tensorboard-log-interval=1
        --tensorboard-queue-size=1000 --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
        --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard
        --logging-level= --log-straggler
        --disable-straggler-on-startup --straggler-ctrlr-port=65535 --straggler-minmax-count=1
        --run-workload-inspector-server --no-one-logger --one-logger-project=megatron-lm --one-logger-run-name=
        --one-logger-async --app-tag-run-name= --app-tag-run-version=0.0.0 --config-logger-dir= --log-energy
        --dump-param-to-param-group-map= --save-wgrads-interval= --save-dgrads-interval=
        --disable-log-loss-scale-to-tensorboard --log-memory-interval= --log-device-memory-used
        --log-max-attention-logit --inference-wandb-logging --no-inference-wandb-logging
        --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra
        --record-shapes --nvtx-ranges --save-params-interval= --save-activations-interval=
        --save-tokens-per-expert-interval= --flight-recorder-dump-path= --flight-recorder-trace-buffer-size=2000
        --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
        --disable-flight-recorder-extra-dump-on-exec --otel-enabled --otel-service-name= --otel-span-groups=
        --check-weight-hash-across-dp-replicas-interval=""",
    ),
    (
        "it looks for faulty hardware, or injects faults as a test",
        """--result-rejected-tracker-filename= --rerun-mode=validate_results --error-injection-rate=0
        --error-injection-type=transient_error --gpu-sniff-test-interval= --fault-injector-ranks=
        --fault-injector-num-ranks= --fault-injector-fault-types= --fault-injector-fault-probabilities=
        --fault-injector-fault-delay= --fault-injector-delay-start-iteration= --fault-injector-mtti-seconds=
        --fault-injector-offset-seconds= --fault-injector-seed=""",
    ),
    (
        "evaluation uses the microbatch of training here; it changes memory only",
        "--eval-micro-batch-size=",
    ),
    (
        "it divides the MLP's work into parts to save memory; the results are the same",
        "--mlp-chunks-for-training=1",
    ),
    (
        "Transformer Engine ignores it",
        "--fp8-interval=1",
    ),
    (
        "how weights are stored and gathered in FP8 changes rounding only",
        """--keep-fp8-transpose-cache-when-using-custom-fsdp --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag
        --keep-fp8-transpose-cache""",
    ),
    (
        "where states and activations are kept changes memory, not results; here they stay on the GPU",
        """--optimizer-cpu-offload --optimizer-offload-fraction=1.0 --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --use-precision-aware-optimizer
        --cpu-offloading-num-layers=0 --fine-grained-activation-offloading --offload-modules=*
        --min-offloaded-tensor-size=1048576 --cpu-offloading-retain-pinned-cpu-buffers
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks=0 --activation-offload-fraction=1.0
        --fine-grained-offloading-max-inflight-offloads=""",
    ),
    (
        "the results do not depend on how sharded parameters are gathered",
        """--fsdp-double-buffer --fsdp-manual-registration --enable-full-sharding-in-hsdp
        --outer-dp-sharding-strategy=no_shard --megatron-fsdp-version=1
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --fsdp-db-use-persist-buf-on-alloc-fail""",
    ),
    (
        "how experts are computed does not change results; routing is in fp32, and no slot is padded",
        """--moe-shared-expert-overlap --moe-grouped-gemm --moe-layer-recompute --moe-router-dtype=
        --moe-per-layer-logging --moe-token-dispatcher-type=allgather --moe-enable-deepep --moe-permute-fusion
        --moe-pad-expert-input-to-capacity --moe-router-padding-for-fp8 --moe-deepep-num-sms=20
        --moe-router-fusion --overlap-moe-expert-parallel-comm --moe-pad-experts-for-cuda-graph-inference
        --ep-overlap-early-attn-memory-release --moe-router-padding-for-quantization
        --moe-flex-dispatcher-backend=deepep --moe-hybridep-num-sms=16
        --overlap-dispatch-backward-with-experts-wgrad --high-priority-a2a-comm-stream
        --use-grouped-gemm-for-shared-expert --moe-shared-expert-glu-interleave-size=
        --use-grouped-gemm-for-dense-mlp --moe-use-grouped-tensor --moe-single-grouped-weight
        --moe-single-grouped-bias --moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs
        --moe-flex-dispatcher-num-sms= --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute=
        --moe-hybridep-num-sms-preprocessing=108 --moe-ncclep-zero-copy --moe-mlp-glu-interleave-size=
        --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type=nvls --moe-paged-stash
        --moe-paged-stash-page-size=64 --moe-paged-stash-buffer-size-factor-cuda=1.1
        --moe-paged-stash-buffer-size-factor-cpu=0.0""",
    ),
    (
        "used only by ModelOpt (--modelopt-enabled) and its scripts",
        """--export-model-type=GPTModel --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-force-local-attention --export-kv-cache-quant=none --export-real-quant-cfg=None
        --export-quant-cfg= --export-kd-teacher-model-config= --export-kd-teacher-ckpt-format= --export-kd-cfg=
        --finetune-hf-dataset= --finetune-data-split=train --finetune-data-files=* --qad-train-target=
        --freeze-base-for-mtp --export-qk-l2-norm --export-moe-apply-probs-on-input --export-offline-model
        --enable-gpt-oss""",
    ),
    (
        "only for Megatron-LM's legacy models",
        "--openai-gelu --apply-residual-connection-post-layernorm",
    ),
)

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "this form of experts is not supported; leave it out",
        """--moe-use-legacy-grouped-gemm --moe-extended-tp --moe-use-upcycling --moe-input-jitter-eps=
        --moe-router-force-load-balancing --moe-apply-probs-on-input --moe-upcycling-granularity=1
        --moe-enable-routing-replay --moe-latent-size= --expert-tensor-parallel-num-weight-shards=
        --moe-router-quantile-balancing-ema=0.0 --moe-router-force-biased= --gtp-remat-opt-in-modules=*
        --moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16 --moe-expert-rank-capacity-factor=
        --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub
        --moe-routing-trace-path= --moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights""",
    ),
    (
        "this form of fp8 or fp4 is not supported; precision.fp8 is the nearest",
        """--no-fp8-wgrad --kitchen-config-file= --kitchen-recipe-number= --fp4-format= --fp4-recipe=nvfp4
        --fp4-param-gather --fp8-quantizer-factory= --disable-fp8-wgrad --fp4-quantizer-factory=
        --te-precision-config-file= --fp8-output-proj""",
    ),
    (
        "no model here supports it; `mtrain config --key model` lists the settings",
        """--mrope-section=*
        --use-legacy-models --init-method-xavier-uniform --heterogeneous-layers-config-path=
        --heterogeneous-layers-config-encoded-json= --spec=*local --qk-l2-norm --mtp-standalone
        --attention-output-gate --experimental-attention-variant= --dsa-indexer-n-heads= --dsa-indexer-head-dim=
        --dsa-indexer-topk= --dsa-indexer-loss-coeff= --dsa-indexer-use-sparse-loss --linear-conv-kernel-dim=4
        --linear-key-head-dim=128 --linear-value-head-dim=128 --linear-num-key-heads=16 --linear-num-value-heads=32
        --linear-attention-freq= --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm
        --mtp-hybrid-override-pattern= --dsa-indexer-topk-freq=1 --dsa-indexer-skip-topk-offset=0
        --dsa-kernel-backend=none --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation
        --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu
        --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32 --use-mup --mup-width-mult=1.0
        --mup-base-hidden-size= --mup-embedding-mult=1.0 --mup-output-mult=1.0 --mup-base-head-dim=
        --mup-attn-scale-power=1.0 --enable-mhc-connections --mhc-num-residual-streams=4
        --mhc-sinkhorn-iterations=20 --mhc-init-gating-factor=0.01 --mhc-recompute-layer-num=
        --gdp-num-householder=3 --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=2
        --mamba-training-ssm-states-dtype= --mla-down-proj-fusion""",
    ),
    (
        "the range of pairs that YaRN scales is rounded to whole numbers here; leave it out",
        "--no-yarn-correction-range-round-to-int",
    ),
    (
        "the optimizer has no such option; `mtrain config --key optimizer` lists its options",
        """--qk-clip --qk-clip-alpha=0.5 --qk-clip-threshold=100 --apply-wd-to-qk-layernorm
        --no-weight-decay-cond-type= --lion-beta1=0.95 --lion-beta2=0.98""",
    ),
    (
        "with Muon, q, k and v are separate matrices, and AdamW updates everything that is not a matrix of a layer",
        "--muon-no-split-qkv --muon-scalar-optimizer=adam",
    ),
    (
        "initial weights are the model's weights in the checkpoint; leave it out",
        "--load-main-params-from-ckpt",
    ),
    (
        "samples are read in the order of the blend; leave it out",
        "--dataloader-type=single --max-seqlen-per-dp-cp-rank= --hybrid-context-parallel",
    ),
    (
        'tokenize the conversations once with `mdata preprocess --chat`, then leave it out and set data.kind = "chat"',
        "--sft",
    ),
    (
        "the loss after an end-of-document token counts like any other; leave it out",
        "--eod-mask-loss",
    ),
    (
        "give it to `mdata blend`, and set data.blend to the result",
        "--data-args-path= --per-split-data-args-path= --phase-transition-iterations=",
    ),
    (
        "reinforcement learning, test modes and YAML configurations are not supported",
        """--data-parallel-random-init --test-mode --yaml-cfg= --perform-rl-step --batch-invariant-mode
        --fake-process-group --inference-shards=""",
    ),
    (
        "SIGTERM and Ctrl-C end a run with a checkpoint here; send one of them",
        "--exit-signal=SIGTERM",
    ),
    (
        "residuals have the dtype of the model here; leave it out",
        "--fp32-residual-connection",
    ),
    (
        "the loss is computed from logits of the model's dtype, in fp32; leave it out",
        "--fp16-lm-cross-entropy --output-logit-dtype=",
    ),
    (
        "main weights, main gradients and moments are fp32 here; leave it out",
        """--main-grads-dtype=fp32 --main-params-dtype=fp32 --exp-avg-dtype=fp32 --exp-avg-sq-dtype=fp32
        --megatron-fsdp-main-params-dtype=fp32""",
    ),
    (
        "only mesh.tp and optimizer.sharding divide weights here",
        "--tensor-parallel-num-weight-shards=",
    ),
    (
        "training from the logits of another model is not supported",
        """--logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k=1 --logits-save-dir=
        --logits-save-dtype=fp16 --logits-load-dir= --logits-load-decode-threads=4 --logits-load-prefetch-factor=3
        --logits-load-msc-prefetch-depth=2 --logits-load-kd-loss-alpha=1.0 --logits-load-ignore-errors""",
    ),
    (
        "ModelOpt's models (quantization, distillation, pruning) are not supported",
        "--modelopt-enabled --export-kd-teacher-load=",
    ),
    (
        "[model.lora] alone freezes weights; leave it out",
        "--freeze-all-layers",
    ),
    (
        "`mtrain convert` converts checkpoints",
        "--ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format",
    ),
    (
        "a run's steps and samples are those of its checkpoint",
        "--override-ckpt-iteration=",
    ),
    (
        "the model's arguments are not read from a checkpoint here; write them out",
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args",
    ),
    (
        "it trains nothing; `mtrain eval` computes losses",
        "--skip-train",
    ),
    (
        "a batch that the ranks cannot divide is refused here; leave it out",
        "--decrease-batch-size-if-needed",
    ),
    (
        "validation begins with the first train.eval_interval; leave it out",
        "--start-eval-at-iter=",
    ),
    (
        (
            "not supported; the nearest are --reset-position-ids and --reset-attention-mask, which keep the "
            "documents of a row apart"
        ),
        "--dataloader-inter-document-masking",
    ),
)

REMOVED: tuple[tuple[str, str], ...] = (
    ("--batch-size", "--micro-batch-size"),
    ("--warmup", "--lr-warmup-fraction"),
    ("--model-parallel-size", "--tensor-model-parallel-size"),
    ("--checkpoint-activations", "--recompute-granularity full --recompute-method uniform"),
    ("--checkpoint-num-layers", "--recompute-num-layers"),
    ("--activations-checkpoint-method", "--recompute-granularity full --recompute-method"),
    ("--activations-checkpoint-num-layers", "--recompute-num-layers"),
    ("--fp32-allreduce", "--accumulate-allreduce-grads-in-fp32"),
    ("--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
    ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    ("--override-lr-scheduler", "--override-opt_param-scheduler"),
    ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
    ("--fp8-e4m3", "--fp8-format e4m3"),
    ("--fp8-hybrid", "--fp8-format hybrid"),
    ("--delay-grad-reduce", "--no-align-grad-reduce"),
    ("--delay-param-gather", "--no-align-param-gather"),
    ("--no-query-key-layer-scaling", "nothing: scaling is off unless --apply-query-key-layer-scaling is given"),
    ("--standalone-embedding-stage", "--account-for-embedding-in-pipeline-split"),
    ("--overlap-p2p-communication", "nothing: overlap is on unless --no-overlap-p2p-communication is given"),
)
