"""HF models: load files, find classes, copy configs, hub kernels, weights that no module uses."""
