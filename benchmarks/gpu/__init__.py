"""The phases of ``gpu_day.py``: each module has ``run(tiny, folder)``, which yields figures as it finds them."""
