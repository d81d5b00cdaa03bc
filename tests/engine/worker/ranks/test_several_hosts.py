"""Ranks that each have a host of its own: they connect over TCP. Here the hosts are addresses of this machine."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineDeadError
from engine.llm import LLM
from engine.models.tensor_parallel import TensorParallel
from engine.sampling_params import SamplingParams
from engine.worker.model_runner import ModelRunner
from engine.worker.ranks import rank_listener, several_hosts
from engine.worker.ranks.rank_listener import Invitation, RankListener
from engine.worker.ranks.several_hosts import SeveralHosts
from tests.engine.worker.parallel_answers import OPTIONS, answer, check_equal
from tests.waiting import HANG_S, until

RANK_0, IPV6 = "127.0.0.1", "::1"
JOIN = (
    "import pickle, sys; from engine.worker.ranks.rank_process import join; "
    "join(pickle.loads(sys.stdin.buffer.read()), sys.argv[1])"
)


class Hosts(SeveralHosts):
    """Each rank is a process with an address of its own, in IPv6 with the one that there is."""

    def __init__(self, host: str = RANK_0) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        super().__init__(host, self._start_process)

    def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
        own_host = IPV6 if self.own_address == IPV6 else f"127.0.0.{invitation.number + 1}"
        command = [sys.executable, "-c", JOIN, own_host]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(invitation))
        process.stdin.close()
        self.processes[invitation.number] = process
        return process


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts on which engines place their ranks."""
    hosts, from_config = Hosts(), Engine.from_config
    monkeypatch.setattr(Engine, "from_config", lambda config: from_config(config, hosts=hosts))
    yield hosts
    for process in hosts.processes.values():
        process.kill()
        process.wait()


