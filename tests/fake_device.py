"""A GPU that is not there: the loops at published dimensions on fake tensors, which have shapes and a device
but no numbers. It counts what a step would launch.

Importing this module registers a device for the whole process, so it needs a process of its own:

    python -m tests.fake_device --families anole,emu3 --methods ar,self-draft

prints the launches per step of each family and method.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import adt_tree.batch
import adt_tree.tree
from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Lantern, Method
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval import random_model
from models import footprint
from models.registry import SPECS, spec_of

_setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu:0")
LAYERS = 2  # of the decoders here: a pass is one replay whatever its depth
FAMILIES = tuple(name for name, spec in SPECS.items() if spec.published and spec.pixels)
aten = torch.ops.aten

# Operators that CUDA runs by one kernel of its own: not to be taken apart.
WHOLE = {
    aten.scaled_dot_product_attention.default, aten.rms_norm.default, aten.linear.default,
    aten.layer_norm.default, aten.one_hot.default,
}  # fmt: skip
# Kernels of an operator; of all others 1.
KERNELS = {
    "masked_fill": 2, "scatter": 2, "sort": 3, "topk": 3, "scatter_reduce": 3, "eye": 2,
    "constant_pad_nd": 2, "one_hot": 2, "scatter_add": 2,
}  # fmt: skip
# Operators that ask for memory or look at some, though they are not views by name.
NO_KERNEL = {"detach", "alias", "lift_fresh", "reshape", "device", "_unsafe_view", "scalar_tensor"}
READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}


class Launches(TorchDispatchMode):
    """Counts the kernels and copies that reach the device outside recordings, and each replay as one."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = Counter[str]()  # launches by operator
        self.recordings = 0
        self._silent = False

    @property
    def total(self) -> int:
        """Launches so far."""
        return self.operators.total()

    def note(self, name: str, kernels: int = 1) -> None:
        """Counts launches, unless they are silent."""
        if not self._silent:
            self.operators[name] += kernels

    @contextmanager
    def silent(self) -> Iterator[None]:
        """What runs inside is not launched, or was counted already."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in READS:
            self.note("read")
            return args[0].dtype.is_floating_point and 0.0
        if func not in WHOLE and func.namespace == "aten":
            with self:  # an operator made of others is taken apart
                parts = func.decompose(*args, **given)
            if parts is not NotImplemented:
                return parts
        answer, name = func(*args, **given), func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in NO_KERNEL):
            self.note(name, KERNELS.get(name, 1))
        return answer


class FakeRecorder:
    """Takes the place of models.graphs.CudaRecorder: a recording runs the function once on fake tensors, a
    replay runs nothing and is one launch."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def warm_up(self) -> nullcontext[None]:
        """The first run of a function is launched operator by operator."""
        return nullcontext()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it once, uncounted."""
        self._launches.recordings += 1
        with self._launches.silent():
            run()
        return lambda: self._launches.note("replay")


class Stubs(TorchFunctionMode):
    """Makes torch.tensor(numbers, device=...) a fake tensor of zeros, and counts its copy."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and given.get("device") is not None:
            self._launches.note("copy from ordinary memory")
            with self._launches.silent():
                kind = given.get("dtype") or torch.tensor(args[0]).dtype
                return torch.zeros(shape_of(args[0]), dtype=kind, device=given["device"])
        return func(*args, **given)


def shape_of(values: object) -> tuple[int, ...]:
    """Shape of nested lists."""
    if not isinstance(values, list | tuple):
        return ()
    return (len(values), *(shape_of(values[0]) if values else ()))


class Script:
    """What the device would have told the host: the steps of an image accept 1, 2, 3, 0, 1, ... drafts, or as
    many as a tree has levels, so that adaptive trees grow and shrink."""

    def __init__(self) -> None:
        self.steps, self.shapes = 0, list[TreeShape]()

    def table(self, rows: int, columns: int) -> list[list[float]]:
        """The table that BatchSlots.advance reads."""
        self.steps += 1
        told = []
        for row in range(rows):
            accepted = min(self.steps % 4, self.shapes[row].depth, (columns - 2) // 2 - 1)
            told.append([accepted + 1.0, 1.0] + [0.0] * (columns - 2))
        return told


@contextmanager
def fake_gpu() -> Iterator[Launches]:
    """Everything inside runs on fake tensors."""
    launches, script, copied = Launches(), Script(), adt_tree.tree.to_device

    def to_device(values: Any, device: torch.device) -> Tensor:
        launches.note("copy to the device")
        with launches.silent():
            return torch.zeros(shape_of(values), dtype=torch.int64, device=device)

    def tolist(own: Tensor) -> list[list[float]]:
        launches.note("copy to the host")
        return script.table(*own.shape)

    advance = adt_tree.batch.BatchSlots.advance

    def watched(slots: Any, *given: Any) -> Any:
        script.shapes = next(x for x in given if isinstance(x, list) and isinstance(x[0], TreeShape))
        outcome = advance(slots, *given)
        if outcome.finished:  # the next image is made as this one was
            script.steps = 0
        return outcome

    with ExitStack() as stack:
        for module in [m for m in sys.modules.values() if getattr(m, "to_device", None) is copied]:
            stack.enter_context(patch.object(module, "to_device", to_device))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist, create=True))
        stack.enter_context(patch.object(adt_tree.batch.BatchSlots, "advance", watched))
        stack.enter_context(patch.object(random_model, "_filled", unfilled))
        stack.enter_context(patch("models.model.CudaRecorder", lambda device: FakeRecorder(launches)))
        for mode in (FakeTensorMode(), launches, Stubs(launches)):
            stack.enter_context(mode)
        yield launches


