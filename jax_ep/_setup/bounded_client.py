"""JAX's distributed client, whose requests end in time and say whom they asked.

`key_value_set` and others wait for as long as the network keeps silent: until JAX
finds the service dead, 100 seconds by default, and ends the process without saying
who is missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

_SERVICE = "JAX's service, which runs in process 0"
# For the last questions, who is missing, when time is over.
_LEAST_S = 0.5


class BoundedClient:
    """A distributed client whose requests end at a time.

    Attributes:
      deadline: when, by time.monotonic(); a request has half a second at least.
    """

    def __init__(self, client: Any, timeout_s: float):
        """Asks nothing yet."""
        self._client = client
        self.deadline = time.monotonic() + timeout_s

    def __getattr__(self, name: str) -> Any:
        """A request of the client; those that block have limits of their own."""
        request = getattr(self._client, name)
        ask = _ask if name.startswith("blocking_") else self._within_time
        return lambda *args: ask(request, *args)

    def _within_time(self, request: Callable[..., Any], *args: Any) -> Any:
        """Raises JaxRuntimeError where no answer comes."""
        answers: list[Any] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(_ask(request, *args))
            except BaseException as error:
                errors.append(error)

        # It may never come back: nobody is to wait for it at the end.
        asking = threading.Thread(target=ask, name="jax_ep request", daemon=True)
        asking.start()
        seconds = max(self.deadline - time.monotonic(), _LEAST_S)
        asking.join(seconds)
        if asking.is_alive():
            reason = f"{_SERVICE}, did not answer within {seconds:.1f} s"
            raise jax.errors.JaxRuntimeError(reason)
        if errors:
            raise errors[0]
        return answers[0]


def _ask(request: Callable[..., Any], *args: Any) -> Any:
    try:
        return request(*args)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise  # what was asked for is not there
        reason = f"{_SERVICE}: {error}"
        raise jax.errors.JaxRuntimeError(reason) from error
