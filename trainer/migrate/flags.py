"""The arguments of Megatron-LM's pretrain_gpt.py, _bert.py, _t5.py and _mamba.py that become settings: one table.

A row: name | kind of its value | Megatron's default | our key | how. With `=` the value is copied; otherwise a rule of
`rules_model.py` or `rules_run.py` makes the setting. `switch`: no value; `texts`: one or more values. A second name of
an argument is written as `same as --NAME`. The other arguments are in `other_flags.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

from trainer.migrate.other_flags import NOT_NEEDED, REFUSED, REMOVED

_TABLE = """
--num-layers | int | | = model.num_layers |
--encoder-num-layers | same as --num-layers
--hidden-size | int | | = model.hidden_size |
--ffn-hidden-size | int | | model.ffn_hidden_size | default 4 x hidden size; with --swiglu 8/3 x, a multiple of 64
--num-attention-heads | int | | = model.num_heads |
--kv-channels | int | | model.head_dim | default hidden size / heads
--group-query-attention | switch | | model.num_kv_heads | with --num-query-groups
--num-query-groups | int | 1 | model.num_kv_heads | with --group-query-attention
--max-position-embeddings | int | | model.max_position |
--position-embedding-type | text | learned_absolute | model.position | learned_absolute, rope, yarn, none; T5: relative
--relative-attention-num-buckets | int | 32 | model.t5.relative_buckets | with --position-embedding-type relative
--relative-attention-max-distance | int | 128 | model.t5.relative_distance | in the same way
--use-rotary-position-embeddings | switch | | model.position | rope
--no-position-embedding | switch | | model.position | only with rope, where it has no effect
--rotary-base | int | 10000 | model.rope_theta |
--rotary-percent | float | 1.0 | model.rope_fraction |
--rotary-interleaved | switch | | model.rope_interleaved |
--no-rope-freq | text | | model.rope_interval | an integer only
--rotary-seq-len-interpolation-factor | int | | model.rope_scaling | linear, with model.rope_factor
--use-rope-scaling | switch | | model.rope_scaling | llama3, with its constants 8192, 1 and 4
--rope-scaling-factor | float | 8.0 | model.rope_factor | with --use-rope-scaling
--rotary-scaling-factor | float | 1.0 | model.rope_factor | with --position-embedding-type yarn, like the next six
--yarn-original-max-position-embeddings | int | 4096 | model.rope_original_length |
--yarn-beta-fast | float | 32.0 | model.rope_beta_fast |
--yarn-beta-slow | float | 1.0 | model.rope_beta_slow |
--yarn-correction-range-round-to-int | switch | | model.rope_scaling | always
--mscale | float | 1.0 | model.rope_scaling | only 1; with --multi-latent-attention model.mla.mscale
--mscale-all-dim | float | 0.0 | model.rope_scaling | only 0; with --multi-latent-attention model.mla.mscale_all_dim
--multi-latent-attention | switch | | model.mla.kv_lora_rank | with --qk-layernorm only
--q-lora-rank | int | | model.mla.q_lora_rank | with --multi-latent-attention, like the next five
--kv-lora-rank | int | 32 | model.mla.kv_lora_rank |
--qk-head-dim | int | 128 | model.mla.qk_nope_head_dim |
--qk-pos-emb-head-dim | int | 64 | model.mla.qk_rope_head_dim |
--v-head-dim | int | 128 | model.mla.v_head_dim |
--rope-type | text | | model.rope_scaling | yarn, with --rotary-scaling-factor above 1, or rope; default yarn
--mtp-num-layers | int | | model.mtp.num_layers |
--mtp-loss-scaling-factor | float | 0.1 | model.mtp.loss_factor | with --mtp-num-layers
--normalization | text | LayerNorm | model.norm |
--norm-epsilon | float | 1e-05 | = model.norm_epsilon |
--layernorm-epsilon | same as --norm-epsilon
--apply-layernorm-1p | switch | | model.norm_zero_centered |
--swiglu | switch | | model.activation | swiglu
--squared-relu | switch | | model.activation | squared_relu
--quick-geglu | switch | | model.activation | quick_geglu
--no-bias-gelu-fusion | switch | | model.activation | gelu_erf instead of gelu: the fused kernel computes the tanh form
--use-te-activation-func | switch | | model.activation | gelu: Transformer Engine computes the tanh form
--no-bias-swiglu-fusion | switch | | model.activation_clamp | the fused kernel ignores the clamp
--activation-func-clamp-value | float | | model.activation_clamp | with --swiglu and --no-bias-swiglu-fusion
--glu-linear-offset | float | 0.0 | model.activation_offset | with --swiglu and --no-bias-swiglu-fusion
--disable-bias-linear | switch | | model.bias | false; then GELU is exact, because nothing is fused
--add-qkv-bias | switch | | model.bias | qkv, with --disable-bias-linear
--qk-layernorm | switch | | model.qk_norm |
--window-size | text | | model.window | W,0: W + 1 tokens, the last one included
--window-attn-skip-freq | text | | model.window_interval |
--softmax-type | text | vanilla | model.attention_sinks | off-by-one: zero; learnable: learned
--num-experts | int | | model.moe.num_experts | the other arguments of experts have no effect without it
--moe-router-topk | int | 2 | model.moe.top_k |
--moe-ffn-hidden-size | int | | model.moe.ffn_hidden_size | default --ffn-hidden-size
--moe-layer-freq | text | 1 | model.moe.layers | a number: model.moe.interval; a list such as [0]*3+[1]*58
--moe-router-load-balancing-type | texts | aux_loss | model.moe.balance | aux_loss: microbatch; seq_aux_loss: sequence
--moe-aux-loss-coeff | texts | 0.0 | model.moe.balance_factor |
--moe-z-loss-coeff | float | | model.moe.z_loss_factor |
--moe-router-score-function | text | softmax | model.moe.score | softmax, sigmoid
--moe-router-pre-softmax | switch | | model.moe.normalize_weights | false, with softmax
--moe-router-num-groups | int | | model.moe.groups |
--moe-router-group-topk | int | | model.moe.groups_per_token |
--moe-router-topk-scaling-factor | float | | model.moe.weight_scale |
--moe-router-enable-expert-bias | switch | | model.moe.expert_bias |
--moe-router-bias-update-rate | float | 0.001 | model.moe.expert_bias_rate | with --moe-router-enable-expert-bias
--moe-expert-capacity-factor | float | | model.moe.capacity_factor | with model.moe.capacity_of = "microbatch"
--moe-token-drop-policy | text | probs | model.moe.drop | probs: weight; position: the first tokens, there any of them
--moe-shared-expert-intermediate-size | int | | model.moe.shared_ffn_hidden_size |
--moe-shared-expert-gate | switch | | model.moe.shared_gate |
--hybrid-override-pattern | text | | model.mamba.pattern | pretrain_mamba.py, like the next seven
--hybrid-layer-pattern | text | | model.mamba.pattern | with cuts between stages: mesh.layers_per_stage
--hybrid-attention-ratio | float | 0.0 | model.mamba.attention_ratio |
--hybrid-mlp-ratio | float | 0.0 | model.mamba.mlp_ratio |
--mamba-num-heads | int | | model.mamba.num_heads | default 2 x hidden size / --mamba-head-dim
--mamba-head-dim | int | 64 | model.mamba.head_dim |
--mamba-num-groups | int | 8 | model.mamba.num_groups |
--mamba-state-dim | int | 128 | model.mamba.state_size |
--attention-dropout | float | 0.1 | = model.attention_dropout |
--hidden-dropout | float | 0.1 | = model.hidden_dropout |
--untie-embeddings-and-output-weights | switch | | model.tie_embeddings | false
--init-method-std | float | 0.02 | = model.init_std |
--embedding-init-method-std | float | | model.init_std | only with the value of --init-method-std
--vocab-size | int | | model.vocab_size | used for NullTokenizer and TikTokenizer, as in Megatron-LM
--tokenizer-type | text | GPT2BPETokenizer | model.vocab_size | GPT2BPETokenizer: 50257 rows; others: from the manifest
--padded-vocab-size | int | | model.vocab_size |
--make-vocab-size-divisible-by | int | 128 | model.vocab_size | the padding takes part in Megatron's loss
--no-pad-vocab-size | switch | | model.vocab_size | without padding
--disable-pad-vocab-size | same as --no-pad-vocab-size
--seed | int | 1234 | = run.seed | the same order of data; other initial weights of the same distribution
--save | text | | run.folder |
--load | text | | checkpoint.init_from | another folder than --save's; with init_optimizer, init_schedule, init_data
--finetune | switch | | checkpoint.init_from | with --load: weights alone
--ckpt-step | int | | checkpoint.init_from | the folder of that iteration in --load
--verify-integrity | switch | | checkpoint.load | latest-valid: all bytes of a checkpoint are compared with its hashes
--no-load-optim | switch | | checkpoint.init_optimizer | with --load: false, as is init_schedule
--pretrained-checkpoint | text | | checkpoint.init_from |
--save-interval | int | | checkpoint.interval | without --save-retain-interval, all are kept: checkpoint.keep
--persistent-save-interval | same as --save-interval
--save-retain-interval | int | | checkpoint.keep_every | with checkpoint.keep = 1: others are deleted, except the newest
--non-persistent-save-interval | int | | checkpoint.interval | those of --save-interval are kept: checkpoint.keep_every
--use-checkpoint-opt_param-scheduler | switch | | checkpoint.init_schedule | where --load is another folder than --save
--use-checkpoint-opt-param-scheduler | same as --use-checkpoint-opt_param-scheduler
--data-path | texts | | data.blend |
--mock-data | switch | | data.blend | mock
--train-data-path | texts | | data.blend |
--valid-data-path | texts | | data.valid | each corpus is a separate set; weights are ignored
--test-data-path | texts | | data.test | as --valid-data-path
--split | text | | data.split | default 969,30,1
--data-cache-path | text | | data.cache |
--object-storage-cache-path | text | | data.cache | without --data-cache-path; where blocks of stored corpora are kept
--s3-cache-path | text | | data.cache | the older name of --object-storage-cache-path
--mid-level-dataset-surplus | float | 0.005 | data.blend_surplus |
--reset-position-ids | switch | | data.document_masks | together with --reset-attention-mask
--reset-attention-mask | switch | | data.document_masks | together with --reset-position-ids
--mask-prob | float | 0.15 | data.bert.mask_probability | pretrain_bert.py; pretrain_t5.py: data.t5.mask_probability
--short-seq-prob | float | 0.1 | data.bert.short_probability | in the same way
--bert-no-binary-head | switch | | data.bert.head | false, as model.bert.binary_head
--decoder-seq-length | int | | data.t5.decoder_length | pretrain_t5.py
--decoder-num-layers | int | | model.num_layers | pretrain_t5.py; of both stacks, with model.t5.encoder_layers
--fim-data | switch | | data.kind | fim, whose random draws are other ones
--fim-rate | float | 0.5 | data.fim.rate | with --fim-data, like all --fim arguments
--fim-spm-rate | float | 0.5 | data.fim.spm_rate |
--fim-split-sample | text | | data.fim.split_sample |
--fim-fragment-rate | float | | data.fim.fragment_rate |
--fim-no-prefix | text | | data.fim.no_prefix |
--fim-prefix-token | token | <fim_prefix> | data.fim.tokens |
--fim-middle-token | token | <fim_middle> | data.fim.tokens |
--fim-suffix-token | token | <fim_suffix> | data.fim.tokens |
--fim-pad-token | token | <fim_pad> | data.fim.tokens |
--fim-eod-token | token | | data.fim.tokens |
--seq-length | int | | = train.sequence_length |
--encoder-seq-length | same as --seq-length
--micro-batch-size | int | | = train.micro_batch |
--global-batch-size | int | | train.global_batch | without it --micro-batch-size x data-parallel ranks
--rampup-batch-size | texts | | train.batch_ramp |
--step-batch-size-schedule | texts | | train.batch_schedule | its last size is train.global_batch
--train-iters | int | | train.steps |
--train-samples | int | | train.samples |
--calculate-per-token-loss | switch | | train.loss_average | token; without it megatron
--iterations-to-skip | texts | | data.skip | iteration k is step k + 1; a constant batch only
--exit-interval | int | 0 | = train.exit_interval |
--exit-duration-in-mins | int | | run.exit_after | minutes; the run ends with exit code 75
--deterministic-mode | switch | | run.deterministic |
--eval-interval | int | | train.eval_interval |
--eval-iters | int | 100 | train.eval_samples | x global batch; 0: train.evaluate = false
--eval-global-batch-size | int | | train.eval_samples | with --eval-iters
--full-validation | switch | | train.eval_samples | 0
--log-interval | int | 100 | = run.log_interval |
--log-params-norm | switch | | run.log_params_norm |
--log-num-zeros-in-grad | switch | | run.log_num_zeros |
--profile | switch | | run.profile | with PyTorch's profiler
--use-pytorch-profiler | switch | | run.profile | always; with --profile
--profile-step-start | int | 10 | run.profile | with --profile
--profile-step-end | int | 12 | run.profile | with --profile
--profile-ranks | texts | | run.profile_ranks | with --profile
--tensorboard-dir | text | | track.tensorboard_dir | track.to has "tensorboard"
--wandb-project | text | | track.project | track.to has "wandb"
--wandb-exp-name | text | | track.name | with --wandb-project, like the next two
--wandb-entity | text | | track.entity |
--wandb-save-dir | text | | track.wandb_dir |
--optimizer | text | adam | optimizer.name | adam: adamw; sgd; muon, dist_muon: muon
--lr | float | | = optimizer.lr |
--min-lr | float | 0.0 | = optimizer.min_lr |
--decoupled-lr | float | | optimizer.embedding_lr | for the token embedding and the output head
--decoupled-min-lr | float | | optimizer.embedding_min_lr | with --decoupled-lr; default --min-lr
--lr-decay-style | text | linear | optimizer.schedule |
--lr-decay-iters | int | | optimizer.decay_steps |
--lr-decay-samples | int | | optimizer.decay_samples |
--lr-warmup-iters | int | 0 | optimizer.warmup_steps | counted before the step: optimizer.warmup_count = "before"
--lr-warmup-samples | int | 0 | optimizer.warmup_samples |
--lr-warmup-fraction | float | | optimizer.warmup_fraction |
--lr-warmup-init | float | 0.0 | optimizer.init_lr |
--lr-wsd-decay-style | text | exponential | optimizer.wsd_decay | with --lr-decay-style WSD
--lr-wsd-decay-iters | int | | optimizer.wsd_decay_steps |
--lr-wsd-decay-samples | int | | optimizer.wsd_decay_samples |
--weight-decay | float | 0.01 | optimizer.weight_decay |
--start-weight-decay | float | | optimizer.weight_decay | with --weight-decay-incr-style
--end-weight-decay | float | | optimizer.weight_decay_end |
--weight-decay-incr-style | text | constant | optimizer.weight_decay_schedule |
--adam-beta1 | float | 0.9 | optimizer.beta1 | with --optimizer adam or muon, like the next two
--adam-beta2 | float | 0.999 | optimizer.beta2 |
--adam-eps | float | 1e-08 | optimizer.epsilon |
--sgd-momentum | float | 0.9 | optimizer.momentum | with --optimizer sgd
--muon-momentum | float | 0.9 | optimizer.muon_momentum | with --optimizer muon, like all --muon arguments
--muon-nesterov | switch | | optimizer.muon_nesterov |
--muon-use-nesterov | same as --muon-nesterov
--muon-num-ns-steps | int | 5 | optimizer.muon_ns_steps |
--muon-coefficient-type | text | quintic | optimizer.muon_coefficient_type | quintic, simple
--muon-scale-mode | text | spectral | optimizer.muon_scale_mode |
--muon-extra-scale-factor | float | 1.0 | optimizer.muon_extra_scale_factor |
--muon-tp-mode | text | blockwise | optimizer.name | always like duplicated; blockwise only without tensor parallelism
--clip-grad | float | 1.0 | = optimizer.clip_norm |
--use-megatron-fsdp | switch | | optimizer.sharding | with --data-parallel-sharding-strategy
--use-custom-fsdp | same as --use-megatron-fsdp
--data-parallel-sharding-strategy | text | optim_grads_params | optimizer.sharding | none, state, gradients, parameters
--use-torch-fsdp2 | switch | | optimizer.sharding | parameters
--torch-fsdp2-no-reshard-after-forward | switch | | optimizer.sharding | gradients, with --use-torch-fsdp2
--overlap-grad-reduce | switch | | optimizer.overlap_grad_reduce | on by default here; it does not change the numbers
--overlap-param-gather | switch | | optimizer.overlap_param_gather | on by default here; it does not change the numbers
--ddp-bucket-size | int | | optimizer.bucket_size | a bucket is made of whole blocks
--fp16 | switch | | precision.dtype | fp16
--bf16 | switch | | precision.dtype | bf16
--grad-reduce-in-bf16 | switch | | precision.gradients | params
--megatron-fsdp-main-grads-dtype | text | auto | precision.gradients | auto or fp32
--megatron-fsdp-grad-comm-dtype | text | auto | precision.gradients | auto or fp32
--accumulate-allreduce-grads-in-fp32 | switch | | precision.gradients | main, as with bf16; fp16 without it: params
--loss-scale | float | | precision.loss_scale |
--initial-loss-scale | float | 4294967296 | precision.initial_loss_scale |
--min-loss-scale | float | 1.0 | precision.min_loss_scale |
--loss-scale-window | float | 1000 | precision.loss_scale_window |
--hysteresis | int | 2 | precision.loss_scale_hysteresis |
--fp8-format | text | | precision.fp8_format | hybrid or e4m3
--fp8-recipe | text | delayed | precision.fp8 | delayed, blockwise, or tensorwise: current
--fp8-amax-history-len | int | 1 | precision.fp8_amax_history_len | with --fp8-recipe delayed, like the next two
--fp8-amax-compute-algo | text | most_recent | precision.fp8_amax_compute | max or most_recent
--fp8-margin | int | 0 | precision.fp8_margin |
--first-last-layers-bf16 | switch | | precision.fp8_first_last_bf16 |
--num-layers-at-start-in-bf16 | int | 1 | precision.fp8_first_last_bf16 |
--num-layers-at-end-in-bf16 | int | 1 | precision.fp8_first_last_bf16 |
--recompute-activations | switch | | recompute.mode | selective
--recompute-granularity | text | | recompute.mode |
--recompute-method | text | | recompute.method |
--recompute-num-layers | int | | recompute.layers |
--tensor-model-parallel-size | int | 1 | = mesh.tp |
--sequence-parallel | switch | | mesh.sequence_parallel | with tensor parallelism only
--pipeline-model-parallel-size | int | 1 | mesh.pp |
--num-layers-per-virtual-pipeline-stage | int | | mesh.virtual_pipeline | interleaved
--num-virtual-stages-per-pipeline-rank | int | | mesh.virtual_pipeline | interleaved
--decoder-first-pipeline-num-layers | int | | mesh.layers_per_stage |
--decoder-last-pipeline-num-layers | int | | mesh.layers_per_stage |
--account-for-embedding-in-pipeline-split | switch | | mesh.layers_per_stage | counts as a layer
--account-for-loss-in-pipeline-split | switch | | mesh.layers_per_stage | counts as a layer
--pipeline-model-parallel-layout | text | | mesh.layers_per_stage | transformer layers in every stage; no m
--context-parallel-size | int | 1 | mesh.cp |
--expert-model-parallel-size | int | 1 | mesh.ep | with --num-experts
--expert-tensor-parallel-size | int | | mesh.etp | with --num-experts
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """An argument of Megatron-LM.

    Args:
        name: with its dashes.
        kind: switch, int, float, text, texts, token (a text such as <fim_pad>), or any: whatever follows.
        default: Megatron's, as text; None: none.
        use: "mapped", "not needed" or "refused".
        key: the setting of ours; "": none.
        copied: the value is the key's as it is.
        note: how it is mapped, why it is not needed, or why it is refused and what is closest.
        same_as: the argument of which this is a second name.
    """

    name: str
    kind: str
    default: str | None = None
    use: str = "mapped"
    key: str = ""
    copied: bool = False
    note: str = ""
    same_as: str = ""


