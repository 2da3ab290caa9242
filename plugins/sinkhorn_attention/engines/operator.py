"""How an engine becomes an operator: one that autograd, torch.compile, torch.export and ONNX know.

An engine is a forward and a backward function of one `Problem`. Both are registered as `torch.library` custom operators
with fake kernels, so that models compile without graph breaks. Calling such an operator costs about 0.1 ms, more than
attention on a small map: where nothing is being traced, the same two functions run as a `torch.autograd.Function`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._decomp import register_decomposition
from torch.autograd import forward_ad

from ..reference import attention_by, sinkhorn_reference
from .problem import NUMBERS, TENSORS, Problem

#: What an engine saves beside its output, three tensors of its own choice.
State = tuple[Tensor, Tensor, Tensor]
#: Gradients of query, key, value and bias, or of given scores and three times nothing; nothing is an empty tensor.
Results = tuple[Tensor, Tensor, Tensor, Tensor]

SCORES, BIAS = TENSORS.index("scores"), TENSORS.index("attn_bias")
_TYPES = {bool: "bool", int: "int", float: "float"}


class Engine(Protocol):
    """A way of computing. Results are contiguous and in float32 at least, gradients in the dtype of their inputs.

    Neither function may leave a derivative to autograd: inside a compiled or exported operator there is none.
    """

    name: str

    def refusal(self, problem: Problem) -> str | None:
        """What the engine needs and this problem has not, for an error message; None if it takes it."""

    def keeps_output(self, problem: Problem) -> bool:
        """Whether backward needs the output, and no given scores; otherwise it gets these and an empty output."""

    def state(self, problem: Problem) -> State:
        """An uninitialised state, for fake kernels."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output and the state."""

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """The gradients, from (output, dL/d output)."""


