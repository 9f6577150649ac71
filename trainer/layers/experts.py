"""Experts: feed-forward layers of which a router chooses a few for each token (Shazeer et al. 2017).

The rows of all chosen slots are sorted by expert, so that each expert's are neighbours and one grouped product computes
all of them; nothing waits for the host. An expert's output is multiplied by its weight before the second product, and
a token's outputs are added in the order of its slots, which makes the sum the same in every layout. Saved are the
tokens, not their K copies: backward sorts them again.

A rank has some of the experts, or a part of the hidden features of each, or both; dispatch.py brings it tokens and
sorts their slots.

Shapes: N tokens of this rank, A tokens that it computes, E experts of this rank, K slots of a token, M rows sorted by
expert, D hidden, F features of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.float8 import Float8Rows, float8_rows, float8_rows_grouped_product
from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, MainGradients, Parallel, as_input
from trainer.layers.dispatch import Dispatch, Exchange, Gathering, SortedSlots, gathered_way, sort_slots
from trainer.layers.linear import Float8RowsKernels
from trainer.layers.mlp import MLP, activated, is_swiglu
from trainer.layers.recompute import recomputed
from trainer.layers.router import Router, RouterLosses, RowLayout, score_logits
from trainer.layers.shapes import GATED, MLPShape, MoEShape
from trainer.parallel.collectives import Group, Pending, all_reduce_

Way = Gathering | Exchange


class _Combine(torch.autograd.Function):
    """Forward: the sum of each token's slots. Backward: a token's gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, way: Way, kernels: Kernels) -> Tensor:
        ctx.way, ctx.kernels = way, kernels
        return way.take_back(y_MD, kernels)

    @staticmethod
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Tensor, None, None]:
        slots = ctx.way.slots
        return ctx.kernels.take_rows(ctx.way.bring(dout_ND), slots.token_M, slots.end_E), None, None