@functools.cache
def flag_table() -> Mapping[str, Flag]:
    """Every known argument, by name."""
    table: dict[str, Flag] = {}
    for line in _TABLE.strip().splitlines():
        name, kind, *rest = (cell.strip() for cell in line.split("|"))
        if kind.startswith("same as "):
            first = table[kind.removeprefix("same as ")]
            table[name] = dataclasses.replace(first, name=name, same_as=first.name)
            continue
        default, key, note = rest
        copied = key.startswith("= ")
        table[name] = Flag(
            name=name, kind=kind, default=default or None, key=key.removeprefix("= "), copied=copied, note=note
        )
    for use, groups in (("not needed", NOT_NEEDED), ("refused", REFUSED)):
        for reason, names in groups:
            table |= {flag.name: flag for flag in (_other(word, use, reason) for word in names.split())}
    for name, replacement in REMOVED:
        table[name] = Flag(name=name, kind="any", use="refused", note=f"removed from Megatron-LM; use {replacement}")
    return MappingProxyType(table)


def _other(word: str, use: str, reason: str) -> Flag:
    """`--name` is a switch, `--name=1` takes a value (default 1), `--name=*1` takes several."""
    name, equals, default = word.partition("=")
    kind = "texts" if default.startswith("*") else "text" if equals else "switch"
    return Flag(name=name, kind=kind, default=default.removeprefix("*") or None, use=use, note=reason)
