"""JAX's coordination service made of Python, for threads that stand for processes."""

import collections
import contextlib
import threading

import jax


class Service:
    """The key-value store that all clients share.

    Attributes:
      values: what stands in it.
    """

    def __init__(self):
        self.values = {}
        self._lock = threading.Lock()
        self._written = collections.defaultdict(threading.Event)

    def set(self, key, value):
        with self._lock:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key}")
            self.values[key] = value
            self._written[key].set()

    def get(self, key, timeout_ms):
        with self._lock:
            written = self._written[key]
        if not written.wait(timeout_ms / 1000):
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: key {key}")
        with self._lock:
            return self.values[key]

    def directory(self, prefix):
        with self._lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def delete(self, key):
        with self._lock:
            for one in [k for k in self.values if f"{k}/".startswith(f"{key}/")]:
                del self.values[one]
                del self._written[one]


class Client:
    """One process's DistributedRuntimeClient, real or of a `Service`, and a count.

    Attributes:
      requests: how often each method was called.
    """

    def __init__(self, service=None, *, real=None):
        service = service or Service()
        self.requests = collections.Counter()
        self._methods = {
            "key_value_set": service.set,
            "blocking_key_value_get": service.get,
            "key_value_dir_get": lambda key: service.directory(f"{key}/"),
            "key_value_delete": service.delete,
        }
        if real is not None:
            self._methods = {name: getattr(real, name) for name in self._methods}

    def __getattr__(self, name):
        if name not in self._methods:
            raise AttributeError(name)

        def call(*arguments):
            self.requests[name] += 1
            return self._methods[name](*arguments)

        return call


@contextlib.contextmanager
def real_clients(number):
    """So many clients of a real service that this process runs."""
    from jax._src.lib import _jax
    from launch import free_port

    address = f"localhost:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, number)
    clients = [
        _jax.get_distributed_runtime_client(
            address, node, shutdown_on_destruction=False, use_compression=True
        )
        for node in range(number)
    ]

    def at_once(method):
        threads = [threading.Thread(target=getattr(c, method)) for c in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    at_once("connect")
    try:
        yield clients
    finally:
        at_once("shutdown")
        clients.clear()
        service.shutdown()
