"""Operations, their rules and references, and the kernels of products."""

# Every operation has its primitive from here on.
from jax_ep._operations import table  # noqa: F401
