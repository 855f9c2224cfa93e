"""The phases of ``gpu_day.py``: each module has ``run(tiny)``, which yields a name and a figure as soon as it has it."""