class Operator:
    """An engine as an operator, `torch.ops.sinkhorn_attention.<name>`.

    Args:
        engine: the engine.
        definition: the same result of a problem from torch's own operations: what ONNX gets, which has no operator of
            ours.
        instead: what has the second derivatives that the engine has not, for the error.
    """

    def __init__(
        self,
        engine: Engine,
        definition: Callable[[Problem], Tensor] | None = None,
        instead: str = "backend='reference'",
    ) -> None:
        self.engine, self.definition, self.instead = engine, definition or define, instead
        tensors = ", ".join(f"Tensor? {name}" for name in TENSORS)
        numbers = ", ".join(f"{_TYPES[type(getattr(Problem(), name))]} {name}" for name in NUMBERS)
        given = "Tensor output, Tensor output_gradient, Tensor rows, Tensor columns, Tensor domain"
        four = "(Tensor, Tensor, Tensor, Tensor)"
        custom_op, name = torch.library.custom_op, f"sinkhorn_attention::{engine.name}"
        self.forward = custom_op(name, self._forward, mutates_args=(), schema=f"({tensors}, {numbers}) -> {four}")
        self.backward = custom_op(
            f"{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({given}, {tensors}, {numbers}, bool bias_gradient) -> {four}",
        )
        self.forward.register_fake(self._fake)
        self.backward.register_fake(self._backward_fake)
        self.forward.register_autograd(
            lambda ctx, *arriving: self._differentiate(ctx, arriving[0], self.backward), setup_context=self._save
        )
        self.backward.register_autograd(self._refuse_double_backward)
        # Of a program exported before: torch.onnx.export asks this table for what it does not know.
        register_decomposition(getattr(torch.ops.sinkhorn_attention, engine.name).default)(self._decompose)
        self.function = self._make_function()

    def __call__(self, problem: Problem) -> Tensor:
        """The result of a problem, in float32 at least.

        Raises:
            NotImplementedError: for what the engine refuses, under torch.func transforms and for dual tensors.
        """
        needs = self.engine.refusal(problem)
        if needs is not None:
            raise NotImplementedError(f"backend={self.engine.name!r} needs {needs}; use backend='auto'")
        tensors = problem.tensors()
        refuse_transforms(*tensors, instead=self.instead)
        if is_eager(*tensors):
            return self.function.apply(*tensors, *problem.numbers())
        if torch.onnx.is_in_onnx_export():
            return self.definition(problem)
        return self.forward(*tensors, *problem.numbers())[0]

    def _forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.engine.forward(problem_of(arguments))

    def _backward(self, *arguments: Any) -> Results:
        output, output_gradient, *state = arguments[:5]
        rows, columns, domain = state
        problem, bias_gradient = problem_of(arguments[5:-1]), arguments[-1]
        return self.engine.backward(problem, (output, output_gradient), (rows, columns, domain), bias_gradient)

    def _fake(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem = problem_of(arguments)
        return problem.like.new_empty(problem.output_shape, dtype=problem.dtype), *self.engine.state(problem)

    def _backward_fake(self, *arguments: Any) -> Results:
        problem, bias_gradient = problem_of(arguments[5:-1]), arguments[-1]
        wanted = [problem.query, problem.key, problem.value, problem.attn_bias if bias_gradient else None]
        if problem.scores is not None:
            wanted = [problem.scores, None, None, None]
        first, second, third, fourth = (
            problem.like.new_empty(0)
            if tensor is None
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in wanted
        )
        return first, second, third, fourth

    def _decompose(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem = problem_of(arguments)
        return self.definition(problem), *self.engine.state(problem)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, keeps_output = list(inputs[: len(TENSORS)]), self.engine.keeps_output(problem_of(inputs))
        if keeps_output and tensors[SCORES] is not None:  # of the scores, their shape and dtype are enough then
            tensors[SCORES] = tensors[SCORES].new_empty(()).expand(tensors[SCORES].shape)
        ctx.save_for_backward(output[0] if keeps_output else output[1].new_empty(0), *output[1:], *tensors)
        ctx.numbers = inputs[len(TENSORS) :]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, output_gradient: Tensor | None, backward: Callable) -> tuple[Any, ...]:
        refuse_transforms(output_gradient, instead=self.instead)
        none = (None,) * (len(TENSORS) + len(NUMBERS))
        if output_gradient is None:
            return none
        output, *state_and_tensors = ctx.saved_tensors  # once: gradient checkpointing hands them out once
        needs_bias = ctx.needs_input_grad[BIAS]
        gradients = backward(output, output_gradient, *state_and_tensors, *ctx.numbers, needs_bias)
        of_tokens = gradients[:3] if state_and_tensors[3] is not None else (None, None, None)
        of_scores = gradients[0] if state_and_tensors[3] is None else None
        found = (*of_tokens, of_scores, gradients[3] if needs_bias else None)
        return *found, *none[len(found) :]

    def _refuse_double_backward(self, ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(
            "this engine of attention has a hand-written backward that cannot be differentiated again; "
            f"use {self.instead} for second derivatives"
        )

    def _make_function(self) -> type[torch.autograd.Function]:
        operator = self

        class EngineBackward(torch.autograd.Function):
            # A function of its own, of the saved tensors: its node has edges to whatever the call depends on, so that
            # every way to a second derivative comes to it.

            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                return operator._backward(*arguments)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> None:
                operator._refuse_double_backward(ctx, *gradients)

        class EngineForward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Tensor:
                output = operator._forward(*inputs)
                operator._save(ctx, inputs, output)
                return output[0]

            @staticmethod
            def backward(ctx: Any, output_gradient: Tensor | None) -> tuple[Any, ...]:
                return operator._differentiate(ctx, output_gradient, EngineBackward.apply)

        return EngineForward


def define(problem: Problem) -> Tensor:
    """The result of an undamped problem by the definition, in the precision and with the dropout of the engines."""
    gradient, masks = "detached" if problem.detached else "unrolled", (problem.query_mask, problem.key_mask)

    def normalise(scores: Tensor) -> Tensor:
        return sinkhorn_reference(scores, problem.n_iters, *masks, gradient)

    if problem.scores is None:
        return attend_by(normalise, problem)
    with without_autocast(problem.scores):
        return normalise(problem.scores.to(problem.dtype))


def attend_by(normalise: Callable[[Tensor], Tensor], problem: Problem) -> Tensor:
    """Attention by torch's own operations, in float32 at least, whatever makes the map (..., n, m) of the scores."""
    given = problem.in_dtype(problem.dtype)
    assert given.query is not None and given.key is not None and given.value is not None  # noqa: PT018
    tokens, masks = (given.query, given.key, given.value), (given.query_mask, given.key_mask)
    with without_autocast(given.query):
        return attention_by(normalise, *tokens, given.scale, given.attn_bias, *masks, given.dropout_factor(given.dtype))


def problem_of(arguments: tuple[Any, ...]) -> Problem:
    """The problem of an operator's arguments: tensors, then numbers."""
    return Problem(**dict(zip((*TENSORS, *NUMBERS), arguments, strict=True)))


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain ones with data and nothing is tracing, so that code may look at what they hold."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(tensor is None or (type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta) for tensor in tensors)


def refuse_transforms(*tensors: Tensor | None, instead: str) -> None:
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


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Context in which products keep the dtype of their factors; autocast does not exist on the meta device."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
