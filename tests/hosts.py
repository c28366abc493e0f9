"""Hosts that are network namespaces of this machine, joined by one cable.

Each has a name of its own, a loopback interface and one end of a veth pair; nothing in
them can reach anything else, nor can anything reach them. The root user may make them.
A namespace is held by a process, and goes with it and what was started in it.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Sequence

_TOOLS = ("ip", "nsenter", "unshare")
NAMES = ("red", "blue")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def why_not() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces as hosts need the root user"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; they are in iproute2 and util-linux"
    done = subprocess.run(
        [
            *("unshare", "--net", "--uts", "--mount"),
            *("ip", "link", "add", "here", "type", "veth", "peer", "name", "there"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"this user may not make network namespaces: {done.stderr.strip()}"
    return None


class TwoHosts:
    """Two hosts and the cable between them, until `close`.

    Attributes:
      network: what delay and loss the cable has, in words.
    """

    def __init__(self, folder: pathlib.Path):
        """`folder` is for the files of the hosts."""
        # Gloo looks for its host's name.
        names = folder / "hosts"
        lines = [f"{a} {n}" for a, n in zip(ADDRESSES, NAMES)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._holders: list[subprocess.Popen] = []
        try:
            for name in NAMES:
                set_up = (
                    f"hostname {name} && mount --bind {names} /etc/hosts && "
                    "ip link set lo up && echo up && exec sleep infinity"
                )
                holder = subprocess.Popen(
                    ["unshare", "--net", "--uts", "--mount", "sh", "-c", set_up],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._holders.append(holder)
                assert holder.stdout is not None
                assert holder.stdout.readline() == "up\n", f"host {name} did not start"
            self._lay_cable()
            self.network = self._disturb()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def command(self, host: int, command: Sequence[object]) -> list[str]:
        """`command` as it has to be written to run on a host."""
        where = ["--target", str(self._holders[host].pid), "--net", "--uts", "--mount"]
        # nsenter goes to the root directory with --mount.
        return ["nsenter", *where, f"--wd={os.getcwd()}", *map(str, command)]

    def cut(self) -> None:
        """Cuts the cable: what is sent is lost, without an answer."""
        for host in range(2):
            self._run(host, "ip", "link", "set", "cable", "down")

    def processes(self) -> list[int]:
        """Processes on the hosts, but for the ones that hold them."""
        holders = {holder.pid for holder in self._holders}
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in holders}
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                there = os.readlink(folder / "ns" / "net") in spaces
            except OSError:
                continue
            if there and int(folder.name) not in holders:
                found.append(int(folder.name))
        return found

    def sockets(self) -> str:
        """Sockets that somebody on the hosts holds, as the kernel lists them."""
        lines = []
        for host in range(2):
            for table in ("tcp", "tcp6"):
                _, *rows = self._run(host, "cat", f"/proc/net/{table}").splitlines()
                # The kernel goes on closing what is nobody's any more.
                held = (row for row in rows if row.split()[3] in ("01", "0A"))
                lines += [f"{table} {row}" for row in held]
            _, *rows = self._run(host, "cat", "/proc/net/unix").splitlines()
            lines += [f"unix {row}" for row in rows]
        return "\n".join(lines)

    def close(self) -> None:
        """Ends what runs there, and with it the hosts."""
        for process in self.processes() if len(self._holders) == 2 else []:
            os.kill(process, signal.SIGKILL)
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def _run(self, host: int, *command: str) -> str:
        done = subprocess.run(
            self.command(host, command), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _lay_cable(self) -> None:
        there = str(self._holders[1].pid)
        pair = ("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable")
        self._run(0, *pair, "netns", there)
        for host, address in enumerate(ADDRESSES):
            self._run(host, "ip", "addr", "add", f"{address}/24", "dev", "cable")
            self._run(host, "ip", "link", "set", "cable", "up")

    def _disturb(self) -> str:
        """2 ms and one packet in a hundred lost, each way, where the kernel can."""
        if shutil.which("tc") is None:
            return "no delay, no loss: tc not found"
        for host in range(2):
            rule = "qdisc add dev cable root netem delay 2ms loss 1%".split()
            done = subprocess.run(
                self.command(host, ["tc", *rule]),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return f"no delay, no loss: {done.stderr.strip()}"
        return "2 ms and a loss of 1 %, each way"
