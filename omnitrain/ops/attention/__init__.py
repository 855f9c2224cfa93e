"""The attention that omnitrain registers with transformers: it keeps packed samples apart, exactly.

Inside ``with packed(cu_seqlens)``, the mask function (``entry``) returns a :class:`MaskSpec` instead of a mask
tensor: the offsets of the samples, and the mask within a sample, read from the model's mask function (``hf_masks``).
Models pass it unchanged to the entry point in each layer, which calls a backend (``choose``, ``backends``). Unpacked
input runs on transformers' own attention, bit for bit (``unpacked``).

The registered name contains ``flash``, so transformers passes ``cu_seq_lens_q`` to towers instead of cutting or masking
by itself.
"""
