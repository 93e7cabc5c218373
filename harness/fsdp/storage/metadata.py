"""torch's functions that tell something of a tensor without its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _named(names: str) -> Iterator[Any]:
    return (getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name))


METADATA = frozenset(
    [
        *(
            each.__get__
            for each in _named(
                "shape dtype device layout requires_grad grad grad_dtype grad_fn is_leaf ndim itemsize nbytes names"
                " name output_nr retains_grad is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn"
                " is_mps is_xla is_xpu is_nested _version _base _backward_hooks _post_accumulate_grad_hooks"
            )
        ),
        *(each.__set__ for each in _named("requires_grad grad grad_dtype _backward_hooks _post_accumulate_grad_hooks")),
        *_named(
            "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed"
            " is_inference is_same_size __len__ __hash__ requires_grad_ register_hook"
            " register_post_accumulate_grad_hook retain_grad new_empty new_zeros new_ones new_full new_tensor"
        ),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.is_same_size),
        *(torch.autograd.backward, torch.autograd.grad),  # which look at `inputs`, or refuse them, by themselves
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    ]
)
"""What needs no values, nor anything that stands for them."""
