"""The script that makes one Redis cluster of nodes: of real ones, and with a redis-cli that tells of nodes started again."""

import shutil
import subprocess
from pathlib import Path

import pytest
import redis

from tests.unit.tables.redis_server import free_port, wait_for_redis

SCRIPT = Path(__file__).parents[3] / "deploy" / "create-cluster.sh"


@pytest.fixture
def nodes(tmp_path):
    """Three Redis nodes that know nothing of each other."""
    ports, started = [], []
    for number in range(3):
        port = free_port()
        folder = tmp_path / f"redis-{number}"
        folder.mkdir()
        place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--cluster-enabled", "yes"]
        started.append(subprocess.Popen(["redis-server", *place], stdout=subprocess.DEVNULL))
        ports.append(port)
        wait_for_redis(redis.Redis(port=port))
    yield [f"127.0.0.1:{port}" for port in ports]
    for process in started:
        process.terminate()
        process.wait()


def create(nodes, path="/usr/bin:/bin"):
    environment = {"NODES": " ".join(nodes), "PATH": path}
    return subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(
    not shutil.which("redis-server") or not shutil.which("redis-cli"), reason="needs redis-server and redis-cli"
)
def test_three_nodes_become_one_cluster_once(nodes):
    first = create(nodes)
    assert first.returncode == 0, first.stderr + first.stdout
    cluster = redis.RedisCluster(host="127.0.0.1", port=int(nodes[0].split(":")[1]))
    assert len(cluster.get_primaries()) == 3
    assert cluster.set("key", "value")
    assert cluster.get("key") == b"value"
    again = create(nodes)
    assert (again.returncode, "exists" in again.stdout) == (0, True)
    assert cluster.get("key") == b"value"


def test_a_cluster_of_nothing_is_refused():
    run = subprocess.run([str(SCRIPT)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "names no nodes" in run.stderr


ONE = "cluster_state:fail\ncluster_known_nodes:1\n"
JOINED = "cluster_state:fail\ncluster_known_nodes:3\n"
READY = "cluster_state:ok\ncluster_known_nodes:3\n"
LOADING = "LOADING Redis is loading the dataset in memory\n"


@pytest.fixture
def told(tmp_path):
    """answers of each node, of which the last stays -> the run, and the clusters that it created. No second is waited for."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sleep").write_text("#!/bin/sh\n")
    (programs / "redis-cli").write_text(
        f"""#!/bin/sh
cd {tmp_path}
if [ "$1 $2" = "--cluster create" ]; then
  echo "$*" >> created
  for node in node-*; do rm "$node"/*; printf '{READY}' > "$node"/9; done
  exit
fi
cd "node-$4"
set -- *
cat "$1"
[ $# = 1 ] || rm "$1"
"""
    )
    for program in programs.iterdir():
        program.chmod(0o755)

    def run(*nodes):
        for port, answers in enumerate(nodes):
            (tmp_path / f"node-{port}").mkdir()
            for number, answer in enumerate(answers):
                (tmp_path / f"node-{port}" / str(number)).write_text(answer)
        done = create([f"host:{port}" for port in range(len(nodes))], path=f"{programs}:/usr/bin:/bin")
        created = tmp_path / "created"
        return done, created.read_text().splitlines() if created.exists() else []

    return run


def test_nodes_that_know_no_other_are_made_one_when_all_of_them_can_say_so(told):
    done, created = told([ONE], [LOADING, LOADING, ONE], [ONE])
    assert (done.returncode, len(created)) == (0, 1), done.stderr
    assert created[0].startswith("--cluster create host:0 host:1 host:2 ")


def test_a_cluster_that_reads_its_files_is_waited_for_and_not_created(told):
    done, created = told([LOADING, LOADING, JOINED, JOINED, READY], [JOINED, JOINED, JOINED, READY], [READY])
    assert (done.returncode, created) == (0, []), done.stderr
    assert "exists" in done.stdout


def test_a_node_that_lost_its_cluster_is_named_and_nothing_created(told):
    done, created = told([READY], [ONE], [READY])
    assert (done.returncode, created) == (1, [])
    assert "1 of the 3 nodes host:0 host:1 host:2 belong to no cluster" in done.stderr


def test_what_never_gets_ready_says_why(told):
    done, created = told([READY], [JOINED], [READY])
    assert (done.returncode, created) == (1, [])
    assert "the node at host:1 is not ready" in done.stderr
    assert "it says: cluster_state:fail." in done.stderr
