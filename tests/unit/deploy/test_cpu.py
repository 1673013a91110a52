"""The CPU image and its Compose file against the checkout, and the hashes that it installs by. Docker does not run here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[3]
DEPLOY = PROJECT / "deploy"
DOCKERFILE = (DEPLOY / "cpu.Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.cpu.yaml").read_text())
SERVICES = COMPOSE["services"]
HASHES = (PROJECT / "requirements" / "hashes.txt").read_text()


def pins(text: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9][\w.-]*==[\w.+!]+)", text, re.MULTILINE))


def test_every_pin_has_hashes_but_torch():
    hashed = {block.split()[0] for block in re.split(r"\n(?=\S)", HASHES) if "--hash=sha256:" in block}
    wanted = pins((PROJECT / "requirements" / "dev.txt").read_text())
    assert len(wanted) > 100
    assert {name for name in wanted - hashed if not name.startswith("torch==")} == set(), "run requirements/pin.sh"
    assert hashed - wanted == set(), "run requirements/pin.sh"
    (version,) = re.findall(r"^UV_VERSION=(\S+)", (PROJECT / "setup.sh").read_text(), re.MULTILINE)
    assert pins((PROJECT / "requirements" / "uv.txt").read_text()) == {f"uv=={version}"}


def test_the_image_copies_what_exists_and_runs_as_an_ordinary_user():
    copied = [line.split() for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    sources = [source for *sources, _ in copied for source in sources]
    assert {"serving", "server", "gateway", "deploy/serve.sh", "requirements/hashes.txt"} <= set(sources)
    assert [source for source in sources if not (PROJECT / source).exists()] == []
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "10001"
    assert DOCKERFILE.count("--require-hashes") == 2


def test_no_process_compiles_its_libraries_at_every_start():
    """None can write bytecode: the root is read-only. `server status` takes four times as long without it."""
    (options,) = re.findall(r"uv pip install ((?:.*\\\n)*.*)", DOCKERFILE)
    assert "--compile-bytecode" in options.split()


def test_the_image_holds_every_package_that_server_and_gateway_import():
    ours = {path.name for path in PROJECT.iterdir() if (path / "__init__.py").exists() or path.name == "serving"}
    wanted, found = {"server", "gateway"}, set[str]()
    while new := wanted - found:
        found |= new
        for name in new:
            text = "\n".join(path.read_text() for path in (PROJECT / name).rglob("*.py"))
            wanted |= set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)) & ours
    assert {"live", "repository"} <= found
    assert [name for name in sorted(found) if f"COPY {name} /opt/recommender/{name}\n" not in DOCKERFILE] == []


def test_the_training_image_adds_what_a_round_of_training_imports():
    text = (DEPLOY / "train.Dockerfile").read_text()
    copied = [line.split()[:-1] for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)]
    assert [source for sources in copied for source in sources if not (PROJECT / source).exists()] == []
    held = set(re.findall(r"^COPY (\w+) /opt", DOCKERFILE + text, re.MULTILINE))
    ours = {path.name for path in PROJECT.iterdir() if (path / "__init__.py").exists()} | {"serving"}
    for name in ("export", "training", "hps_config"):
        sources = "\n".join(path.read_text() for path in (PROJECT / name).rglob("*.py"))
        assert set(re.findall(r"^\s*(?:from|import) (\w+)", sources, re.MULTILINE)) & ours <= held
    assert "--require-hashes" in text


@pytest.mark.parametrize("name", ["triton", "gateway"])
def test_our_services_are_locked(name):
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["volumes"][0].endswith(":/srv/models:ro")
    assert (PROJECT / service["build"]["dockerfile"]).is_file()
    assert service["command"][0] in ("server", "gateway")
    assert service["pid"] == "service:processes"  # LMDB tells readers of the live store apart by their process ids
    assert SERVICES["processes"]["init"]
    assert service["ipc"] == "service:processes"  # explanations read the server's embedding rows in shared memory
    assert SERVICES["processes"]["ipc"] == "shareable"
    assert SERVICES["processes"]["shm_size"]


def test_only_this_machine_reaches_a_port_unless_it_is_told_otherwise():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith(("127.0.0.1:", "${HOST_ADDRESS:-127.0.0.1}:")) for port in ports)
    assert "ports" not in SERVICES["triton"]  # strangers meet the gateway alone


def test_services_refer_to_what_exists():
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= SERVICES.keys()
        assert set(service.get("networks", ())) <= COMPOSE["networks"].keys()
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source.startswith("$") or (DEPLOY / source).exists() or source in COMPOSE["volumes"], volume
    assert "/deploy/secrets/" in (PROJECT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_a_service_gets_every_secret_that_its_settings_name(name):
    compose = yaml.safe_load((DEPLOY / name).read_text())
    named: dict[str, set[str]] = {}
    for service, settings in compose["services"].items():
        configs = [compose["configs"][each["source"]]["content"] for each in settings.get("configs", ())]
        folders = [DEPLOY / volume.split(":")[0] for volume in settings.get("volumes", ()) if volume.startswith("./")]
        files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*.y*ml")]
        text = "\n".join([*configs, *(path.read_text() for path in files)])
        if secrets := set(re.findall(r"/run/secrets/(\w+)", text)):
            named[service] = secrets
    assert {"gateway", "prometheus", "alertmanager"} <= named.keys()
    assert named == {service: set(compose["services"][service].get("secrets", ())) for service in named}
    assert set.union(*named.values()) == compose["secrets"].keys()


def test_serve_sh_knows_its_commands():
    run = subprocess.run([DEPLOY / "serve.sh", "dance"], capture_output=True, text=True)
    assert (run.returncode, "dance is no command" in run.stderr) == (2, True)


@pytest.mark.parametrize(("good_try", "tries", "code"), [(1, 1, 0), (3, 3, 0), (9, 3, 1)])
def test_a_round_of_training_is_tried_three_times_as_another_process(tmp_path, good_try, tries, code):
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$$ $*" >> {log}\n[ $(wc -l < {log}) -ge {good_try} ]\n')
    python.chmod(0o755)
    run = subprocess.run([DEPLOY / "follow.sh", "--data", "/srv/data"], env={"PATH": "/usr/bin:/bin", "PY": str(python)})
    lines = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    assert run.returncode == code
    assert [arguments for _, arguments in lines] == ["-m export follow --once --data /srv/data"] * tries
    assert len({pid for pid, _ in lines}) == tries


def test_serve_sh_prints_the_log_of_the_server_at_its_port(tmp_path):
    cases = [([], 8001), (["--grpc-port", "9001"], 9001), (["--http-port", "9000", "--grpc-port=9001"], 9001)]
    started = [start_serve_sh(tmp_path / str(number), options) for number, (options, _) in enumerate(cases)]
    for (process, output_path), (_, port) in zip(started, cases, strict=True):
        assert process.wait(120) == 0
        assert set(output_path.read_text().splitlines()) == {f"log of {port}"}


def start_serve_sh(folder: Path, options: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Start serve.sh over a Python that logs for two servers until output is there. Return the process and its output."""
    logs = folder / ".run" / "logs"
    logs.mkdir(parents=True)
    (folder / "deploy").mkdir()
    shutil.copy(DEPLOY / "serve.sh", folder / "deploy")
    python, output_path = folder / "python", folder / "output"
    line = f"for other in 8001 9001; do echo log of $other >> {logs}/tritonserver-$other.log; done; sleep 0.1"
    python.write_text(f"#!/bin/sh\nuntil [ -s {output_path} ]; do {line}; done\n{line}\n")
    python.chmod(0o755)
    with output_path.open("w") as output:  # no pipe: what follows the log holds it until the script is collected
        script = [str(folder / "deploy" / "serve.sh"), "server", *options]
        return subprocess.Popen(script, env={"PATH": "/usr/bin:/bin", "PY": str(python)}, stdout=output), output_path
