"""Limits of the native code, for checks while JAX traces.

Each is named as in cc/: MAX_TOP_K is kMaxTopK. They stand here once more because
backend "xla" and lowering for another machine need no native module; a test compares.
"""

MAX_RANKS = 96  # of one group that reaches each other's memory
MAX_RANKS_OF_WORD = 64  # of a low-latency buffer
MAX_TOP_K = 32
MAX_LEAVES = 16  # that one launch carries
MAX_LOCAL_EXPERTS = 2048
MAX_COUNTED_EXPERTS = 4096  # of all ranks, by low-latency dispatch by expert
MAX_IN_FLIGHT = 8  # chunks of an operation between nodes
