"""HF models as files and classes: load, config copies, hub kernels, weights that nothing reads."""