def test_ranks_on_several_hosts_compute_what_one_rank_computes_and_end_together(
    spread: Hosts, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **OPTIONS)
    got = answer(llm)
    monkeypatch.undo()
    check_equal(got, answer(LLM(checkpoint("qwen3"), **OPTIONS)))
    spread.processes[1].kill()
    with pytest.raises(EngineDeadError, match=r"tensor-parallel rank 1 of 2 on 127\.0\.0\.2 was killed by SIGKILL"):
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server((IPV6, 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ranks_on_hosts_of_ipv6_compute_sums() -> None:
    hosts = Hosts(IPV6)
    handles: list[subprocess.Popen[bytes]] = []
    try:
        with ThreadPoolExecutor(2) as threads:
            joined = [
                threads.submit(TensorParallel.join, rank, 2, torch.device("cpu"), hosts.rendezvous, IPV6)
                for rank in range(2)
            ]
            groups = [future.result(HANG_S) for future in joined]
            sums = [threads.submit(group.all_reduce, torch.full((3,), 2.0)) for group in groups]
            assert [future.result(HANG_S).tolist() for future in sums] == [[4.0] * 3] * 2
        ranks = hosts.start(2)
        handles = list(hosts.processes.values())
        assert [(rank.number, rank.host) for rank in ranks] == [(1, IPV6)]
        for rank in ranks:
            rank.connection.close()
    finally:
        for handle in handles:
            handle.kill()
            handle.wait()


@pytest.mark.long
def test_a_rank_ends_with_rank_0(spread: Hosts, checkpoint: Callable[[str], str]) -> None:
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=4, **OPTIONS)
    assert sorted(spread.processes) == [1, 2, 3]
    llm.engine.close()
    assert [process.wait(HANG_S) for process in spread.processes.values()] == [-9, -9, -9]


def test_a_rank_ends_when_the_connection_does() -> None:
    """Rank 0's process or host may end without a word."""
    hosts = Hosts()
    (rank,) = hosts.start(2)
    rank.connection.close()
    assert hosts.processes[1].wait(HANG_S) == 0


class Strangers(Hosts):
    """Other programs connect before the rank does."""

    def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
        address = invitation.host, invitation.port
        with socket.create_connection(address) as mute, socket.create_connection(address) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
            mute.sendall(b"\0\0\0\x05hello")
        self.answers = [_secret_of_another_engine(address)]
        return super()._start_process(invitation)


def _secret_of_another_engine(address: tuple[str, int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import sys; from multiprocessing.connection import Client; "]
    command[-1] += "Client((sys.argv[1], int(sys.argv[2])), authkey=b'other')"
    return subprocess.Popen([*command, address[0], str(address[1])], stderr=subprocess.PIPE)


def test_other_programs_are_not_admitted() -> None:
    hosts = Strangers()
    (rank,) = hosts.start(2)
    try:
        assert (rank.number, rank.host) == (1, "127.0.0.2")
        _, error = hosts.answers[0].communicate(timeout=HANG_S)
        assert AuthenticationError.__name__.encode() in error
    finally:
        hosts.processes[1].kill()
        hosts.processes[1].wait()


def test_programs_that_connect_and_send_nothing_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "_HANDSHAKE_SECONDS", round(10 * HANG_S))
    with RankListener(RANK_0) as listener, ThreadPoolExecutor(1) as rank:
        invitation = listener.invite(7)
        address = invitation.host, invitation.port
        with socket.create_connection(address), socket.create_connection(address) as slow:
            slow.sendall(b"\0\0")
            connected = rank.submit(invitation.accept, "127.0.0.2")
            admitted: list[tuple[int, str, Connection]] = []
            until(lambda: admitted.extend(listener.take()) or admitted, "the rank is admitted")
            ((number, host, connection),) = admitted
            with connection, connected.result(HANG_S) as theirs:
                assert (number, host) == (7, "127.0.0.2")
                connection.send("a call")
                assert theirs.recv() == "a call"


def test_a_dead_rank_is_noticed_while_other_programs_connect() -> None:
    ended = threading.Event()

    class Besieged(Hosts):
        def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
            threads.submit(self._connect, (invitation.host, invitation.port))
            return subprocess.Popen(["false"])

        def _connect(self, address: tuple[str, int]) -> None:
            with suppress(OSError):  # rank 0 does not listen any more
                while not ended.is_set():
                    socket.create_connection(address).close()

    with ThreadPoolExecutor(1) as threads:
        try:
            with pytest.raises(EngineDeadError, match="rank 1 of 2 ended before it connected"):
                Besieged().start(2)
        finally:
            ended.set()


def test_no_rank_is_left_if_another_cannot_be_started() -> None:
    class Full(Hosts):
        def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
            if self.processes:
                raise RuntimeError("no room")
            return super()._start_process(invitation)

    hosts = Full()
    with pytest.raises(RuntimeError, match="no room"):
        hosts.start(3)
    assert hosts.processes[1].wait(HANG_S) == -9


def test_a_rank_believes_no_other_program() -> None:
    """It unpickles nothing from a program that does not know the secret."""
    with socket.create_server((RANK_0, 0)) as impostor:
        invitation = Invitation(1, *impostor.getsockname(), b"secret")
        process = Hosts._start_process(Hosts(), invitation)
        accepted, _ = impostor.accept()
        with accepted:
            accepted.sendall(b"\0\0\0\x05hello")
            assert process.wait(HANG_S) != 0


def test_a_rank_that_ends_before_it_connects() -> None:
    class Broken(Hosts):
        def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
            return subprocess.Popen(["false"])

    with pytest.raises(EngineDeadError, match=r"rank 1 of 3 ended before it connected; its log says why"):
        Broken().start(3)


def test_a_rank_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_hosts, "_START_SECONDS", 0.0)
    started: list[subprocess.Popen[bytes]] = []

    class Silent(Hosts):
        def _start_process(self, invitation: Invitation) -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen(["sleep", str(10 * HANG_S)]))
            return started[-1]

    with pytest.raises(EngineDeadError, match=r"rank 1 of 3 has not connected for 0 s; let all ports"):
        Silent().start(3)
    assert [process.wait(HANG_S) for process in started] == [-9, -9]


@pytest.mark.parametrize("option", [{"disk_cache_path": "cache"}, {"kv_transfer": True}])
def test_ranks_on_several_hosts_share_no_host_memory(option: dict[str, object], tmp_path: Path) -> None:
    config = EngineConfig.from_options(str(tmp_path), {"tensor_parallel_size": 2, "swap_space_gib": 1.0, **option})
    with pytest.raises(ConfigError, match=rf"{next(iter(option))}=.* needs all ranks on one host"):
        ModelRunner(config, Hosts())


def test_only_the_given_address_is_listened_on() -> None:
    hosts = Hosts()
    port = int(hosts.rendezvous.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        Client(("127.0.0.2", port))
    until(lambda: socket.create_connection((RANK_0, port)).close() is None, "the store listens")
