"""A server with one part replaced, to show that the tests would notice.

Run in place of ``-m sglang.launch_server``. Scheduler processes are spawned and import the main
script again, so that what stands at the top level here happens in them too.

KVQUANT_VARIANT=identity   the packed cache keeps keys and values as they are
KVQUANT_VARIANT=online     R_V is applied to v and undone on the output, as for packed weights
KVQUANT_VARIANT=permuted   the same, and queries get the rotation with its columns rolled by one
"""

import os

import torch

from sglang_kvquant.rotation import rotate_heads
from sglang_kvquant.serving import compat, torch_attention
from sglang_kvquant.serving.torch_attention import DenseKV, TorchOps

_rows: dict[int, torch.Tensor] = {}  # address of a layer's k_codes -> [2, slots, heads, head_dim]


def _keep(layers, quantizer, places):
    for layer in layers:
        num_pages, num_kv_heads, page_size, _ = layer.packed.k_codes.shape
        shape = (2, num_pages * page_size, num_kv_heads, layer.k_rot.shape[-1])
        empty = torch.full(shape, torch.nan)
        rows = _rows.setdefault(layer.packed.k_codes.data_ptr(), empty)
        rows[0, places.page], rows[1, places.page] = layer.k_rot, layer.v_rot


class ExactKV(DenseKV):
    @classmethod
    def gather(cls, packed, rows):
        num_kv_heads, page_size = packed.k_codes.shape[1], packed.page_size
        rows = rows.view(num_kv_heads, -1)
        head = torch.arange(num_kv_heads).unsqueeze(1)
        assert torch.equal(rows // page_size % num_kv_heads, head.expand_as(rows))
        slot = rows // (page_size * num_kv_heads) * page_size + rows % page_size
        k, v = _rows[packed.k_codes.data_ptr()][:, slot, head]  # [num_kv_heads, length, head_dim]
        return cls(k, v)


def _rotate_wrongly(self, q, transform):
    return rotate_heads(q.float(), transform.k_rotation.roll(1, dims=-1))


variant = os.environ["KVQUANT_VARIANT"]
if variant == "online":
    compat.is_unquantized = lambda linear: False
else:
    torch_attention._write_packed = _keep
    torch_attention.CodedKV = ExactKV
if variant == "permuted":
    TorchOps.rotate_query = _rotate_wrongly

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
