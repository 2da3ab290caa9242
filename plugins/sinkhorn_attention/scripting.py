"""Makes the operator callable from torch.jit.script.

TorchScript compiles no function that has keyword-only arguments. The two public functions are therefore also operators,
`torch.ops.sinkhorn_attention.{sinkhorn,attention}`, whose body is the Python function itself, so that a scripted model
runs the same code with the same checks; the frontend is told to call the operator where it meets the function.
"""

import torch
from torch.jit import _builtins

from .functional import sinkhorn, sinkhorn_attention

_LIBRARY = torch.library.Library("sinkhorn_attention", "FRAGMENT")
_MASKS = "Tensor? query_mask=None, Tensor? key_mask=None"
_LIBRARY.define(f"sinkhorn(Tensor scores, int n_iters=5, *, {_MASKS}) -> Tensor")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, int n_iters=5, *, float? scale=None, Tensor? attn_bias=None, "
    f"{_MASKS}, float dropout_p=0.0, str gradient='unrolled', str backend='auto') -> Tensor"
)
for _function, _name in ((sinkhorn, "sinkhorn"), (sinkhorn_attention, "attention")):
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
    _builtins._register_builtin(_function, f"sinkhorn_attention::{_name}")
