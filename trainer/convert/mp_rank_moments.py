"""Moments in Megatron-LM's classic checkpoints: an optimizer's state that has numbers for its parameters, and no names.

Parameters are numbered group by group, and within a group in the order in which the modules registered them, which is
that of the model's tensors in the same file. A group is of what decays (matrices) or of what does not (vectors). Where
the groups, their sizes and every shape agree with that, numbers have names; else nothing is read and the reason is
reported. A distributed optimizer keeps its moments in a file of its own, which is not read. Where ranks share experts
there are two optimizers in a list, and the second one has the experts. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mdata.errors import counted
from trainer.convert.torch_file import StoredTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert")  # tensors of a model that no optimizer has
_MAIN = "fp32_from_fp16_params"


class NamedMoments(NamedTuple):
    """The state of one rank's optimizer.

    Args:
        states: "exp_avg", "exp_avg_sq", and "weight" where it has main weights -> name -> tensor.
        lacking: why the state could not be read; "": it was read, or there is none.
    """

    states: Mapping[str, Mapping[str, StoredTensor]]
    lacking: str = ""


def named_moments(optimizer: Any, parameters: Mapping[str, StoredTensor]) -> NamedMoments:
    """Give an optimizer's state the names of its parameters.

    Args:
        optimizer: its entry in the checkpoint. parameters: of the same rank, in the order of the model.
    """
    if not optimizer:
        return NamedMoments({})
    parameters = {name: tensor for name, tensor in parameters.items() if not name.endswith(_BUFFERS)}
    experts = {name: tensor for name, tensor in parameters.items() if ".mlp.experts." in name}
    if isinstance(optimizer, list) and len(optimizer) == 2 and experts:
        others = {name: tensor for name, tensor in parameters.items() if name not in experts}
        return _joined(named_moments(optimizer[0], others), _of_one(optimizer[1], experts))
    return _of_one(optimizer, parameters)


def _joined(first: NamedMoments, second: NamedMoments) -> NamedMoments:
    """Those of two optimizers."""
    if lacking := first.lacking or second.lacking:
        return NamedMoments({}, lacking)
    if first.states.keys() != second.states.keys():
        return NamedMoments({}, "that of experts has not what that of the other parameters has")
    return NamedMoments({kind: {**tensors, **second.states[kind]} for kind, tensors in first.states.items()})


def _of_one(optimizer: Any, parameters: Mapping[str, StoredTensor]) -> NamedMoments:
    """Those of one optimizer."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict) or not isinstance(groups := inner.get("param_groups"), list):
        return NamedMoments({}, "it is not that of one Adam")
    if not isinstance(state := inner.get("state"), dict) or not state:
        return NamedMoments({}, "a distributed optimizer keeps it elsewhere")
    mains = optimizer.get(_MAIN) or [[]] * len(groups)
    if not _are_groups(groups, mains):
        return NamedMoments({}, "its param_groups do not list parameters")
    moments: dict[str, dict[str, StoredTensor]] = {name: {} for name in (*MOMENTS, *(["weight"] if any(mains) else []))}
    for group, main in zip(groups, mains, strict=True):
        decays = bool(group.get("wd_mult", group.get("weight_decay")))
        names = [name for name, tensor in parameters.items() if _decays(name, tensor) == decays]
        numbers = group.get("params", [])
        if len(numbers) != len(names) or ("weight" in moments and len(main) != len(names)):
            return NamedMoments(
                {}, f"a group has {counted(len(numbers), 'parameter')}, and the model has {len(names)} of its kind"
            )
        for place, (number, name) in enumerate(zip(numbers, names, strict=True)):
            own = state.get(number)
            entry = {
                **(own if isinstance(own, dict) else {}),
                **({"weight": main[place]} if "weight" in moments else {}),
            }
            for kind, tensors in moments.items():
                tensor = entry.get(kind)
                if not isinstance(tensor, StoredTensor) or tensor.shape != parameters[name].shape:
                    return NamedMoments({}, f"{kind} of parameter {number} has not the shape of {name}")
                tensors[name] = tensor
    if any(tensors.keys() != parameters.keys() for tensors in moments.values()):
        return NamedMoments({}, "parameters of the model are in none of its groups")
    return NamedMoments(moments)


def _are_groups(groups: list[Any], mains: Any) -> bool:
    """Whether each group has numbers of parameters, and there is a list of main weights for each."""
    return (
        isinstance(mains, list)
        and len(mains) == len(groups)
        and all(isinstance(main, list) for main in mains)
        and all(isinstance(group, dict) for group in groups)
        and all(isinstance(group.get("params", []), list) for group in groups)
        and all(type(number) is int for group in groups for number in group.get("params", []))
    )


def _decays(name: str, tensor: StoredTensor) -> bool:
    return len(tensor.shape) > 1 and not name.endswith(".bias")
