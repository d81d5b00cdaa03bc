"""The machine: processor, compiler, memory, shared memory, files, clock, ports and proxies."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.request import getproxies_environment

from deployments.cli.doctor.finding import Finding, State
from kernels.cgroup import available_cpus, available_memory, machine_cpus
from kernels.cpu.tiles import tiles_granted

__all__ = [
    "check_clock",
    "check_compiler",
    "check_cpu",
    "check_files",
    "check_memory",
    "check_ports",
    "check_proxies",
    "check_shared_memory",
]

GIB = 2**30
CPUINFO = Path("/proc/cpuinfo")
SHARED_MEMORY = Path("/dev/shm")
MIN_MEMORY = 4 * GIB  # Ray, an ingress and two engines of the demo take about 3
MIN_SHARED_MEMORY = GIB // 2
MIN_DISK = GIB
MIN_OPEN_FILES = 8192 + 1024  # limits.max_connections, and what the processes have open themselves
DASHBOARD = 8265
FEATURES = ("avx512_bf16", "amx_bf16", "avx512_vnni", "amx_int8")  # instructions with which C kernels are faster
PROGRAM = "#include <pthread.h>\n#include <stdint.h>\n#include <math.h>\nint main(void) { return 0; }\n"
_UNSYNCHRONISED = 5  # what adjtimex(2) returns for TIME_ERROR


def check_cpu() -> Iterable[Finding]:
    """Check how many CPUs there are, and with which instructions the C kernels compute."""
    usable, all_of_them = available_cpus(), machine_cpus()
    less = "" if usable == all_of_them else f" of {all_of_them}, as affinity or the cgroup's quota says"
    yield Finding("CPUs", State.OK, f"{usable}{less}")
    flags = _cpu_flags()
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding("instructions", State.OK, f"{platform.machine()}: {'NEON' if 'asimd' in flags else 'plain C'}")
    elif {"avx2", "fma"} <= flags:
        width = "AVX-512" if "avx512f" in flags else "AVX2"
        yield Finding("instructions", State.OK, ", ".join([width, *(name for name in FEATURES if name in flags)]))
        if "amx_tile" in flags and not tiles_granted():
            remedy = "use Linux 5.16 or later, and let the sandbox allow arch_prctl"
            yield Finding("instructions", State.WARNING, "the system refuses AMX, which would be faster", remedy)
    else:
        remedy = "use a processor of 2013 or later, or let the virtual machine show its CPU model (host-passthrough)"
        yield Finding("instructions", State.WARNING, "neither AVX2 nor FMA: engines on the CPU are slow", remedy)


def _cpu_flags() -> set[str]:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())


def check_compiler() -> Iterable[Finding]:
    """Check that the C kernels can be compiled: that a program with their headers and flags compiles."""
    from kernels.cpu.build import BuildError, cache_directory, compiler

    remedy = "install gcc and the C library's headers (Debian: apt install gcc libc6-dev), or set CC"
    try:
        command = compiler()
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "test.c"
            source.write_text(PROGRAM, encoding="utf-8")
            arguments = ["-std=gnu11", "-march=native", "-pthread", str(source), "-o", f"{directory}/test", "-lm"]
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise BuildError(f"{command[0]} fails: {lines[0]}")
        built = len(list(cache_directory().glob("cpu-kernels-*.so")))
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding("compiler", State.WARNING, f"{error}; torch computes on the CPU, which is slower", remedy)
        return
    kernels = "the C kernels are compiled" if built else "the first start compiles the C kernels, in some 30 seconds"
    yield Finding("compiler", State.OK, f"{' '.join(command)}; {kernels}")


def check_memory() -> Iterable[Finding]:
    """Check the memory that processes may still take, on the machine and within the limits of the cgroups."""
    limit = available_memory()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = min(_meminfo("MemAvailable", machine), limit)
    text = f"{available / GIB:.1f} GiB available, the machine has {machine / GIB:.1f}"
    if limit < machine:
        text += f", the cgroup leaves {limit / GIB:.1f}"
    if available < MIN_MEMORY:
        remedy = "end other programs, raise the container's limit, or lower replicas.num_engine_replicas"
        yield Finding("memory", State.WARNING, f"{text}: little beside the 3 GiB of a demo server", remedy)
    else:
        yield Finding("memory", State.OK, text)


def _meminfo(name: str, default: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return default
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), default)


def check_shared_memory() -> Iterable[Finding]:
    """Check /dev/shm, where Ray keeps its object store."""
    if not SHARED_MEMORY.is_dir():
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {SHARED_MEMORY}"
    if usage.free < MIN_SHARED_MEMORY:
        remedy = "give the container more: docker run --shm-size=1g; in Kubernetes an emptyDir with medium: Memory"
        yield Finding("shared memory", State.WARNING, f"{text}; Ray's object store will be on a disk", remedy)
    else:
        yield Finding("shared memory", State.OK, text)


def check_files() -> Iterable[Finding]:
    """Check the directories that a server writes, and the limit of open files."""
    from deployments.launcher.files import FOLDER

    if not os.access(FOLDER, os.W_OK | os.X_OK):
        yield Finding("files", State.ERROR, f"{FOLDER} cannot be written", "sockets need it: chmod 1777 /tmp")
    elif (free := shutil.disk_usage(FOLDER).free) < MIN_DISK:
        yield Finding("files", State.WARNING, f"{free / GIB:.2f} GiB are left in {FOLDER}", "delete what is not needed")
    else:
        yield Finding("files", State.OK, f"{FOLDER} can be written, {free / GIB:.1f} GiB free")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < MIN_OPEN_FILES:  # HAProxy raises the soft limit itself
        remedy = f"ulimit -Hn {2 * MIN_OPEN_FILES} as root, docker run --ulimit nofile=..., or lower max_connections"
        yield Finding("open files", State.WARNING, f"at most {hard} for 8192 connections", remedy)
    else:
        yield Finding("open files", State.OK, f"{soft}, and up to {hard if hard >= 0 else 'any number'} on request")


def check_clock() -> Iterable[Finding]:
    """Check that the clock is not before Pagoda's own files, and whether the kernel says that it is synchronised."""
    newest = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < newest - 24 * 3600:
        yield Finding("clock", State.ERROR, f"{now} is before Pagoda was installed", "set the clock")
    elif _is_unsynchronised():
        remedy = "on a cluster run chrony or systemd-timesyncd: logs, traces and metrics of its nodes are compared"
        yield Finding("clock", State.NOTE, f"{now}; the kernel does not know it to be synchronised", remedy)
    else:
        yield Finding("clock", State.OK, now)


