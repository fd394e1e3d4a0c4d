"""Let PyPI's torchvision import beside a CPU-only torch.

PyPI's torchvision is a CUDA build. Beside a CPU build of torch its C++ part does not load, and the
import stops at "operator torchvision::nms does not exist", although SGLang needs none of those
operators to serve text. Declaring the two schemas first is enough. `setup_env.py` copies this file
into the virtual environment it makes, with a .pth file, only when the import fails without it;
delete it once torchvision publishes a CPU build for the torch in use.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclareBeforeImport(importlib.abc.MetaPathFinder):
    """Declares the schemas when somebody first imports torchvision, then steps aside."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            # The library object owns the declarations, so it is kept alive here.
            type(self).library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                self.library.define(schema)
        return None


sys.meta_path.insert(0, _DeclareBeforeImport())
