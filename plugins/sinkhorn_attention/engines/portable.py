"""The portable engine: torch's own operations, on any device, in memory that does not depend on the half-steps.

1. Which domain each head is in is known from norms (domains.py): exponentials as they are, or shifted. Off the CPU all
   are shifted.
2. Chunks of heads of one domain run the half-steps on scaling vectors (exponential.py): as many heads as the cache
   holds the maps of, or one head in blocks of rows of a map that is kept, or made again above `RECOMPUTE_BYTES`.
3. Heads whose scalings left the trusted range are computed again in the log domain (log_domain.py): one look at the
   data for each call, for which a program waits off the CPU. Where that cannot be (a CUDA graph that is captured), and
   where maps are made again for each pass off the CPU, the log domain is used throughout.
4. Backward does the same from the scalings that forward has saved.
"""

import torch
from torch import Tensor

from . import domains
from .domains import BOUNDED, LOG_DOMAIN, SHIFTED, bounded_heads, merge_domains, padding_may_stay, runs, trusted_heads
from .exponential import Passes, exponential_forward
from .exponential_backward import exponential_backward
from .heads import Gradients, Heads
from .log_domain import log_domain_backward, log_domain_forward
from .operator import Results, State
from .problem import Problem
from .scratch import hold

#: Bytes of K that a chunk of heads may take on the CPU for each thread: it stays in a core's cache (2 MB where this was
#: measured) between half-steps. At n = 197 half as much costs 8 %, four times as much 10 %.
CHUNK_BYTES = 5 << 18
#: How many times as much a chunk may take in backward, whose many operations on vectors want fewer, larger chunks:
#: 4 % faster than 1 at n = 197 and 512; 4 is no better.
BACKWARD_CHUNKS = 2
#: Likewise on other devices, where a chunk only bounds the scratch memory.
DEVICE_CHUNK_BYTES = 256 << 20
#: Bytes of one map from which on it is passed in blocks of rows.
LARGE_MAP_BYTES = 8 << 20
#: Bytes of one map from which on its blocks are made again for each pass: it would take too much memory.
RECOMPUTE_BYTES = 256 << 20
#: Half-steps from which on blocks are kept at all: for fewer passes, making them again is cheaper than memory.
KEPT_N_ITERS = 3
#: Bytes of one block of rows for each thread, all heads of the chunk together. A block of 4,096 keys then has 256 rows:
#: recomputing with half as many takes 5 to 7 % longer, with a quarter 20 %, and twice as many gain nothing.
BLOCK_BYTES = 2 << 20


