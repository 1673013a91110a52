"""The commands of deploy/README.md that back up and restore name what Compose and Kubernetes have."""

import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
SECTION = (DEPLOY / "README.md").read_text().partition("## Backup and restore\n")[2].partition("\n## ")[0]


def test_the_pod_that_restores_has_the_volumes_of_a_server():
    [manifest] = re.findall(r"<<'END'\n(.*?)\nEND\n", SECTION, re.DOTALL)
    pod = yaml.safe_load(manifest)
    workload = yaml.safe_load((DEPLOY / "kubernetes" / "workload" / "statefulset.yaml").read_text())
    template = workload["spec"]["template"]["spec"]
    server = next(container for container in template["containers"] if container["name"] == "server")
    [restore] = pod["spec"]["containers"]
    mounts = [mount for mount in server["volumeMounts"] if mount["name"] in ("live", "models")]
    assert restore["volumeMounts"] == mounts
    [claim] = workload["spec"]["volumeClaimTemplates"]
    claims = {volume["name"]: volume["persistentVolumeClaim"] for volume in pod["spec"]["volumes"]}
    assert claims["live"] == {"claimName": f"{claim['metadata']['name']}-{workload['metadata']['name']}-0"}
    models = next(volume for volume in template["volumes"] if volume["name"] == "models")
    assert claims["models"] == models["persistentVolumeClaim"]
    assert pod["spec"]["securityContext"].items() <= template["securityContext"].items()
    assert " -c server -- " in SECTION


def test_the_commands_of_compose_use_its_services_and_volumes():
    services = yaml.safe_load((DEPLOY / "compose.cpu.yaml").read_text())["services"]
    named = set(re.findall(r"compose (?:exec -T|run .*?--entrypoint \S+) (\w+) ", SECTION))
    [stopped] = re.findall(r"compose stop (.*?)  +#", SECTION)
    assert named == {"triton"}
    assert set(stopped.split()) == {
        name for name, service in services.items() if "live:/srv/models.live" in service.get("volumes", ())
    }
    folders = {path.rpartition("/")[0] for path in re.findall(r"\S*/cache\S*/backup", SECTION)}
    assert folders == {volume.split(":")[1] for volume in services["triton"]["volumes"] if volume.startswith("cache:")}
