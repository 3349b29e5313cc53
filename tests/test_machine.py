from __future__ import annotations

import os

import pytest

from cascadeseg import batch, machine


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes control groups: what /proc/self/cgroup says (None: there is none), and the files of limits."""
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)

    def make(own, limits):
        for name, text in (limits | ({} if own is None else {"own": own})).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")

    return make


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ("0::/\n", {"memory.max": "5000\n"}),
        ("0::/slurm/job_7/step\n", {"slurm/job_7/memory.max": "5000\n", "slurm/job_7/step/memory.max": "max\n"}),
        ("2:cpu:/a\n1:memory:/a/b\n0::/\n", {"memory/a/b/memory.limit_in_bytes": "5000\n"}),
        ("1:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": "5000\n"}),
        ("0::/a:b/c\n", {"a:b/c/memory.max": "7000\n", "a:b/memory.max": "5000\n"}),
    ],
    ids=["container", "job", "version 1", "container of version 1", "nested"],
)
def test_memory_is_what_the_groups_of_the_process_may_take(groups, own, limits):
    groups(own, limits)
    assert machine.available_memory_bytes() == 5000


STAT = "anon 900\nfile 1500\ninactive_file 300\nactive_file 200\nslab_reclaimable 100\nslab 150\n"
STAT_1 = "cache 1500\ninactive_file 9\ntotal_cache 1500\ntotal_inactive_file 400\ntotal_active_file 200\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "2000\n", "memory.stat": STAT}, 3600),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "2000\n"}, 3000),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "500\n", "memory.stat": STAT}, 5000),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "5700\n", "memory.stat": STAT}, 0),
        (
            "0::/job/step\n",  # another step of the job has taken most of what is the job's
            {"job/memory.max": "9000", "job/memory.current": "8500", "job/memory.stat": STAT}
            | {"job/step/memory.max": "5000", "job/step/memory.current": "1000", "job/step/memory.stat": STAT},
            1100,
        ),
        ("0::/job\n", {"job/memory.max": "max\n", "job/memory.current": "500\n", "job/memory.stat": STAT}, 6000),
        (
            "1:memory:/docker/1f\n",
            {
                "memory/memory.limit_in_bytes": "5000\n",
                "memory/memory.usage_in_bytes": "2000\n",
                "memory/memory.stat": STAT_1,
            },
            3600,
        ),
    ],
    ids=["container", "without statistics", "only files", "beyond", "job", "no limit", "container of version 1"],
)
def test_of_a_limit_what_is_used_is_not_left_but_for_files_in_memory(groups, monkeypatch, own, files, expected):
    """Of a container of 8 GB with 7 in use 1 is left; a scan of 2 was read, and the container's processes killed."""
    monkeypatch.setattr(machine, "_free_bytes", lambda: 6000)
    groups(own, files)
    assert machine.available_memory_bytes() == expected


@pytest.mark.parametrize("own", [None, "0::/\n", "0::/gone\n"])
def test_without_a_limit_memory_is_the_machines(groups, monkeypatch, own):
    monkeypatch.setattr(machine, "_free_bytes", lambda: 6000)
    groups(own, {} if own is None else {"memory.max": "max\n"})
    assert machine.available_memory_bytes() == 6000


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "1600000 100000\n"}, 6),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"service/cpu.max": "200000 100000\n", "service/one/cpu.max": "max 100000\n"}, 2),
    ],
)
def test_processors_are_counted_that_the_process_may_use(groups, monkeypatch, limits, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    groups("0::/service/one\n", limits)
    assert machine.processors() == expected


@pytest.mark.parametrize("folder", ["cpuacct,cpu", "cpu"])  # the latter a link to "cpu,cpuacct"
@pytest.mark.parametrize(("quota", "expected"), [("250000", 3), ("-1", 6)])
def test_processors_of_control_groups_of_version_1(groups, monkeypatch, quota, expected, folder):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    limits = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}
    own = "5:memory:/\n4:cpuacct,cpu:/docker/1f\n3:cpuset:/\n0::/\n"
    groups(own, {f"{folder}/{name}": text for name, text in limits.items()} | {"cpuset/cpu.cfs_quota_us": "1"})
    assert machine.processors() == expected


def test_where_no_process_can_be_bound_all_processors_count(groups, monkeypatch):
    groups(None, {})
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.processors() == 1


@pytest.mark.parametrize(
    ("share", "given", "already", "expected"),
    [
        ("300000 100000", None, None, "3"),  # of a container
        ("max 100000", None, None, None),  # torch counts by itself
        ("900000 100000", None, None, None),
        ("300000 100000", 2, None, "2"),  # of a process of several
        ("300000 100000", 2, "5", "5"),  # by the user
    ],
)
def test_torch_is_to_take_no_more_threads_than_a_container_lets_it(
    groups, monkeypatch, share, given, already, expected
):
    groups("0::/\n", {"cpu.max": share})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", already or "")
    if already is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    batch.limit_threads(given)
    assert os.environ.get("OMP_NUM_THREADS") == expected