def choose_passes(heads: Heads, recompute: bool, times: int = 1) -> Passes:
    """The passes over the maps of a call; chunks are of `times` the usual size."""
    threads, size = torch.get_num_threads(), heads.n * heads.m * heads.dtype.itemsize
    if recompute and heads.scores is None:
        return Passes(threads, block_rows(heads, min(threads, heads.count), heads.dtype), False)
    if domains.is_asynchronous(heads.device):
        return Passes(max(1, DEVICE_CHUNK_BYTES // size), heads.n, True)
    chunk = times * CHUNK_BYTES * threads // size
    # A multiple of the number of threads, so that none waits.
    chunk = chunk // threads * threads if chunk > threads else max(1, chunk)
    if size <= LARGE_MAP_BYTES or heads.scores is not None:
        return Passes(chunk, heads.n, True)
    keep = size <= RECOMPUTE_BYTES and heads.n_iters >= KEPT_N_ITERS
    return Passes(chunk, block_rows(heads, min(chunk, heads.count), heads.dtype), keep)


def block_rows(heads: Heads, count: int, dtype: torch.dtype) -> int:
    """Rows in a block of `count` heads."""
    fitting = torch.get_num_threads() * BLOCK_BYTES // (count * heads.m * dtype.itemsize)
    return min(max(16, fitting), heads.n)


def empty_state(problem: Problem) -> State:
    """What forward saves beside its output: row scalings, column scalings, and the domain of each head.

    Shapes (ceil(T/2), heads, n), (T//2 + 1, heads, m) and (heads,). Of damped steps the inverse column sums that each
    scaling is made of stand between the scalings, because they cannot be had from these where lambda is small.
    """
    like, heads = problem.like, problem.heads
    n_columns = problem.n_iters // 2 + 1 if problem.damping == 1.0 else 2 * (problem.n_iters // 2) + 1
    rows = like.new_empty((problem.n_iters + 1) // 2, heads, problem.n, dtype=problem.dtype)
    columns = like.new_empty(n_columns, heads, problem.m, dtype=problem.dtype)
    domain = SHIFTED if domains.is_asynchronous(like.device) else BOUNDED
    return rows, columns, torch.full((heads,), domain, dtype=torch.uint8, device=like.device)


class Portable:
    """The engine; see the module.

    Args:
        name: of its operator.
        recompute: whether blocks of rows are made again for each pass whatever the size: memory O(n d), up to twice
            the time.
    """

    def __init__(self, name: str, recompute: bool = False) -> None:
        self.name, self.recompute = name, recompute

    def refusal(self, problem: Problem) -> str | None:
        """Takes everything."""
        return None

    def keeps_output(self, problem: Problem) -> bool:
        """Attention's, which gives sums of P * dL/dP; a coupling is not needed again."""
        return problem.scores is None

    def state(self, problem: Problem) -> State:
        """What forward saves beside its output."""
        return empty_state(problem)

    def in_log_domain_throughout(self, device: torch.device) -> bool:
        """Whether all heads are computed in the log domain without a look at the data."""
        return domains.is_captured(device) or (self.recompute and domains.is_asynchronous(device))

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, contiguous and in float32 at least, and the `state`."""
        heads, like = Heads(problem), problem.like
        result = like.new_empty(problem.output_shape, dtype=problem.dtype)
        output = result.view(heads.count, heads.n, -1)  # what is returned is no view: a caller may write into it
        u, v, domain = self.state(problem)
        passes = choose_passes(heads, self.recompute)
        with torch.autocast(like.device.type, enabled=False), hold():
            if self.in_log_domain_throughout(like.device):
                for group, _ in runs([LOG_DOMAIN] * heads.count, passes.heads):
                    output[group] = log_domain_forward(heads, group, heads.dtype, passes.rows)
                # Backward may come when nothing is captured any more, and has to find these heads in the log domain.
                u.zero_(), v.zero_(), domain.fill_(LOG_DOMAIN)
                return result, u, v, domain
            if not domains.is_asynchronous(like.device):
                domain.copy_(~bounded_heads(heads))
                merge_domains(domain, passes.heads)
                _keep_padding(heads, heads.value)
            for group, of_group in self._groups(heads, domain, passes):
                shifted = of_group == SHIFTED
                exponential_forward(heads, group, shifted, (u, v), output, passes)
                if shifted:
                    domain[group].masked_fill_(~trusted_heads(u[:, group], v[:, group]), LOG_DOMAIN)
            self._log_domain_forward(heads, (u, v, domain), output)
        return result, u, v, domain

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """Gradients of query, key, value and bias, or of given scores; see `operator.Engine`."""
        gradients, (u, v, domain) = Gradients(problem, bias_gradient), state
        heads = gradients.heads
        d_output = results[1].reshape(heads.count, heads.n, -1)
        both = results[0].view(heads.count, heads.n, -1) if heads.value is not None else d_output, d_output
        passes = choose_passes(heads, self.recompute, BACKWARD_CHUNKS)
        with torch.autocast(heads.device.type, enabled=False), hold():
            if self.in_log_domain_throughout(heads.device):
                for group, _ in runs([LOG_DOMAIN] * heads.count, passes.heads):
                    log_domain_backward(heads, group, d_output, gradients, heads.dtype, passes.rows)
                return gradients.result()
            if not domains.is_asynchronous(heads.device):
                _keep_padding(heads, heads.value, d_output)
            for group, of_group in self._groups(heads, domain, passes):
                if of_group != LOG_DOMAIN:
                    shifted = of_group == SHIFTED
                    exponential_backward(gradients, group, shifted, (u, v), both, passes)
            self._log_domain_backward(heads, domain, d_output, gradients)
        return gradients.result()

    def _groups(self, heads: Heads, domain: Tensor, passes: Passes) -> list[tuple[slice, int]]:
        """The chunks of heads of one domain."""
        asks = not domains.is_asynchronous(heads.device)
        return runs(domain.tolist() if asks else [SHIFTED] * heads.count, passes.heads)

    def _log_domain_forward(self, heads: Heads, state: State, output: Tensor) -> None:
        """Fills the output (heads, n, d_v or m) of the heads of the log domain."""
        u, v, domain = state
        with torch.autocast(heads.device.type, enabled=False):
            for some in self._log_domain_groups(heads, domain):
                if domains.is_asynchronous(heads.device):  # backward leaves no head out: 0 takes it out of the sums
                    u[:, some], v[:, some] = 0.0, 0.0
                rows = self._log_domain_rows(heads, some)
                output[some] = log_domain_forward(heads, some, domains.log_domain_dtype(heads), rows).to(heads.dtype)

    def _log_domain_backward(self, heads: Heads, domain: Tensor, d_output: Tensor, gradients: Gradients) -> None:
        """Fills the gradients of these heads."""
        with torch.autocast(heads.device.type, enabled=False):
            for some in self._log_domain_groups(heads, domain):
                rows = self._log_domain_rows(heads, some)
                log_domain_backward(heads, some, d_output, gradients, domains.log_domain_dtype(heads), rows)

    def _log_domain_groups(self, heads: Heads, domain: Tensor) -> list[Tensor]:
        """The heads of the log domain, in groups whose float64 scratch stays bounded."""
        found = (domain == LOG_DOMAIN).nonzero().squeeze(1)
        return list(found.split(max(1, CHUNK_BYTES // (heads.n * heads.m * 8)))) if len(found) else []

    def _log_domain_rows(self, heads: Heads, group: Tensor) -> int:
        """Rows of a block of the log domain: all of them, unless a map in float64 is more than an engine may hold."""
        large = heads.n * heads.m * torch.float64.itemsize > LARGE_MAP_BYTES
        return block_rows(heads, len(group), torch.float64) if large and heads.scores is None else heads.n


def _keep_padding(heads: Heads, *factors: Tensor | None) -> None:
    """Leaves what lies in the padding where it is, if it can be left."""
    given = [factor for factor in factors if factor is not None]
    if heads.hides_padding and heads.scores is None and padding_may_stay(heads, *given):
        heads.hides_padding = False
