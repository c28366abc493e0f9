"""Primitives, their rules and references, and the kernels of products."""
