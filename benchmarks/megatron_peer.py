"""megatron-core with Transformer Engine's layers, a peer of other benchmarks: as a careful user runs it.

bf16 parameters, fp32 main gradients and weights, fused attention, RoPE, SwiGLU and cross-entropy, weight gradients
added by the product itself, megatron-core's own schedules, optimizer and clipping; gradients and parameters of
data-parallel ranks are communicated during computation. Written against megatron-core 0.16.1 and Transformer Engine
2.11; neither is a dependency, so both are imported where a row of theirs begins. The head's product needs apex's
`fused_weight_gradient_mlp_cuda`; where apex is missing, a module of that name calls torch's product. Transformer Engine
gets PyTorch's cuDNN, as ours does, not one of the system: cuDNN 9.14 attends up to 10 % faster than 9.19 with heads of
64.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels.transformer_engine import share_cudnn
from trainer.models.gpt.shape import GPTShape
from trainer.parallel.context import columns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """What a row of megatron-core is run with.

    Args:
        optimizer: "distributed": flat shards; "fused": in addition, Adam's kernel writes the bf16 parameters.
        fp8: its recipe, "": none.
        tp, pp, cp: ranks; with tp > 1 the sequence is divided too, with cp > 1 attention is a ring of messages.
        chunks: of the model on each rank of a pipeline.
        ep, etp: ranks that share experts, and each of them; 0: those of tp. dispatcher: of tokens to them.
    """

    optimizer: Literal["plain", "distributed", "fused"] = "plain"
    fp8: str = ""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    ep: int = 1
    etp: int = 0
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"


ROWS = {  # of one GPU, whose shard is the whole state
    "megatron": Megatron(),
    "megatron-distributed": Megatron(optimizer="distributed"),
    "megatron-fused": Megatron(optimizer="fused"),
    "megatron-fp8": Megatron(fp8="delayed"),
    "megatron-fp8-fused": Megatron(fp8="delayed", optimizer="fused"),
    "megatron-fp8-current": Megatron(fp8="tensorwise"),
    "megatron-fp8-blocks": Megatron(fp8="blockwise"),
    "megatron-allgather": Megatron(dispatcher="allgather"),
}


def is_installed() -> bool:
    """Whether megatron-core and Transformer Engine can be found."""
    return all(importlib.util.find_spec(name) for name in ("megatron", "transformer_engine"))


def megatron_step(row: Megatron, shape: GPTShape, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    """A function that trains one step on this rank's batches and gives their mean loss, 0 where this rank has none.

    All ranks of torch.distributed take part; a process that no launcher started is the only one.
    """
    device, (size, length) = batches[0][0].device, batches[0][0].shape
    join(row, device)
    config = transformer_config(row, shape)
    model = _model(row, config, shape, length)
    positions = torch.arange(length, device=device).expand(size, length)
    if row.cp > 1:
        from megatron.core import parallel_state

        columns = columns_of(length, rank=parallel_state.get_context_parallel_rank(), size=row.cp)
        mine = torch.tensor(columns, device=device)
        positions, batches = positions[:, mine], [(text[:, mine], labels[:, mine]) for text, labels in batches]

    def forward(batch: tuple[Tensor, Tensor], module: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        tokens, labels = batch
        return module(tokens, positions, None, labels=labels), lambda losses: losses.float().mean()

    return stepper(row, config, model, itertools.repeat(batches), forward, size=size, length=length)


def join(row: Megatron, device: torch.device) -> None:
    """Begin torch.distributed, and Megatron's groups."""
    share_cudnn()
    _supply_weight_gradient()
    from megatron.core import parallel_state, tensor_parallel

    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=device, **alone)
    parallel_state.initialize_model_parallel(
        row.tp,
        row.pp,
        row.chunks if row.chunks > 1 else None,
        context_parallel_size=row.cp,
        expert_model_parallel_size=row.ep,
        expert_tensor_parallel_size=row.etp or row.tp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stepper(
    row: Megatron,
    config: Any,
    chunks: list[Any],
    steps: Iterator[list[Any]],
    forward: Callable[[Any, Any], tuple[Any, Callable[[Any], Tensor]]],
    *,
    size: int,
    length: int,
) -> Callable[[], float]:
    """A function that trains the model on the next step's batches and gives their mean loss.

    Args:
        chunks: of the model on this rank. forward: gives the output of a chunk for a batch, and a function that makes
            its mean loss of the output of the last chunk.
        size, length: rows of a microbatch and their tokens.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    overlap = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    optimizer_config = _optimizer_config(OptimizerConfig, row.optimizer, overlap=overlap)
    model = [_reduced(config, chunk, optimizer_config, number) for number, chunk in enumerate(chunks)]
    optimizer = get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    run = get_forward_backward_func()

    def forward_step(iterator: Any, module: Any) -> tuple[Any, Callable[..., Any]]:
        output, mean_loss = forward(next(iterator), module)

        def told(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            mean = mean_loss(output)
            return mean, {"loss": mean.detach().clone()}  # megatron-core divides the mean in place

        return output, told

    def step() -> float:
        batches = next(steps)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [iter(batches) for _ in model]
        found = run(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([microbatch["loss"] for microbatch in found]).mean() if found else 0.0

    return step


def _model(row: Megatron, config: Any, shape: GPTShape, length: int) -> list[Any]:
    """The chunks of the model that this rank has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    rope = {"position_embedding_type": "rope", "rotary_base": int(shape.rope.theta)}
    model = []
    for chunk in range(row.chunks):
        stage = chunk if row.chunks > 1 else None
        model.append(
            GPTModel(
                config,
                get_gpt_layer_with_transformer_engine_spec(
                    num_experts=shape.moe.num_experts if shape.moe else None,
                    moe_grouped_gemm=shape.moe is not None,
                    qk_layernorm=shape.qk_norm is True,
                ),
                shape.padded_vocab_size,
                length,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=shape.tie_embeddings,
                vp_stage=stage,
                **(rope if shape.position == "rope" else {"position_embedding_type": "learned_absolute"}),
            )
        )
    return model


def _reduced(config: Any, chunk: Any, optimizer: Any, number: int) -> Any:
    """A chunk in bf16, ready for its data-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        overlap_grad_reduce=parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1,
        overlap_param_gather=optimizer.overlap_param_gather,
    )
    half = Float16Module(config, chunk.cuda())
    return DistributedDataParallel(config, reduction, half, disable_bucketing=number > 0)


def transformer_config(row: Megatron, shape: GPTShape, *, num_layers: int = 0, on_gpu: bool = True) -> Any:
    """The numbers of a shape; with another number of layers, or in fp32 and unfused for a CPU."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = shape.activation == "swiglu"
    history = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"} if row.fp8 == "delayed" else {}
    return TransformerConfig(
        num_layers=num_layers or shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=bool(shape.bias),
        init_method_std=shape.init_std,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        pipeline_dtype=torch.bfloat16 if on_gpu else torch.float32,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=row.tp,
        sequence_parallel=row.tp > 1,
        pipeline_model_parallel_size=row.pp,
        context_parallel_size=row.cp,
        virtual_pipeline_model_parallel_size=row.chunks if row.chunks > 1 else None,
        overlap_p2p_comm=row.chunks > 1,
        batch_p2p_comm=row.chunks == 1,
        deallocate_pipeline_outputs=True,
        attention_backend=AttnBackend.auto,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=shape.position == "rope",
        persist_layer_norm=on_gpu,
        masked_softmax_fusion=on_gpu,
        gradient_accumulation_fusion=on_gpu,
        cross_entropy_loss_fusion=on_gpu,
        cross_entropy_fusion_impl="te",
        qk_layernorm=shape.qk_norm is True,
        **({"fp8": "hybrid", "fp8_recipe": row.fp8, **history} if row.fp8 else {}),
        **_expert_options(row, shape),
    )


def _expert_options(row: Megatron, shape: GPTShape) -> dict[str, Any]:
    """Experts as Megatron-LM's own examples run them: grouped products, fused permutations, routing in fp32."""
    moe = shape.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_overlap": bool(moe.shared_ffn_hidden_size) and row.dispatcher == "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": moe.balance_factor,
        "moe_token_dispatcher_type": row.dispatcher,
        "expert_model_parallel_size": row.ep,
        "expert_tensor_parallel_size": row.etp or row.tp,
    }


def _optimizer_config(kind: Callable[..., Any], name: str, *, overlap: bool) -> Any:
    return kind(
        optimizer="adam",
        lr=1e-4,
        min_lr=1e-4,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=name != "plain",
        overlap_param_gather=overlap and name != "plain",
        use_precision_aware_optimizer=name == "fused",
    )


def _supply_weight_gradient() -> None:
    """Where apex is missing, provide its product for the head's weight gradient by torch's."""
    name = "fused_weight_gradient_mlp_cuda"
    if importlib.util.find_spec(name):
        return

    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, weight_gradient: Tensor) -> None:
        left, right = gradient.flatten(0, -2).t(), inputs.flatten(0, -2)
        torch.addmm(weight_gradient, left, right, out_dtype=torch.float32, out=weight_gradient)

    module: Any = importlib.util.module_from_spec(ModuleSpec(name, None))
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    sys.modules[name] = module
