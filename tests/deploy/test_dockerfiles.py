"""What can be said of the images without building them."""

import re
import tomllib
from pathlib import Path

import pytest

from kvferry import __version__
from tests.support.manifests import OVERLAYS, ROOT, overlay, pods

DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction and its text, continuation lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.stem)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_one_for_each_image_of_the_manifests() -> None:
    assert [path.stem for path in DOCKERFILES] == ["cpu", "cuda"]
    images = {
        container["image"] for name in OVERLAYS for pod in pods(overlay(name)) for container in pod.all_containers
    }
    assert images == {f"kvferry-{path.stem}:{__version__}" for path in DOCKERFILES}


def test_it_builds_in_one_stage_and_runs_in_another_of_the_same_pinned_image(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    stages = [text for name, text in instructions if name == "FROM"]
    assert stages == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    (image,) = [text for name, text in instructions if name == "ARG" and text.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-[a-z]+", image)


def test_it_runs_as_a_user_with_a_number_that_kubernetes_can_check(dockerfile: Path) -> None:
    last = [text for name, text in _instructions(dockerfile) if name == "USER"][-1]
    assert last == "10001:10001"
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            context = pod.spec["securityContext"]
            assert f"{context['runAsUser']}:{context['runAsGroup']}" == last


def test_everything_that_pip_installs_is_held_to_the_tested_versions(dockerfile: Path) -> None:
    installs = [
        command
        for name, text in _instructions(dockerfile)
        if name == "RUN"
        for command in re.findall(r"pip install [^;&]*", text)
    ]
    assert installs
    for command in installs:
        # Without its dependencies the one thing named has a version of its own.
        assert "--constraint" in command or "--no-deps" in command, command


def test_its_extras_are_extras_of_the_package(dockerfile: Path) -> None:
    (extras,) = [text for name, text in _instructions(dockerfile) if name == "ARG" and text.startswith("EXTRAS=")]
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_nothing_is_fetched_by_address_and_no_secret_is_an_argument(dockerfile: Path) -> None:
    for name, text in _instructions(dockerfile):
        assert name not in ("ADD", "ENTRYPOINT"), text
        if name in ("ARG", "ENV"):
            assert not re.search(r"token|password|secret|key=", text, re.IGNORECASE), text


def test_the_build_context_has_what_the_package_is_built_from_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    packages = {name.partition("/")[0] for name in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    hook = PROJECT["tool"]["hatch"]["build"]["hooks"]["custom"]["path"]
    assert taken == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", hook}
