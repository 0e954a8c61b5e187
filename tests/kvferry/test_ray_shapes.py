import pytest

from kvferry.launchers.ray_shapes import (
    GroupPlan,
    RayOptions,
    ResourcesError,
    WorkerShape,
    actor_name,
    no_room,
    parse_shape,
    plan_groups,
    processes_of,
)
from runtime.child_process import LaunchError


def test_a_shape_is_read_from_its_parts_and_defaults_to_one_cpu() -> None:
    assert parse_shape("") == WorkerShape(cpus=1.0, gpus=0.0, accelerator="", place="each")
    shape = parse_shape("gpus=2, accelerator=H100,place=strict-spread")
    assert shape == WorkerShape(cpus=1.0, gpus=2.0, accelerator="H100", place="strict-spread")
    assert shape.bundle == {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H100": 0.001}
    assert parse_shape("cpus=0,gpus=0.5").bundle == {"GPU": 0.5}


@pytest.mark.parametrize("text", ["gpu=1", "gpus", "gpus=", "gpus=two", "cpus=1,cpus=2", "place"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition(",")[0].partition("=")[0]):
        parse_shape(text)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (WorkerShape(cpus=-1), "cpus must be 0 to 4096"),
        (WorkerShape(gpus=1.5), "gpus must be whole above 1"),
        (WorkerShape(gpus=float("nan")), "gpus must be 0 to 4096"),
        (WorkerShape(cpus=0), "needs some cpus or gpus"),
        (WorkerShape(accelerator="H100:8"), "accelerator must be a type"),
        (WorkerShape(place="anywhere"), "place must be each, pack, spread"),
    ],
)
def test_a_shape_out_of_range_is_refused_by_its_flag(shape: WorkerShape, said: str) -> None:
    with pytest.raises(ValueError, match=f"--decode-shape.*{said}"):
        RayOptions(decode=shape).validate()


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a" * 65, "ä"])
def test_a_cluster_name_that_could_be_another_ones_prefix_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--ray-cluster"):
        RayOptions(cluster=name).validate()


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ":6379", "head:port", "a b:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="--ray-address must be HOST:PORT"):
        RayOptions(address=address).validate()


def test_each_worker_has_a_group_of_its_own_unless_the_pool_is_to_lie_so_and_so() -> None:
    alone = plan_groups("main", "decode", WorkerShape(), ["decode-0", "decode-1"])
    assert [(plan.name, plan.members) for plan in alone] == [
        ("main/decode-0", ("decode-0",)),
        ("main/decode-1", ("decode-1",)),
    ]
    (together,) = plan_groups("main", "decode", WorkerShape(place="spread"), ["decode-0", "decode-1"])
    assert together == GroupPlan("main/decode-0+1", "SPREAD", {"CPU": 1.0}, ("decode-0", "decode-1"))
    # One that is added while a member of that group lives has another name.
    assert plan_groups("main", "decode", WorkerShape(place="spread"), ["decode-0"])[0].name != together.name
    assert plan_groups("main", "prefill", WorkerShape(place="pack"), []) == []


def test_processes_of_a_cluster_are_its_own_and_in_order() -> None:
    names = [actor_name("main", name) for name in ("decode-10", "decode-2", "prefill-0", "router")]
    assert processes_of("main", [*names, "main2/decode-0", "mai/decode-1"]) == [
        "router",
        "prefill-0",
        "decode-2",
        "decode-10",
    ]


def test_no_room_names_what_was_asked_and_what_there_is() -> None:
    plans = plan_groups(
        "main", "decode", WorkerShape(gpus=1, accelerator="H100", place="strict-spread"), ["d-0", "d-1"]
    )
    plans += plan_groups("main", "prefill", WorkerShape(cpus=4), ["prefill-0"])
    nodes = {"10.0.0.1": {"CPU": 8.0, "memory": 9e9, "accelerator_type:A100": 1.0}, "10.0.0.2": {"CPU": 2.0}}
    error = no_room(plans, 60.0, nodes, {"CPU": 3.5})
    assert isinstance(error, ResourcesError)
    assert isinstance(error, LaunchError)
    assert str(error).startswith(
        "Ray found no room within 60 s for d-0, d-1: CPU 1, GPU 1, a node with H100 each, strict-spread; "
        "prefill-0: CPU 4. There is node 10.0.0.1: CPU 8, a node with A100; node 10.0.0.2: CPU 2; "
        "unused in all: CPU 3.5. "
    )