class Experts(Layer):
    """This rank's part of all experts: D -> F (or 2F) -> D.

    Args:
        shape: of one expert. num_experts: of all ranks.

    Attributes:
        kept_rows: the weights in FP8 in place of `up` and `down`, see `keep_rows`; empty: there are none.
    """

    def __init__(self, shape: MLPShape, num_experts: int, dispatch: Dispatch, *, kernels: Kernels) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner // dispatch.parts
        num_experts //= dispatch.expert_ranks
        self.shape, self.num_experts, self.dispatch, self.kernels = shape, num_experts, dispatch, kernels
        outputs = inner * (2 if shape.activation in GATED else 1)
        self.up = nn.Parameter(torch.empty(num_experts, outputs, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, inner))
        self.up_bias = nn.Parameter(torch.empty(num_experts, outputs)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, width)) if shape.bias else None
        self.kept_rows: dict[str, Float8Rows] = {}
        self._multiply_rows: Callable[[Tensor, Float8Rows, Tensor], Tensor] = float8_rows_grouped_product

    @torch.no_grad()
    def keep_rows(self, kernels: Float8RowsKernels) -> None:
        """From now on keep the weights in FP8 alone, with a scale for each output; the layer only runs forward.

        Their scales do not depend on the number of ranks.
        """
        self._multiply_rows = kernels.grouped
        for name in ("up", "down"):
            weight_EOI = getattr(self, name)
            largest_EO1 = torch.maximum(weight_EOI.amax(-1, keepdim=True), -weight_EOI.amin(-1, keepdim=True)).float()
            if name == "down":  # its inputs are divided
                largest_EO1 = all_reduce_(largest_EO1, self.dispatch.etp, op="max")
            # One expert at a time: in fp32 there may be no room for all.
            rounded = [float8_rows(*of_expert) for of_expert in zip(weight_EOI, largest_EO1, strict=True)]
            self.kept_rows[name] = Float8Rows(*map(torch.stack, zip(*rounded, strict=True)))
            self.register_parameter(name, None)

    def product(self, name: str, x_MI: Tensor, weight_EOI: Tensor, slots: SortedSlots) -> Tensor:
        """x W^T of each row with the weight of its expert: [M, O]; `weight_EOI`: that of this name, unless in FP8."""
        if name in self.kept_rows:
            return self._multiply_rows(x_MI, self.kept_rows[name], slots.end_E)
        y_MO: Tensor = self.kernels.grouped_product(x_MI, weight_EOI, slots.end_E)
        return y_MO

    def forward(
        self,
        x_ND: Tensor,
        expert_NK: Tensor,
        weight_NK: Tensor,
        *,
        all_computed: bool,
        recompute: bool = False,
        way: Way | None = None,
        brought: Pending | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts: [N, D].

        Args:
            way: of these tokens, if it is known already. brought: tokens that are on their way.
        """
        way = (way or self.way(expert_NK, all_computed=all_computed)).finish()
        up_MF = _Up.apply(x_ND, self.up, self.up_bias, self, way, brought)
        weight_M = way.slots.gather(way.weights(weight_NK))
        z_MF = _Weighted.apply(up_MF, weight_M, self, way.slots)
        again = recomputed(z_MF, lambda: self.weighted(up_MF.detach(), weight_M.detach(), way.slots))
        with again if recompute else nullcontext():
            y_MD = _Down.apply(z_MF, weight_M, self.down, self.down_bias, self, way.slots)
        combined_ND: Tensor = _Combine.apply(y_MD, way, self.kernels)
        return combined_ND

    def way(self, expert_NK: Tensor, *, all_computed: bool, fixed: bool = False) -> Way:
        """The way of tokens to this rank's experts, and of results back; see `Exchange`."""
        dispatch = self.dispatch
        if dispatch.exchanges:
            return Exchange(dispatch, expert_NK, self.num_experts, all_computed=all_computed, fixed=fixed)
        expert_AK = dispatch.gather(expert_NK)
        if dispatch.expert_ranks > 1:
            return gathered_way(dispatch, expert_AK, self.num_experts, fixed=fixed)
        return Gathering(dispatch, sort_slots(expert_AK, self.num_experts, all_computed=all_computed))

    def weighted(self, up_MF: Tensor, weight_M: Tensor, slots: SortedSlots) -> Tensor:
        """The activation [M, F] of the first product's [M, F] or [M, 2F], times each row's weight."""
        if is_swiglu(self.shape):
            z_MF: Tensor = self.kernels.weigh_swiglu(up_MF, weight_M, slots.end_E)
        else:
            z_MF = self.kernels.weigh(activated(up_MF, self.shape, self.kernels), weight_M)
        return z_MF


class _Weighted(torch.autograd.Function):
    """The activation of each row times its weight. Backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, up_MF: Tensor, weight_M: Tensor, layer: Experts, slots: SortedSlots) -> Tensor:
        ctx.save_for_backward(up_MF, weight_M)
        ctx.layer, ctx.slots = layer, slots
        return layer.weighted(up_MF, weight_M, slots)

    @staticmethod
    def backward(ctx: Any, dz_MF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (up_MF, weight_M), layer, kernels = ctx.saved_tensors, ctx.layer, ctx.layer.kernels
        if is_swiglu(layer.shape):
            return *kernels.weigh_swiglu_backward(dz_MF, up_MF, weight_M, ctx.slots.end_E), None, None
        with torch.enable_grad():
            leaf_MF = up_MF.detach().requires_grad_()
            y_MF = activated(leaf_MF, layer.shape, kernels)
        dy_MF, dweight_M = kernels.weigh_backward(dz_MF, y_MF.detach(), weight_M)
        (dup_MF,) = torch.autograd.grad(y_MF, leaf_MF, dy_MF)
        return dup_MF, dweight_M, None, None


class _Up(torch.autograd.Function):
    """Forward: bring tokens, sort, multiply. Backward: multiply, take back."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_EFD: Tensor,
        bias_EF: Tensor | None,
        layer: Experts,
        way: Way,
        brought: Pending | None,
    ) -> Tensor:
        x_AD = way.bring(x_ND) if brought is None else brought.wait()
        ctx.save_for_backward(x_AD if way.keeps else x_ND, weight_EFD)
        ctx.layer, ctx.way, ctx.bias = layer, way, bias_EF is not None
        x_MD = layer.kernels.take_rows(x_AD, way.slots.token_M, way.slots.end_E)
        y_MF = layer.product("up", x_MD, weight_EFD, way.slots)
        return y_MF if bias_EF is None else _add_bias(y_MF, bias_EF, way.slots)

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_EFD = ctx.saved_tensors
        layer, way, slots = ctx.layer, ctx.way, ctx.way.slots
        brought = Pending(x) if way.keeps else way.start_bringing(x)
        dx_MD = layer.kernels.grouped_product(dy_MF, weight_EFD.transpose(1, 2), slots.end_E)
        x_AD = brought.wait()
        dx_ND = way.take_back(dx_MD, layer.kernels)
        x_MD = partial(layer.kernels.take_rows, x_AD, slots.token_M, slots.end_E)
        dweight = _weight_gradient(layer, "up", dy_MF, x_MD, slots)
        dbias = _bias_gradient(layer, "up_bias", dy_MF, None, slots) if ctx.bias else None
        return dx_ND, dweight, dbias, None, None, None


