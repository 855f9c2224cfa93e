from pathlib import Path

import pytest

EVERY_KIND_OF_KEY = """\
# One of every kind of key
model:
  foundation:
    config:
      model_type: qwen3
      hidden_size: 32
      num_hidden_layers: 2
      num_attention_heads: 2
      tie_word_embeddings: true
      rope_parameters: {rope_type: default, rope_theta: 1e4}
      bos_token_id: 1
      eos_token_id: 2
  tokenizer: some/folder
  encoders:
    image_encoder:
      tower:
        config: {model_type: siglip_vision_model, hidden_size: 32, patch_size: 4}
      projector: {kind: pixel_shuffle, factor: 2}
      processor: {size: {height: 8, width: 8}, do_normalize: false}
    film_encoder:
      tower:
        config:
          model_type: llava
          text_config: {vocab_size: 300}
          vision_config: {model_type: siglip_vision_model, hidden_size: 32}
  decoders:
    image_decoder:
      tokenizer: some/tokenizer
      image_size: 8
data:
  train:
    - {path: train.parquet, columns: {images: pictures}}
  heldout:
    - {path: heldout.parquet}
train:
  steps: 10
  optimizer: {learning_rate: 1e-3, betas: [0.9, 0.99]}
evaluation:
  sampling:
    text: {temperature: 0.5}
    image_decoder: {temperature: 1.0, top_k: 4}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "every_kind.yaml"
    file.write_text(EVERY_KIND_OF_KEY)
    return file
