"""The backends that compute attention over a packed sequence, in the order in which ``auto`` tries them."""

from omnitrain.ops.attention.backends.flash import FLASH
from omnitrain.ops.attention.backends.flex import FLEX
from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.backends.sdpa import SDPA
from omnitrain.ops.attention.backends.varlen import VARLEN

BACKENDS = (FLASH, VARLEN, SDPA, FLEX, REFERENCE)
