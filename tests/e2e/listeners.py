"""What the processes of a server listen on, and the table in docs/exposure.md that says so."""

from __future__ import annotations

import errno
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.documents import ROOT, table_below

PAGE = ROOT / "docs/exposure.md"
HEADING = "`make serve`"
FILE = "file"
NOT_ALWAYS_THERE = ("ray::IDLE",)
API_PORT = 8000  # in the page; the server under test has another one


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that accepts connections or messages.

    Attributes:
        process: its name in the table.
        socket: the port, or the path of a Unix socket.
        address: 127.0.0.1, "all", another address, or "file" for a Unix socket.
        pid: of the process.
    """

    process: str
    socket: int | str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table; ``process`` and a path are patterns as in a shell."""

    process: str
    socket: str
    address: str

    def matches(self, listener: Listener) -> bool:
        """Whether it describes the listener."""
        return (
            fnmatchcase(listener.process, self.process)
            and self.address == listener.address
            and (self.is_port_of(listener.socket) if isinstance(listener.socket, int) else self._is_path(listener))
        )

    def is_port_of(self, port: int) -> bool:
        """Whether it describes a port: `8000`, `8265+` for a free one from there on, `20000-31999`, `random`."""
        if self.socket == "random":
            return port >= 1024
        if self.socket.endswith("+"):
            return 0 <= port - int(self.socket[:-1]) < 100
        first, _, last = self.socket.partition("-")
        return first.isdigit() and int(first) <= port <= int(last or first)

    def _is_path(self, listener: Listener) -> bool:
        return fnmatchcase(str(listener.socket), self.socket)


def documented(port: int, host: str, ray_tmpdir: Path) -> list[Entry]:
    """Return the page's table for a server with this port, host and directory of Ray's files."""
    entries = []
    for cells in table_below(PAGE, HEADING):
        process, where, address = (cell.strip("`") for cell in cells[:3])
        where = str(port) if where == str(API_PORT) else where.replace("/tmp/ray/", f"{ray_tmpdir}/ray/")
        entries.append(Entry(process, where, host if address == "host" else address))
    return entries


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """Return what the processes listen on; each socket once, though forked processes may share it."""
    sockets: dict[object, Listener] = {}
    for process in processes:
        try:
            name = process_name(process)
            for conn in process.net_connections("all"):
                if conn.family == socket.AF_UNIX:
                    if conn.laddr:
                        sockets.setdefault((name, conn.laddr), Listener(name, str(conn.laddr), FILE, process.pid))
                elif conn.status == psutil.CONN_LISTEN or (conn.type == socket.SOCK_DGRAM and not conn.raddr):
                    listener = Listener(name, conn.laddr.port, _address(conn.laddr.ip), process.pid)
                    sockets.setdefault((conn.type, conn.family, conn.laddr), listener)
        except psutil.NoSuchProcess:
            continue
    return list(sockets.values())


def process_name(process: psutil.Process) -> str:
    """Return the name of a process in the table: its title, or the name of its program or script."""
    command = process.cmdline()
    if not command:
        return ""
    title = command[0].split(" ")[0]
    if title.startswith("ray::"):
        return title.partition(".")[0]  # a call that is running comes after a point
    if title.startswith("ray-dashboard-"):
        return title.rpartition("-")[0]
    if any("multiprocessing.forkserver" in part for part in command):
        return "forkserver"
    parts = [part for part in command if not part.startswith("-")]
    is_python = Path(parts[0]).name.startswith("python") and len(parts) > 1
    return Path(parts[1] if is_python else parts[0]).name


def taken_ports(ray_dir: Path, entries: Iterable[Entry]) -> set[int]:
    """Return the fixed ports that programs of Ray say they did not get: another cluster on the machine had them.

    Whether it still has them says nothing: these programs only try when they start, and then do without.
    """
    logs = [log.read_text() for log in (ray_dir / "ray").glob("session_2*/logs/*.log")]
    failed = [log for log in logs if f"[Errno {errno.EADDRINUSE}]" in log]
    ports = {int(entry.socket) for entry in entries if entry.socket.isdigit()}
    return {port for port in ports if any(re.search(rf"port #?{port}\b", log) for log in failed)}


def differences(
    present: Sequence[Listener], entries: Sequence[Entry], taken: Collection[int] = frozenset()
) -> list[str]:
    """Return what is present but undocumented, or documented but absent. An entry is one socket of a process.

    Args:
        present: what the server listens on.
        entries: what is documented.
        taken: fixed ports that the server may lack.
    """
    per_process = Counter(entries)
    number: Counter[tuple[Entry, int]] = Counter()
    wrong = []
    for listener in present:
        if entry := next((entry for entry in per_process if entry.matches(listener)), None):
            number[entry, listener.pid] += 1
        else:
            wrong.append(f"undocumented: {listener}")
    names = {listener.pid: listener.process for listener in present}
    for entry, expected in per_process.items():
        may_lack = entry.socket.isdigit() and int(entry.socket) in taken
        pids = [pid for pid, name in names.items() if fnmatchcase(name, entry.process)]
        if not pids and entry.process not in NOT_ALWAYS_THERE and not may_lack:
            wrong.append(f"documented, but absent: {entry}")
        for pid in pids:
            if number[entry, pid] != expected and (number[entry, pid] or not may_lack):
                wrong.append(f"{number[entry, pid]} sockets instead of {expected} of process {pid}: {entry}")
    return wrong


def _address(text: str) -> str:
    address = ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    return "all" if address.is_unspecified else str(address)
