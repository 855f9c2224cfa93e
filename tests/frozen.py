"""Imported last by the process that forks ranks: no rank looks for garbage in what it has imported.

Nor does a rank import what the tiny model is made of.
"""

import gc

from PIL import Image
from transformers.models.janus import modeling_janus  # noqa: F401
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401
from transformers.models.siglip import modeling_siglip  # noqa: F401
from transformers.models.whisper import feature_extraction_whisper, modeling_whisper  # noqa: F401

Image.init()  # its formats
gc.collect()
gc.freeze()
