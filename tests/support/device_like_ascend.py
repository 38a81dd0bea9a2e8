"""A device that has only what Ascend's has: it runs on the CPU and writes down what it would have refused.

    with AscendLike() as device: ...       # a dispatch mode
    device.refused                         # {(operation, dtype): times}
    device.slow                            # what falls to the slow units

What Atlas A2 and A3 have, and where that is written (read on the pages named; no device was asked):

* **float64, complex**: accepted by aclnn's element-wise operations and sums (aclnnReduceSum, CANN 8.3.RC1,
  hiascend.com/document/detail/zh/canncommercial/83RC1/API/aolapi/context/aclnnReduceSum.md), but not by the AI cores:
  their list for a sum of tensors is int32, int64, float16, bfloat16, float32, all else goes to the AI CPU
  (AICORE910B_AND_AICORE91093_DTYPE_SUPPORT_LIST in gitcode.com/cann/ops-math, math/add_n/op_api/add_n.cpp). HCCL
  refuses float64 before Ascend 950, and complex everywhere (gitcode.com/cann/hccl,
  docs/zh/api_ref/comm_op_interface/HcclAllReduce.md; torch_npu: gitcode.com/Ascend/pytorch/pull/44705). Refused here.
* **uint16, uint32, uint64, float8**: in none of those lists but the newest ones. Refused here.
* **int64**: computed, also by AI cores; HCCL's all-reduce of it is slower on A2 (the same page). Counted here as slow.
* **int8, int16, int32, float16, bfloat16, float32**: sum, max and min in HCCL (the same page).

Copies to the host may change the dtype there: only what is computed on the device counts. So host tensors are told
apart from the device's by who made them: what came out of ``.cpu()`` cannot be told on a CPU, and tests call what runs
on the device only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = frozenset(
    {
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
ARITHMETIC = frozenset({"add", "add_", "mul", "mul_", "sum", "index_add", "index_add_", "cumsum", "bitwise_and"})
"""Operations on int64 that may leave the AI cores."""


class AscendLike(TorchDispatchMode):
    """See the module docstring.

    Attributes:
        refused: operations on dtypes that the device lacks, counted.
        slow: arithmetic in int64, counted.
        ran: every operation, so that a test can see that something ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.slow: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ran[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {}, result)) if isinstance(leaf, Tensor)]
        for dtype in {tensor.dtype for tensor in tensors}:
            if dtype in REFUSED:
                self.refused[name, str(dtype)] += 1
        if any(tensor.is_sparse for tensor in tensors):
            self.refused[name, "sparse"] += 1
        if name in ARITHMETIC and isinstance(result, Tensor) and result.dtype == torch.int64:  # an index may be one
            self.slow[name] += 1
        return result
