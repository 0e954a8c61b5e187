"""Write the gRPC stubs beside their .proto files, or check that the committed ones are current.

    python proto/generate.py            write
    python proto/generate.py --check    exit 1 and name the files that differ

The generator is pinned in the `test` extra at the oldest runtime that the package supports, so that stubs load there.
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = "kvferry_rpc"
WITH_SERVICES = ("public", "internal")


def generate(target: Path) -> list[Path]:
    """Generate all stubs below `target`; returns their paths relative to it.

    Raises CalledProcessError on a bad .proto.
    """
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).glob("*.proto"))
    services = [f"{PACKAGE}/{name}.proto" for name in WITH_SERVICES]
    scripts = Path(sys.executable).parent
    protoc = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
    ]
    quiet = {"check": True, "stderr": subprocess.PIPE}
    subprocess.run([*protoc, f"--python_out={target}", f"--mypy_out={target}", *protos], **quiet)  # type: ignore[call-overload]
    subprocess.run([*protoc, f"--grpc_python_out={target}", f"--mypy_grpc_out={target}", *services], **quiet)  # type: ignore[call-overload]
    return sorted(path.relative_to(target) for path in (target / PACKAGE).glob("*_pb2*.py*"))


def stale(generated: Path, names: list[Path]) -> list[str]:
    """Names of stubs that are missing, different or left over in the committed package."""
    committed = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    wrong = committed ^ set(names)
    for name in committed & set(names):
        if not filecmp.cmp(generated / name, ROOT / name, shallow=False):
            wrong.add(name)
    return sorted(map(str, wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate or check the gRPC stubs.")
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs instead of writing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        wrong = stale(Path(scratch), generate(Path(scratch)))
    if wrong:
        sys.stderr.write(f"stubs out of date (run `make protos`): {', '.join(wrong)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
