"""Logs, on the CPU, the operations for which the host would wait for a CUDA device: reads of values, shapes
that depend on values, and copies from pageable memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.tape import Operators

READS = {
    "tolist", "item", "numpy", "cpu", "cuda", "__bool__", "__int__", "__float__", "__index__", "__contains__"
}  # fmt: skip
# The shape of their results, or a branch in their host code, depends on values.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "repeat_interleave.Tensor", "multinomial", "bincount", "histc", "randperm",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_"}
SUBSCRIPTS = {"__getitem__", "__setitem__"}


class Reads(TorchFunctionMode):
    """Logs, in order, the operations that would wait. `log` may be cleared at any time.

    This mode sees the calls of torch functions. Among these, torch.tensor() and a subscript with a list copy
    from pageable memory. It also enters the mode Operators, which sees the kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._operators = Operators(self._note)

    def __enter__(self) -> Self:
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], answer: Any) -> None:
        name, overload = func.overloadpacket.__name__, func._overloadname
        if name in WAITING or f"{name}.{overload}" in WAITING:
            self.log.append(name)
        elif name in INDEXING and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]):
            self.log.append(f"{name} by a mask")

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        before = len(self.log)
        answer = func(*args, **options)
        if name in READS:
            del self.log[before:]  # the operations inside this call belong to the same wait
            self.log.append(name)
        elif name in ("tensor", "as_tensor") and options.get("device") not in (None, "cpu"):
            self.log.append(f"{name} from pageable memory")
        elif name == "to" and any(
            isinstance(x, torch.device | str) for x in (*args[1:], options.get("device"))
        ):
            if not options.get("non_blocking"):
                self.log.append("to, waiting")
        elif name in SUBSCRIPTS:
            parts = args[1] if isinstance(args[1], tuple) else args[1:2]
            if any(isinstance(part, list) for part in parts):
                self.log.append(f"{name} by a list")
            # CUDA fills a slice with a number, but copies the number to a tensor without dimensions.
            if name == "__setitem__" and not isinstance(args[2], Tensor) and args[0][args[1]].dim() == 0:
                self.log.append("a number from pageable memory")
        return answer