def unfilled(make: Callable[[], Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A network without numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def model_of(family: str, slots: int, graphs: bool) -> tuple[Any, int]:
    """A model of published dimensions but for its layers, and the length of its longest prompt."""
    with patch.object(
        footprint, "spec_of", lambda name: replace(spec_of(name), codec=None)
    ):  # codes are enough
        use = footprint.published_use(family, "bf16", slots)
    decoder = replace(use.decoder, num_layers=LAYERS)
    # Janus and Emu3 have no published drafter: one layer of the target, as training makes it.
    drafter = use.drafter or replace(decoder, num_layers=1, head_width=0)
    side = use.side // use.vq.patch_size
    use = replace(use, decoder=decoder, drafter=drafter)
    model = random_model.random_model(family, use, Grid(side, side), torch.bfloat16, GPU)
    return replace(model, graphs=graphs), use.prompt


def engine_of(
    family: str, method: Method, slots: int = 1, graphs: bool = True
) -> tuple[Engine, list[Request]]:
    """An engine for `slots` images at a time, and twice as many requests."""
    model, prompt = model_of(family, slots, graphs)
    requests = [Request(str(n), model.encode(str(prompt)), 1 + n) for n in range(2 * slots)]
    return build(model, method, slots, prompt), requests


def methods(family: str) -> Iterator[Method]:
    """Every method but the rivals, exact, with LANTERN and with rejection where it has them."""
    spec = SPECS[family]
    sampling = Sampling(1.0, 2000 if spec.top_k is None else spec.top_k, 1.0, spec.guidance)
    for name, row in METHODS.items():
        if row.proposer == "rivals":
            continue
        exact = Method(name, sampling, spec.default_tree(name))
        yield exact
        if row.lantern:
            yield replace(exact, lantern=Lantern())
        if "rejection" in row.verify:
            yield replace(exact, verify="rejection")
            yield replace(exact, verify="rejection", lantern=Lantern())


def label(method: Method) -> str:
    """The method's name, with LANTERN and rejection where it has them."""
    return method.label + (" rejection" if method.verify == "rejection" else "")


@dataclass(frozen=True, slots=True)
class Count:
    """What a method was seen to launch."""

    launches: int  # of the greatest step once everything is recorded
    graphs: int  # recordings
    operators: dict[str, int]  # the launches of that step


def count(family: str, method: Method) -> Count:
    """Makes two whole images one after the other. The steps of the second one are counted, but for those that
    record, for the first, which prefills, and for the last, which empties a slot."""
    with fake_gpu() as launches:
        engine, requests = engine_of(family, method)
        greatest, done = Counter[str](), launches.operators.copy()
        finished, first, graphs = 0, True, 0
        for step in engine.steps(requests):
            launched, new = launches.operators - done, launches.recordings - graphs
            done, graphs = launches.operators.copy(), launches.recordings
            if finished and not (first or new or step.finished) and launched.total() > greatest.total():
                greatest = launched
            first = bool(step.finished)
            finished += first
    return Count(greatest.total(), graphs, dict(greatest))


def main() -> None:
    """Prints a line per family and method: launches of a step, and recordings of two images."""
    parser = argparse.ArgumentParser(description="Launches per step, counted on a device that is not there.")
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--methods", help="as printed, divided by commas; default: all but the rivals")
    parser.add_argument("--operators", action="store_true", help="also say which operators launch")
    options = parser.parse_args()
    print(f"{'family':12} {'method':34} {'launches':>8} {'graphs':>6}")
    for family in options.families.split(","):
        for method in methods(family):
            if options.methods is None or label(method) in options.methods.split(","):
                found = count(family, method)
                print(f"{family:12} {label(method):34} {found.launches:8} {found.graphs:6}", flush=True)
                if options.operators:
                    print("   ", ", ".join(f"{n} {name}" for name, n in found.operators.items()))


if __name__ == "__main__":
    main()
