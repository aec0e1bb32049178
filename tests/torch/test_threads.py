"""Several threads that save and load at once, writers that hang, groups that are made anew, hosts and forks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ucformat
from tests.patience import PATIENCE
from tests.torch.ranks import Ranks
from tests.torch.test_faults import holds, opens


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.threads_program")


def test_threads_begin_in_opposite_orders(ranks: Ranks, tmp_path: Path) -> None:
    (first, step), (second, _) = ranks.run("opposite_orders", 2, tmp_path)
    assert step == 1
    assert first == second
    for place, seed in zip("abcdef", (2, 3, 4, 5, 6, 6), strict=True):
        assert holds(tmp_path / place, seed)
        assert ucformat.open(tmp_path / place).id in first.values()
    assert len(set(first.values())) == 7


def test_a_save_of_dcp_beside_one_of_the_main_thread(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run("beside_the_main_thread", 2, tmp_path)
    assert first == second
    assert holds(tmp_path / "dcp", 1)
    assert holds(tmp_path / "main", 2)


def test_what_cannot_be_told_apart_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("not_told_apart", 2, tmp_path)
    for refused, saved in found:
        for kind, message in refused.values():
            assert kind == "UsageError"
            assert "several threads call save with the same url at once" in message
        assert saved == found[0][1]
    assert ucformat.open(tmp_path / "one").id in found[0][1].values()


def test_ranks_that_call_different_things_are_told(ranks: Ranks, tmp_path: Path) -> None:
    (seen, new), (other, _) = ranks.run("other_calls", 2, tmp_path)
    assert seen["message"] == other["message"] == "rank 1 calls load while rank 0 calls save"
    assert ucformat.open(tmp_path / "new").id == new


@pytest.mark.matrix
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_writer_that_hangs(ranks: Ranks, tmp_path: Path, stuck: int) -> None:
    found = ranks.run("stopped_writer", 2, tmp_path, stuck=stuck)
    for rank, (waited, after, idle, last) in enumerate(found):
        assert ucformat.open(tmp_path / "after").id == after
        for error in (waited, idle):
            assert error["kind"] == "UcformatError"
            if rank == stuck:
                assert f"rank {stuck}: the process that wrote" in error["message"]
                assert "was unresponsive for 0.5 s" in error["message"]
            else:
                assert f"rank {stuck} died or has been unresponsive for" in error["message"]
        assert "message" not in last
    assert holds(tmp_path / "last", 4)
    assert not opens(tmp_path / "stopped")
    assert not opens(tmp_path / "idle")


@pytest.mark.matrix
def test_groups_that_are_made_anew_leave_nothing_behind(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run("made_anew", 2, tmp_path):
        assert seen == [(1, 1, 2)] * 3  # of the buffer its descriptor, and that of the mapping


def test_a_forked_child_ends_nothing_of_its_parent(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("forked", 2, tmp_path)
    assert [(code, everybody) for code, _, everybody in found] == [(0, [0, 1])] * 2
    assert ucformat.open(tmp_path / "forked").id == found[0][1] == found[1][1]


def _can_make_hosts() -> bool:
    if shutil.which("ip") is None or os.geteuid():
        return False
    made = subprocess.run(["ip", "netns", "add", "uc-probe"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "uc-probe"], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.matrix
@pytest.mark.skipif(not _can_make_hosts(), reason="network namespaces need root")
def test_a_group_without_the_host_of_the_store(tmp_path: Path) -> None:
    """Three hosts on a bridge; the group's writers meet at its own first rank."""
    tag = f"uc{os.getpid()}"
    bridge, program = f"{tag}b", "tests.torch.threads_program"
    commands = [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
    for n in range(3):
        host = f"{tag}-{n}"
        commands += [
            f"ip netns add {host}",
            f"ip link add {tag}v{n} type veth peer name eth0 netns {host}",
            f"ip link set {tag}v{n} master {bridge} up",
            f"ip -n {host} addr add 10.231.77.{n + 1}/24 dev eth0",
            f"ip -n {host} link set eth0 up",
            f"ip -n {host} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "UCP_CATALOG": "none",
        }
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.231.77.1"}
        processes = [
            subprocess.Popen(
                [
                    *f"ip netns exec {tag}-{n} {sys.executable} -m {program} {n} 10.231.77.1".split(),
                    str(tmp_path),
                ],
                env=environment,
            )
            for n in range(3)
        ]
        try:
            assert [p.wait(PATIENCE) for p in processes] == [0, 0, 0]
        finally:
            for p in processes:
                p.kill()
                p.wait()
    finally:
        for n in range(3):
            subprocess.run(["ip", "netns", "del", f"{tag}-{n}"], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)
    assert ucformat.open(tmp_path / "pair")["w"].shape == (2000,)
