"""One measurement in a process of its own: a task as JSON in, its numbers as JSON out."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError
from .cases import Case, attention
from .timing import interleaved, peak_megabytes

PASSES = ("forward", "both")
#: What a variant raises for a problem that it does not take, or that is too large for it.
CANNOT = (NotImplementedError, torch.OutOfMemoryError)


def in_new_process(task: dict[str, Any]) -> dict[str, Any]:
    """Runs `measure(task)` in a new Python process and returns what it found.

    Threads there spin while they wait for one another: PASSIVE costs these many small calls 1.6 times as much on a
    machine that has nothing else to do.

    Raises:
        RunError: if the process fails, with what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-m", "experiments.benchmarks.worker", json.dumps(task)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = run.stdout.strip().splitlines()
    if run.returncode != 0 or not lines:
        raise RunError(f"the benchmark {task} failed:\n{run.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What a task asks for.

    Args:
        task: `kind` "time", with `case` (the fields of a Case), `variants`, `repeats`, `device`, `dtype`, `passes` and
            `threads`; "memory", with the same and one variant; or "libraries" or "steps" with the arguments of those
            modules.

    Returns:
        For "time" {pass: {variant: samples}}, with a string, why not, for a variant that cannot run; for "memory"
        {variant: megabytes}, or why not.
    """
    if "threads" in task:
        torch.set_num_threads(task["threads"])
    if task["kind"] == "libraries":
        from .libraries import time_libraries

        return time_libraries(task["size"], task["counts"], task["repeats"])
    if task["kind"] == "steps":
        from .steps import time_steps

        return time_steps(task["model"], task["variants"], task["repeats"], task["quick"])
    case, device = Case(**task["case"]), task.get("device", "cpu")
    dtype = getattr(torch, task.get("dtype", "float32"))
    if task["kind"] == "memory":
        (variant,) = task["variants"]
        try:
            # Pools of threads and of the allocator exist before: a small problem makes them.
            _pass("both", attention(variant), Case(1, 1, 16, 16, case.width).tokens(device, dtype))()
            return {variant: peak_megabytes(_pass("both", attention(variant), case.tokens(device, dtype)), device)}
        except CANNOT as error:
            return {variant: str(error)}
    tokens = case.tokens(device, dtype)
    result: dict[str, Any] = {}
    for which in task.get("passes", PASSES):
        functions, refused = {}, {}
        for variant in task["variants"]:
            functions[variant] = _pass(which, attention(variant), tokens)
            try:
                functions[variant]()
            except CANNOT as error:
                refused[variant] = str(error)
                del functions[variant]
        result[which] = interleaved(functions, task["repeats"], device) | refused
    return result


def _pass(which: str, function: Any, tokens: list[Tensor]) -> Callable[[], object]:
    """A forward pass without gradients, or forward and backward for all three inputs."""
    if which == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*tokens)

        return forward
    gradient = torch.randn(tokens[0].shape, generator=torch.Generator().manual_seed(1)).to(tokens[0])
    return lambda: torch.autograd.grad(function(*tokens), tokens, gradient)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
