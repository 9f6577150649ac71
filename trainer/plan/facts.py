"""A plan with everything that follows from it, as JSON types: memory per rank, recomputation, kernels.

`mtrain plan --json` prints this, and a run's plan.json holds it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.config.sections import RunConfig
from trainer.plan.kernel_choice import DEVICES, kernel_choices
from trainer.plan.memory import activation_bytes, activation_bytes_per_stage, rank_bytes, state_bytes
from trainer.plan.plan import Plan


def plan_facts(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """All numbers and choices of a plan.

    Returns:
        The fields of `Plan`, and `state_bytes` and `activation_bytes` per rank, `activation_bytes_per_stage` and
        `bytes_per_pipeline_rank` (state and activations, of each pipeline rank), `bubble` (idle over busy time of a
        step), `recompute` (the section of the configuration) and `kernels`: the choices for "cpu" and "gpu".
    """
    return {
        **dataclasses.asdict(plan),
        "state_bytes": state_bytes(config, plan),
        "activation_bytes": activation_bytes(config, plan),
        "activation_bytes_per_stage": activation_bytes_per_stage(config, plan),
        "bytes_per_pipeline_rank": [rank.total for rank in rank_bytes(config, plan)],
        "bubble": plan.pipeline.timeline(plan.num_microbatches).bubble,
        "recompute": dataclasses.asdict(config.recompute),
        "kernels": {
            device: [
                {**dataclasses.asdict(choice), "others": dict(choice.others)}
                for choice in kernel_choices(config, plan, device=device)
            ]
            for device in DEVICES
        },
    }
