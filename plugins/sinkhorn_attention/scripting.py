"""Makes the operator callable from torch.jit.script.

TorchScript compiles no function that has keyword-only arguments, and none that looks at what it was given as the checks
do. The two public functions, and those of the normalizers with an engine of their own, are therefore also operators,
`torch.ops.sinkhorn_attention.{sinkhorn,attention,damped,sigmoid}`, whose body is the Python function itself, so that a
scripted model runs the same code with the same checks; the frontend is told to call the operator where it meets the
function.
"""

import torch
from torch.jit import _builtins

from .damped import damped_attention
from .elementwise import sigmoid_attention
from .functional import sinkhorn, sinkhorn_attention

_LIBRARY = torch.library.Library("sinkhorn_attention", "FRAGMENT")
_MASKS = "Tensor? query_mask=None, Tensor? key_mask=None"
_LIBRARY.define(f"sinkhorn(Tensor scores, int n_iters=5, *, {_MASKS}) -> Tensor")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, int n_iters=5, *, float? scale=None, Tensor? attn_bias=None, "
    f"{_MASKS}, float dropout_p=0.0, str gradient='unrolled', str backend='auto') -> Tensor"
)
_TOKENS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "float? scale, Tensor? attn_bias, Tensor? query_mask, Tensor? key_mask, float dropout_p"
_LIBRARY.define(f"damped({_TOKENS}, int n_iters, float damping, {_OPTIONS}) -> Tensor")
_LIBRARY.define(f"sigmoid({_TOKENS}, float? bias, {_OPTIONS}) -> Tensor")
for _function, _name in (
    (sinkhorn, "sinkhorn"),
    (sinkhorn_attention, "attention"),
    (damped_attention, "damped"),
    (sigmoid_attention, "sigmoid"),
):
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
    _builtins._register_builtin(_function, f"sinkhorn_attention::{_name}")
