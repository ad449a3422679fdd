"""The compiled kernels on an emulated Arm processor, and on this machine's own."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
CHECK = Path(__file__).with_name("kernels_check.c")

MACHINES = {
    "own": ("cc", []),
    "cortex-a57": ("aarch64-linux-gnu-gcc", ["qemu-aarch64", "-cpu", "cortex-a57"]),
    "max": ("aarch64-linux-gnu-gcc", ["qemu-aarch64", "-cpu", "max"]),
}


@pytest.mark.heavy
@pytest.mark.parametrize("machine", MACHINES)
def test_kernels_do_what_plain_loops_do(machine: str, tmp_path: Path) -> None:
    compiler, emulator = MACHINES[machine]
    for program in (compiler, *emulator[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt install {PACKAGES}")
    headers = sysconfig.get_path("include")
    program = tmp_path / "check"
    # Nothing of Python is called, so nothing of it is linked.
    link = ["-static", "-Wl,--unresolved-symbols=ignore-all"]
    command = [compiler, "-O3", "-Wall", "-Wextra", "-Werror", f"-I{headers}", str(CHECK)]
    subprocess.run([*command, *link, "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "copies, filters, windows, colours, checksums\n"
