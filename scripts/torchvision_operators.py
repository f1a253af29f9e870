"""Makes torchvision importable beside a build of torch for which its compiled part was not made.

PyPI serves a CUDA build of torchvision. Beside a CPU build of torch its compiled part cannot be loaded, and
`import torchvision` fails with "operator torchvision::nms does not exist". Every import of a transformers
model then fails too, because transformers imports torchvision where it is installed. Nothing in this
repository calls a compiled operator, so it is enough to declare the two that torchvision looks up while it is
imported. Calling one of them still raises an error.

scripts/setup.sh copies this file into the site-packages of .venv and adds a .pth file that imports it when
Python starts. For that reason it imports only sys at the top. If the compiled part can be loaded after all,
for instance after a change of torch, the file declares nothing.
"""

import sys


class OperatorsFinder:
    """Finds no module; notices the import of torchvision.extension, which loads the compiled part."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision.extension":
            sys.meta_path.remove(cls)
            cls.library = declare_operators(path[0])  # the declarations live as long as this object


def declare_operators(folder):
    """Declares nms and qnms unless the compiled part in torchvision's folder can be loaded."""
    from pathlib import Path

    import torch

    for compiled in Path(folder).glob("_C.*"):
        try:
            torch.ops.load_library(str(compiled))
            return None
        except OSError:
            pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):  # the program may have declared it itself
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


sys.meta_path.insert(0, OperatorsFinder)
