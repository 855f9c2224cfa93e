"""The attention that omnitrain registers with transformers: packed samples stay apart, exactly.

Inside ``with packed(borders)``, the mask function (``entry``) returns a :class:`MaskSpec` in place of a mask tensor:
borders, and who sees whom within a segment, read from the mask function of the model (``mask_functions``). Models hand
it unchanged to the entry point, layer by layer, which has a backend compute it (``choose``, ``backends``). Unpacked
input is transformers' own attention, bit for bit (``plain``).

The registered name contains ``flash``: transformers then hands ``cu_seq_lens_q`` to towers instead of cutting or
masking by itself.
"""

from omnitrain.ops.attention.choose import AUTO, AttentionRow, attention_report, backend_names, require_trainable
from omnitrain.ops.attention.install import ATTENTION_NAME, plain_implementation, use_omnitrain_attention
from omnitrain.ops.attention.packed_context import PackedRow, RowPart, inside, packed, packed_row
from omnitrain.ops.attention.spec import MaskSpec, borders_on

__all__ = [
    "ATTENTION_NAME",
    "AUTO",
    "AttentionRow",
    "MaskSpec",
    "PackedRow",
    "RowPart",
    "attention_report",
    "backend_names",
    "borders_on",
    "inside",
    "packed",
    "packed_row",
    "plain_implementation",
    "require_trainable",
    "use_omnitrain_attention",
]