class _Down(torch.autograd.Function):
    """Forward: multiply. Backward: multiply."""

    @staticmethod
    def forward(
        ctx: Any,
        z_MF: Tensor,
        weight_M: Tensor,
        weight_EDF: Tensor,
        bias_ED: Tensor | None,
        layer: Experts,
        slots: SortedSlots,
    ) -> Tensor:
        ctx.save_for_backward(z_MF, weight_M, weight_EDF, bias_ED)
        ctx.layer, ctx.slots = layer, slots
        # The bias is added once, by the first of the ranks whose results are summed.
        ctx.adds_bias = bias_ED is not None and layer.dispatch.part == 0
        y_MD = layer.product("down", z_MF, weight_EDF, slots)
        if bias_ED is not None and ctx.adds_bias:
            y_MD = y_MD + layer.kernels.weigh(_bias_rows(bias_ED, slots), weight_M)
        return y_MD

    @staticmethod
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor | None, ...]:
        z_MF, weight_M, weight_EDF, bias_ED = ctx.saved_tensors
        layer, slots = ctx.layer, ctx.slots
        dz_MF = layer.kernels.grouped_product(dy_MD, weight_EDF.transpose(1, 2), slots.end_E)
        dweight = _weight_gradient(layer, "down", dy_MD, lambda: z_MF, slots)
        dbias = dweight_M = None
        if bias_ED is not None:
            scale_M = weight_M if ctx.adds_bias else torch.zeros_like(weight_M)
            dbias = _bias_gradient(layer, "down_bias", dy_MD, scale_M, slots)
            if ctx.adds_bias:
                dweight_M = (dy_MD.to(weight_M.dtype) * _bias_rows(bias_ED, slots)).sum(1)
        return dz_MF, dweight_M, dweight, dbias, None, None


def _bias_rows(bias_EO: Tensor, slots: SortedSlots) -> Tensor:
    return bias_EO[slots.expert_M.clamp(max=len(bias_EO) - 1)]


def _add_bias(y_MO: Tensor, bias_EO: Tensor, slots: SortedSlots) -> Tensor:
    return y_MO + _bias_rows(bias_EO, slots)


def _weight_gradient(
    layer: Experts, name: str, dy_MO: Tensor, x_MI: Callable[[], Tensor], slots: SortedSlots
) -> Tensor | None:
    """dy^T x of each expert's rows, added to the main gradient, or returned if there is none."""
    main, add_product = layer.main_gradients, layer.kernels.add_grouped_product
    if name not in main.tensors:
        gradient = torch.empty_like(getattr(layer, name))
        add_product(gradient, dy_MO, x_MI=x_MI(), end_E=slots.end_E, overwrite=True)
        return gradient

    def add() -> None:
        target, overwrite = main.tensors[name], main.take_stale(name)
        add_product(target, dy_MO, x_MI=x_MI(), end_E=slots.end_E, overwrite=overwrite)

    if main.later is None:
        add()
    else:
        main.later.append(add)
    return None


