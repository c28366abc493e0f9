"""Expert parallelism for JAX: dispatch and combine as native collectives."""

from jax_ep.communicator import Communicator
from jax_ep.ops import combine, dispatch
from jax_ep.plan import Plan, make_plan

__version__ = "0.1.0"

__all__ = ["Communicator", "Plan", "combine", "dispatch", "make_plan"]
