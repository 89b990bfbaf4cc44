# SPDX-License-Identifier: Apache-2.0
"""The scripts and descriptions in ``dlcp/examples/cluster``: they are well-formed, and train on two nodes."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys

import pytest

from dlcp import cli, wire
from tests.cluster.nodes import ROOT, Nodes, started
from tests.train.preloaded import Preloaded

pytestmark = pytest.mark.timeout(500)
EXAMPLES = ROOT / "dlcp" / "examples" / "cluster"
SCRIPTS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
COMPOSE = "compose.yaml"
DESCRIPTIONS = sorted(path.name for path in EXAMPLES.glob("*.yaml") if path.name != COMPOSE)
SBATCH = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"}
"""Those options of sbatch(1) that the script may have."""
SRUN = {"kill-on-bad-exit"}
"""Likewise of srun(1)."""
LIMIT_S = 400


def documents(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def check_training(words):
    """Check that ``dlcp train`` takes these words: its own, torchrun's, and a module that there is."""
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    assert words[:2] == ["dlcp", "train"]
    arguments = cli.parse(words[1:])
    found, unknown = get_args_parser().parse_known_args([*arguments.torchrun, "script"])
    assert unknown == []
    if arguments.script[:1] == ["-m"]:
        assert (ROOT / f"{arguments.script[1].replace('.', '/')}.py").is_file()
    return found


