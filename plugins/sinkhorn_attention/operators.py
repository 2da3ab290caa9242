"""How an engine becomes an operator: one that autograd, torch.compile, export and TorchScript know.

An engine is a forward and a backward function on plain tensors. Each is registered as a `torch.library` custom operator
with a fake kernel and the backward, so that models compile without graph breaks. Calling such an operator costs about
0.1 ms, more than attention on a small map: where nothing is being traced, the same two functions run as a
`torch.autograd.Function`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import register_decomposition
from torch.autograd import forward_ad

from .problem import dropout_factor

#: Makes what an engine saves beside its output, from (like, heads, n, m, the first of its settings): three tensors.
State = Callable[[Tensor, int, int, int, Any], tuple[Tensor, Tensor, Tensor]]

#: What an engine of half-steps is told beside the tensors.
HALF_STEPS = "int n_iters, float scale, bool detached"
_MASKS = "Tensor? attn_bias, Tensor? query_mask, Tensor? key_mask, Tensor? dropout_keep, float dropout_p"
_TOKENS = "Tensor query, Tensor key, Tensor value"
_STATE = "Tensor rows, Tensor columns, Tensor mode"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain ones with data and nothing is tracing, so that code may look at what they hold."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(tensor is None or (type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta) for tensor in tensors)


def refuse_double_backward(ctx: Any, *gradients: Tensor, instead: str = "backend='reference'") -> None:
    """Second derivatives would be those of a hand-written backward."""
    raise NotImplementedError(
        "this engine of attention has a hand-written backward that cannot be differentiated again; "
        f"use {instead} for second derivatives"
    )


def refuse_transforms(*tensors: Tensor | None, instead: str = "sinkhorn_attention(..., backend='reference')") -> None:
    """Refuses torch.func transforms and forward-mode derivatives, which a hand-written backward cannot serve.

    A dual tensor would otherwise lose its tangent without a word. `instead` says what has them.
    """
    if torch.compiler.is_compiling():
        return
    transformed = torch._C._are_functorch_transforms_active() or any(
        # autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) batch what arrives at a backward
        tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor)
        for tensor in tensors
    )
    dual = forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
    if transformed or dual:
        raise NotImplementedError(
            "this engine of attention does not work under torch.func transforms or forward-mode "
            f"derivatives (grad, vmap, jvp, ...); use {instead} there"
        )


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Scores and scalings are kept in float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Context in which products keep the dtype of their factors; autocast does not exist on the meta device."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


class _Operator:
    """A forward and a backward function, registered as custom operators and as an autograd function.

    Subclasses say what autograd keeps (`save`) and how its backward calls the engine's (`differentiate`). `instead`
    says in the error what has the second derivatives that the engine has not. `definition`, of forward's arguments,
    is the same result from torch's own operations: what ONNX gets, which has no operator of ours.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        backward: Callable,
        schema: str,
        backward_schema: str,
        fakes: list[Callable],
        definition: Callable[..., Tensor],
        instead: str = "backend='reference'",
    ) -> None:
        custom_op = torch.library.custom_op
        self.refuse = partial(refuse_double_backward, instead=instead)
        name = f"sinkhorn_attention::{name}"
        self.forward = custom_op(name, forward, mutates_args=(), schema=schema)
        self.backward = custom_op(f"{name}_backward", backward, mutates_args=(), schema=backward_schema)
        self.forward.register_fake(fakes[0])
        self.backward.register_fake(fakes[1])

        def backward_of_operator(ctx: Any, output_gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
            refuse_transforms(output_gradient, instead=instead)
            return self.differentiate(ctx, output_gradient, self.backward)

        self.forward.register_autograd(backward_of_operator, setup_context=self.save)
        self.backward.register_autograd(self.refuse)
        self.definition = definition

        def decompose(*arguments: Any) -> tuple[Tensor, ...]:
            # Of a program exported before: torch.onnx.export asks this table for what it does not know.
            return definition(*arguments), *fakes[0](*arguments)[1:]

        register_decomposition(getattr(torch.ops.sinkhorn_attention, self.forward._name).default)(decompose)
        self.function = self._make_function(forward, backward, instead)

    def __call__(self, *arguments: Any) -> Tensor:
        """The first result of forward; arguments as forward's."""
        if is_eager(*(argument for argument in arguments if isinstance(argument, Tensor))):
            return self.function.apply(*arguments)
        if torch.onnx.is_in_onnx_export():
            return self.definition(*arguments)
        return self.forward(*arguments)[0]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        raise NotImplementedError

    def differentiate(self, ctx: Any, output_gradient: Tensor | None, backward: Callable) -> tuple[Any, ...]:
        raise NotImplementedError

    def _make_function(self, forward: Callable, backward: Callable, instead: str) -> type[torch.autograd.Function]:
        save, differentiate, refuse = self.save, self.differentiate, self.refuse

        class EngineBackward(torch.autograd.Function):
            # A function of its own, of the saved tensors: its node has edges to whatever the call depends on, so that
            # every way to a second derivative comes to it.

            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                return backward(*arguments)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> None:
                refuse(ctx, *gradients)

        class Engine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Tensor:
                output = forward(*inputs)
                save(ctx, inputs, output)
                return output[0]

            @staticmethod
            def backward(ctx: Any, output_gradient: Tensor | None) -> tuple[Any, ...]:
                refuse_transforms(output_gradient, instead=instead)
                return differentiate(ctx, output_gradient, EngineBackward.apply)

        return Engine


class AttentionOperator(_Operator):
    """An attention engine as an operator.

    Args:
        name: of the engine; the operators are `sinkhorn_attention::{name}_attention` and `..._backward`.
        forward: (query, key, value, *settings, attn_bias, query_mask, key_mask, dropout_keep, dropout_p) -> output,
            contiguous and in float32 at least, and the state (rows, columns, mode).
        backward: (output_gradient, output, query, key, value, *state, *settings, ..., bias_gradient) -> contiguous
            gradients of query, key, value, and of attn_bias, in its shape and dtype, if asked for, otherwise an empty
            tensor.
        state: makes an uninitialised state.
        definition: (query, key, value, *settings, attn_bias, query_mask, key_mask, dropout_mask) -> output, from
            torch's own operations.
        settings: the engine's numbers, as a schema has them.
        instead: what has second derivatives.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        backward: Callable,
        state: State,
        definition: Callable[..., Tensor],
        settings: str = HALF_STEPS,
        instead: str = "backend='reference'",
    ) -> None:
        self.bias_index = 3 + settings.count(",") + 1  # of attn_bias in forward's arguments

        def fake(query, key, value, *options):  # type: ignore[no-untyped-def]
            heads, n, m = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
            output = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=compute_dtype(query))
            return output, *state(query, heads, n, m, options[0])

        def backward_fake(output_gradient, output, query, key, value, *arguments):  # type: ignore[no-untyped-def]
            attn_bias, bias_gradient = arguments[self.bias_index], arguments[-1]
            d_bias = attn_bias if bias_gradient and attn_bias is not None else output.new_empty(0)
            return tuple(_contiguous_like(tensor) for tensor in (query, key, value, d_bias))

        def define(query, key, value, *options):  # type: ignore[no-untyped-def]
            *settings_and_bias, query_mask, key_mask, dropout_keep, dropout_p = options
            dtype = compute_dtype(query)
            dropout_mask = None if dropout_keep is None else dropout_factor(dropout_keep, dropout_p, dtype)
            if settings_and_bias[-1] is not None:
                settings_and_bias[-1] = settings_and_bias[-1].to(dtype)
            tokens = query.to(dtype), key.to(dtype), value.to(dtype)
            with without_autocast(query):
                return definition(*tokens, *settings_and_bias, query_mask, key_mask, dropout_mask)

        options = f"{settings}, {_MASKS}"
        given = f"Tensor output_gradient, Tensor output, {_TOKENS}, {_STATE}, {options}, bool bias_gradient"
        schemas = f"({_TOKENS}, {options}) -> {_FOUR}", f"({given}) -> {_FOUR}"
        super().__init__(f"{name}_attention", forward, backward, *schemas, [fake, backward_fake], define, instead)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tokens, masks = inputs[:3], inputs[self.bias_index : -1]
        ctx.save_for_backward(output[0], *tokens, *output[1:], *masks)
        ctx.settings = inputs[3 : self.bias_index]
        ctx.dropout_p = inputs[-1]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, output_gradient: Tensor | None, backward: Callable) -> tuple[Any, ...]:
        of_settings, of_masks = (None,) * (self.bias_index - 3), (None,) * 4
        if output_gradient is None:
            return (*(None,) * 3, *of_settings, None, *of_masks)
        saved = ctx.saved_tensors  # once: gradient checkpointing hands them out once
        tensors, masks = saved[:7], saved[7:]
        needs_bias = ctx.needs_input_grad[self.bias_index]
        gradients = backward(output_gradient, *tensors, *ctx.settings, *masks, ctx.dropout_p, needs_bias)
        return *gradients[:3], *of_settings, gradients[3] if needs_bias else None, *of_masks


class CouplingOperator(_Operator):
    """The coupling of given scores as an operator.

    Args:
        name: of the engine; the operators are `sinkhorn_attention::{name}_coupling` and `..._backward`.
        forward: (scores, n_iters, query_mask, key_mask) -> coupling, contiguous and in float32 at least, and the state.
        backward: (coupling_gradient, scores, *state, n_iters, query_mask, key_mask) -> gradient of the scores.
        state: makes an uninitialised state.
        definition: of forward's arguments, from torch's own operations.
    """

    def __init__(
        self, name: str, forward: Callable, backward: Callable, state: State, definition: Callable[..., Tensor]
    ) -> None:
        def fake(scores, n_iters, query_mask, key_mask):  # type: ignore[no-untyped-def]
            n, m, heads = scores.shape[-2], scores.shape[-1], math.prod(scores.shape[:-2])
            coupling = scores.new_empty(scores.shape, dtype=compute_dtype(scores))
            return coupling, *state(scores, heads, n, m, n_iters)

        def backward_fake(coupling_gradient, scores, *_):  # type: ignore[no-untyped-def]
            return _contiguous_like(scores)

        options = "int n_iters, Tensor? query_mask, Tensor? key_mask"
        backward_schema = f"(Tensor coupling_gradient, Tensor scores, {_STATE}, {options}) -> Tensor"
        schemas = f"(Tensor scores, {options}) -> {_FOUR}", backward_schema
        super().__init__(f"{name}_coupling", forward, backward, *schemas, [fake, backward_fake], definition)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, ctx.n_iters, query_mask, key_mask = inputs
        ctx.save_for_backward(scores, *output[1:], query_mask, key_mask)
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, output_gradient: Tensor | None, backward: Callable) -> tuple[Any, ...]:
        if output_gradient is None:
            return (None,) * 4
        *tensors, query_mask, key_mask = ctx.saved_tensors
        return backward(output_gradient, *tensors, ctx.n_iters, query_mask, key_mask), None, None, None


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