def _is_unsynchronised() -> bool:
    if sys.platform != "linux":
        return False
    timex = ctypes.create_string_buffer(512)  # of zeros: modes = 0 only reads
    return bool(ctypes.CDLL(None, use_errno=True).adjtimex(timex) == _UNSYNCHRONISED)


def check_ports(port: int) -> Iterable[Finding]:
    """Check the server's port, and that of Ray's dashboard."""
    if _is_taken(port):
        remedy = f"end the process that listens there (ss -ltnp 'sport = :{port}'), or set http_options.port"
        yield Finding("ports", State.ERROR, f"{port} is taken", remedy)
    else:
        yield Finding("ports", State.OK, f"{port} is free")
    if _is_taken(DASHBOARD):
        yield Finding(
            "ports",
            State.NOTE,
            f"{DASHBOARD} is taken, perhaps by another Ray cluster; this server's dashboard takes the next free one",
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def check_proxies() -> Iterable[Finding]:
    """Check whether variables name a proxy, to which clients on this machine would send their requests."""
    proxies = getproxies_environment()
    hosts = proxies.pop("no", "")
    if not proxies:
        yield Finding("proxies", State.OK, "no variable names one")
        return
    named = ", ".join(f"{scheme}_proxy" for scheme in sorted(proxies))
    if hosts.strip() == "*" or {"127.0.0.1", "localhost"} <= {host.strip() for host in hosts.split(",")}:
        yield Finding("proxies", State.OK, f"{named}, but not for this machine (no_proxy)")
        return
    remedy = "export no_proxy=localhost,127.0.0.1 for curl and other clients; the server's own processes do without"
    yield Finding("proxies", State.WARNING, f"{named} would get the requests of clients to 127.0.0.1", remedy)
