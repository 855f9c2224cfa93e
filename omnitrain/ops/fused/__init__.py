"""Fused norms, rotary embeddings, SwiGLU and patch embeddings."""