def test_nothing_stands_here_that_no_test_knows():
    assert {path.name for path in EXAMPLES.iterdir()} == {*SCRIPTS, *DESCRIPTIONS, COMPOSE, "Dockerfile"}
    assert (SCRIPTS, DESCRIPTIONS) == (["slurm.sbatch", "ssh.sh"], ["indexed-job.yaml", "trainjob.yaml"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_well_formed_and_shellcheck_finds_nothing(name):
    path = EXAMPLES / name
    assert path.stat().st_mode & stat.S_IXUSR
    shell = path.read_text().splitlines()[0].removeprefix("#!/bin/")
    assert subprocess.run([shell, "-n", path], capture_output=True, check=False).stderr == b""
    found = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed: pip install 'dlcp[dev]'")
    done = subprocess.run([found, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_batch_script_has_options_that_slurm_knows():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    assert {
        re.match(r"#SBATCH --([a-z-]+)=", line)[1] for line in re.findall(r"^#SBATCH.*", text, re.MULTILINE)
    } <= SBATCH
    assert set(re.findall(r"--([a-z-]+)", re.search(r"srun (.*?) bash", text)[1])) <= SRUN


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_of_the_scripts_have_options_that_there_are(name):
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    given = set(re.findall(r"--([a-z][a-z0-9-]+)", text[text.index("dlcp train --") :].replace("kill-on-bad-exit", "")))
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    known = {word for action in get_args_parser()._actions for word in action.option_strings}
    assert given - {"checkpoint"} <= {word.lstrip("-") for word in known}


# Kubernetes -----------------------------------------------------------------------------------------------------------


KINDS = {
    ("v1", "Service"): "V1Service",
    ("batch/v1", "Job"): "V1Job",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_are_what_kubernetes_takes(name):
    """By the models of its own client, and of Kubeflow's: no field is unknown, missing, or of another type."""
    client, models = pytest.importorskip("kubernetes.client"), pytest.importorskip("kubeflow_trainer_api.models")
    for document in documents(name):
        kind = document["apiVersion"], document["kind"]
        if kind in KINDS:
            getattr(client, KINDS[kind]).model_validate(document)
        else:
            assert kind == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
            taken = models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
            assert taken == document, "what the model does not know it leaves out"


def test_the_job_trains_and_nothing_in_it_is_privileged():
    _, job, policy = documents("indexed-job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    torchrun = check_training([*container["command"], *container["args"]])
    assert (torchrun.nnodes, torchrun.rdzv_backend) == (str(job["spec"]["completions"]), "c10d")
    service = documents("indexed-job.yaml")[0]["metadata"]["name"]
    assert torchrun.rdzv_endpoint.partition(":")[0] == f"{job['metadata']['name']}-0.{service}"
    assert (pod["subdomain"], job["spec"]["parallelism"]) == (service, job["spec"]["completions"])
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "hostNetwork" not in pod
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] & 0o007 == 0, "as configured_secret wants it"
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels == documents("indexed-job.yaml")[0]["spec"]["selector"]


def test_the_train_job_trains():
    job, _ = documents("trainjob.yaml")
    check_training([*job["spec"]["trainer"]["command"], *job["spec"]["trainer"]["args"]])
    (secret,) = job["spec"]["trainer"]["env"]
    assert secret["name"] == "DLCP_SECRET"
    assert "value" not in secret


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_policies_let_dlcps_ports_through_between_the_ranks_alone(name):
    policy = documents(name)[-1]["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": policy["podSelector"]}]
    udp = {"protocol": "UDP", "port": wire.UDP_PORT_BASE, "endPort": wire.UDP_PORT_BASE + wire.UDP_PORT_COUNT - 1}
    assert rule["ports"] == [udp, {"protocol": "TCP"}]


# Docker ---------------------------------------------------------------------------------------------------------------


def test_the_image_is_built_of_files_that_there_are_and_starts_dlcp():
    (compose,) = documents(COMPOSE)
    for service in compose["services"].values():
        context = (EXAMPLES / service["build"]["context"]).resolve()
        assert context == ROOT
        dockerfile = (context / service["build"]["dockerfile"]).read_text()
        assert "image" not in service, "services that are built at once under one name collide"
    assert dockerfile.strip().endswith('ENTRYPOINT ["dlcp"]')
    (torch,) = re.findall(r"^ARG TORCH=torch==(.*)", dockerfile, re.MULTILINE)
    assert f"\ntorch=${{TORCH:-{torch}}}\n" in (ROOT / ".ci" / "set-up").read_text()


def test_compose_accepts_the_file_with_a_secret_alone():
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    command = ["docker-compose", "-f", str(EXAMPLES / COMPOSE), "config"]
    without = {name: value for name, value in os.environ.items() if name != "DLCP_SECRET"}
    refused = subprocess.run(command, env=without, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "set it to a random secret" in refused.stderr
    accepted = subprocess.run(
        command, env={**without, "DLCP_SECRET": "s" * 32}, capture_output=True, text=True, timeout=60
    )
    assert (accepted.returncode, accepted.stderr) == (0, "")


def test_the_containers_meet_at_the_first_one():
    services = documents(COMPOSE)[0]["services"]
    for service in services.values():
        torchrun = check_training(["dlcp", *service["command"]])
        assert torchrun.nnodes == str(len(services))
        assert torchrun.rdzv_endpoint.partition(":")[0] == services["node0"]["hostname"]


# The scripts on two nodes ---------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path):
    """Two nodes, on which names lead where Debian lets them: a host's own to 127.0.1.1, another's to its address."""
    pytest.importorskip("sklearn")
    addresses = {"node-a": "10.72.0.1", "node-b": "10.72.0.2"}

    def hosts(name):
        others = [f"{address} {other}\n" for other, address in addresses.items() if other != name]
        return f"127.0.1.1 {name}\n" + "".join(others)

    with Nodes(tmp_path, {name: {"eth0": address} for name, address in addresses.items()}, hosts) as made:
        yield made


@pytest.fixture(scope="module")
def python():
    """Words that stand for ``python``, for programs that import PyTorch."""
    with Preloaded() as words:
        yield words


def programs(folder, python, **scripts):
    """Write programs; return an environment that has them, and the ``dlcp`` of this checkout, on its PATH."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    scripts["dlcp"] = f'exec {shlex.join(python)} -m dlcp.cli "$@"'
    for name, text in scripts.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DLCP_", "PET_", "MASTER_"))}
    (folder / "home").mkdir()
    here = {"PATH": f"{bin_folder}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    return {**kept, **here}


def run(words, environment, folder):
    """Run a script to its end; if it does not end, end its processes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started([*map(str, words)], cwd=folder, env=environment, **pipes) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def assert_trained(done, checkpoint, folder):
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert "from step 0 on, 2 processes" in told
    assert re.search(r"DLCP  Sequential, 20 steps, 1 of 2 ranks, those of this machine", told), told
    assert told.count("fallback           none, ") == 2
    assert told.count("through sockets") == 2
    assert checkpoint.exists()
    secrets = [path for path in folder.rglob(".dlcp-secret*") if path.is_file()]
    assert secrets == [], "the secret is gone"


TRAINING = ["-m", "dlcp.examples.resumable", "--steps", "20", "--save-every", "10", "--checkpoint"]


def test_the_batch_script_trains_on_two_nodes(nodes, python, tmp_path):
    """With stand-ins for Slurm's own programs, which take what those take."""
    srun = f"""
set -e
while [[ $1 == --* ]]; do shift; done
[[ $(stat -c %a "$DLCP_SECRET_FILE") == 600 ]]
for node in a b; do
    SLURM_NODEID=$([[ $node == a ]] && echo 0 || echo 1) {tmp_path}/on-node-$node "$@" & running+=" $!"
done
for one in $running; do wait $one; done
"""
    scontrol = '[[ "$*" == "show hostnames node-[a-b]" ]] && printf "node-a\\nnode-b\\n"'
    environment = programs(tmp_path, python, srun=srun, scontrol=scontrol)
    environment |= {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"SLURM_SUBMIT_DIR": str(tmp_path), "RANKS_PER_NODE": "1"}
    checkpoint = tmp_path / "digits.pt"
    done = run(["bash", EXAMPLES / "slurm.sbatch", *TRAINING, checkpoint], environment, tmp_path)
    assert_trained(done, checkpoint, tmp_path)


SSH = """
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
host=$1; shift; cd ~
echo "$*" >> {folder}/commands
exec {folder}/on-$host sh -c "$*"
"""


def test_the_ssh_script_trains_on_two_hosts(nodes, python, tmp_path):
    """With a stand-in for ssh that runs commands in the hosts' network namespaces."""
    environment = programs(tmp_path, python, ssh=SSH.format(folder=tmp_path))
    checkpoint = tmp_path / "it's here" / "digits.pt"
    checkpoint.parent.mkdir()
    done = run(["sh", EXAMPLES / "ssh.sh", "node-a node-b", "1", *TRAINING, checkpoint], environment, tmp_path)
    assert_trained(done, checkpoint, tmp_path)
    assert not re.search(r"[0-9a-f]{64}", (tmp_path / "commands").read_text()), "no argument shows the secret"


def test_the_ssh_script_ends_everything_when_a_host_fails(tmp_path):
    """The second host has no dlcp; the first one would wait for it."""
    ssh = '[[ "$*" == *"exec dlcp"* ]] || exit 0\n[[ "$*" == *node-b* ]] && exit 127\nexec sleep 600'
    environment = programs(tmp_path, [sys.executable], ssh=ssh)
    done = run(["sh", EXAMPLES / "ssh.sh", "node-a node-b", "1", "script.py"], environment, tmp_path)
    assert done.returncode == 1, done.stderr
    for arguments in ([], ["node-a"], ["node-a", "1"]):
        refused = subprocess.run(["sh", EXAMPLES / "ssh.sh", *arguments], capture_output=True, text=True, check=False)
        assert (refused.returncode, "usage: ssh.sh" in refused.stderr) == (2, True)