def _bias_gradient(
    layer: Experts, name: str, dy_MO: Tensor, scale_M: Tensor | None, slots: SortedSlots
) -> Tensor | None:
    """The sum of dy over each expert's rows, each times its scale, as a product with the rows' experts."""
    bias, main = getattr(layer, name), layer.main_gradients
    dtype = torch.promote_types(dy_MO.dtype, torch.float32)
    number_E1 = torch.arange(len(bias), device=dy_MO.device).unsqueeze(1)
    rows_EM = (number_E1 == slots.expert_M).to(dtype)
    dy_MO = dy_MO.to(dtype)
    if slots.computed_AK is not None:  # other rows have no meaning
        dy_MO = torch.where((slots.expert_M < len(bias)).unsqueeze(1), dy_MO, 0.0)
    gradient = (rows_EM if scale_M is None else rows_EM * scale_M) @ dy_MO
    return _added(main, name, gradient, dtype=bias.dtype)


def _added(main: MainGradients, name: str, gradient: Tensor, *, dtype: torch.dtype) -> Tensor | None:
    target = main.get(name)
    if target is None:
        return gradient.to(dtype)
    target.add_(gradient)
    return None


class SharedGate(Layer):
    """A factor of each token, sigmoid(w x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, x_ND: Tensor) -> Tensor:
        return score_logits(x_ND, as_input(self, "weight")).sigmoid()


class MoE(nn.Module):
    """Experts chosen by a router, and an expert that computes every token, if there is one.

    Args:
        expert: an expert's shape. groups: "etp", "ep" and "experts", if experts are divided over more ranks than tp.
        exchanges, expert_buffer: how tokens reach experts, see `Dispatch`.
    """

    def __init__(
        self,
        shape: MoEShape,
        expert: MLPShape,
        parallel: Parallel,
        *,
        kernels: Kernels,
        groups: Mapping[str, Group] = MappingProxyType({}),
        exchanges: bool = False,
        expert_buffer: float = 0.0,
    ) -> None:
        super().__init__()
        dispatch = Dispatch(parallel, groups, exchanges=exchanges, buffer=expert_buffer)
        self.router = Router(shape, expert.width, parallel, bias=expert.bias)
        self.experts = Experts(expert, shape.num_experts, dispatch, kernels=kernels)
        self.shared = self.shared_gate = None
        if shape.shared_ffn_hidden_size:
            self.shared = MLP(shared_shape(shape, expert), parallel, kernels=kernels)
            self.shared_gate = SharedGate(expert.width) if shape.shared_gate else None

    def forward(self, x_ND: Tensor, rows: RowLayout, *, recompute: bool = False) -> tuple[Tensor, RouterLosses | None]:
        """(what the experts add, the router's losses)."""
        routing = self.router(x_ND, rows)
        way = self.experts.way(routing.expert_NK, all_computed=routing.dropless, fixed=rows.measured)
        brought = None
        if self.shared is not None and not way.waits:
            with torch.no_grad():
                brought = way.finish().start_bringing(x_ND)
        # Before the shared expert, whose gradient is then added first, although it is computed first.
        routed_ND = x_ND.view_as(x_ND)
        shared_ND = None if self.shared is None else self._shared(self.shared, x_ND, recompute=recompute)
        out_ND = self.experts(
            routed_ND,
            routing.expert_NK,
            routing.weight_NK,
            all_computed=routing.dropless,
            recompute=recompute,
            way=way,
            brought=brought,
        )
        return out_ND if shared_ND is None else out_ND + shared_ND, routing.losses

    def _shared(self, shared: MLP, x_ND: Tensor, *, recompute: bool) -> Tensor:
        """What the expert of every token adds, computed while tokens travel, or the host waits for their numbers."""
        shared_ND: Tensor = shared(x_ND, recompute=recompute)
        return shared_ND if self.shared_gate is None else (shared_ND * self.shared_gate(x_ND)).to(x_ND.dtype)


def shared_shape(shape: MoEShape, expert: MLPShape) -> MLPShape:
    """That of the expert that computes every token."""
    return MLPShape(
        width=expert.width,
        inner=shape.shared_ffn_hidden_size,
        activation=expert.activation,
        bias=expert.bias,
        clamp=expert.clamp,
        offset=expert.offset,
    )
