"""The attention that omnitrain registers with transformers: it keeps packed samples apart, exactly.

Inside ``with packed(cu_seqlens)``, the mask function (``entry``) returns a :class:`MaskSpec` instead of a mask
tensor: the offsets of the samples, and the mask within a sample, read from the model's mask function (``hf_masks``).
Models pass it unchanged to the entry point in each layer, which calls a backend (``choose``, ``backends``). Unpacked
input runs on transformers' own attention, bit for bit (``unpacked``).

The registered name contains ``flash``, so transformers passes ``cu_seq_lens_q`` to towers instead of cutting or masking
by itself.
"""

from omnitrain.ops.attention.choose import AUTO, AttentionRow, attention_report, backend_names, require_trainable
from omnitrain.ops.attention.entry import Attend, attending_through
from omnitrain.ops.attention.install import ATTENTION_NAME, plain_implementation, use_omnitrain_attention
from omnitrain.ops.attention.packed_context import PackedSequence, SequenceSlice, inside, packed, packed_sequence
from omnitrain.ops.attention.spec import Call, MaskSpec, offsets_on

__all__ = [
    "ATTENTION_NAME",
    "AUTO",
    "Attend",
    "AttentionRow",
    "Call",
    "MaskSpec",
    "PackedSequence",
    "SequenceSlice",
    "attending_through",
    "attention_report",
    "backend_names",
    "inside",
    "offsets_on",
    "packed",
    "packed_sequence",
    "plain_implementation",
    "require_trainable",
    "use_omnitrain_attention",
]
