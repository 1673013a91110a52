"""A server is examined by a question that is nobody's, and by looking at the disk of its live store."""

from __future__ import annotations

import shutil
from collections import namedtuple

import psutil

from server.status.condition import ask, describe_network_disk
from serving.contract.tensors import PROBE_USER_ID
from tests.repositories import copy_lean_repository
from tests.unit.clients.grpc_double import GrpcDouble

Mount = namedtuple("Mount", "mountpoint fstype")


def test_the_question_is_of_no_user_of_the_shop():
    double = GrpcDouble(lambda query: [3])
    try:
        ask(double.url)
    finally:
        double.stop()
    [call] = double.fake.calls
    assert call.inputs["user_id"].tolist() == [[PROBE_USER_ID]]


def test_a_live_store_on_a_network_file_system_is_told(tmp_path, monkeypatch):
    repo, mounts = copy_lean_repository(tmp_path / "repo"), [Mount("/", "ext4"), Mount("/elsewhere", "nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert describe_network_disk(repo) == ""
    mounts.append(Mount(str(tmp_path), "nfs4"))
    assert "repo.live is on a network file system (nfs4)" in describe_network_disk(repo)
    assert describe_network_disk(tmp_path / "absent") == ""
    shutil.rmtree(repo / "observe")
    assert describe_network_disk(repo) == ""
