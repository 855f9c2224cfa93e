import numpy as np
class PositionFunction:
    @classmethod
    def of(cls, model): return cls()
    def __call__(self, ids, token_inputs, media): return np.arange(len(ids))
