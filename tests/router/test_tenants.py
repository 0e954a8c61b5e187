"""API keys: who is let in, with what, and what a change of the file does (H033)."""

import ast
import hashlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest

import router.tenants
from kv_cache.block_hash import hash_blocks, root_hash
from kvferry_rpc.common_pb2 import ErrorCode
from router.tenants import MAX_KEY_CHARS, TenantDirectory, key_of, parse_entries
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from runtime.limits import MAX_CACHE_SALT_BYTES, MAX_PRIORITY

SECRET = b"the secret of a cluster"
PROMPT = list(range(64))


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(tenant: str, *keys: str, **fields: Any) -> str:
    return json.dumps({"tenant": tenant, "key_sha256": list(map(digest, keys)), **fields})


def write(path: Path, *lines: str) -> None:
    """Replace the file, as an editor or a mounted secret does."""
    other = path.with_suffix(".new")
    other.write_text("\n".join(lines) + "\n")
    other.rename(path)


class World:
    """A directory over a file, and the hand that moves time."""

    def __init__(self, tmp_path: Path, *lines: str) -> None:
        self.clock = ManualClock(50.0)
        self.path = tmp_path / "keys"
        write(self.path, *lines)
        self.directory = TenantDirectory(self.path, SECRET, self.clock)

    def refused(self, key: str | None) -> bool:
        with pytest.raises(KvferryError) as caught:
            self.directory.authenticate(key)
        assert caught.value.http_status == 401
        return caught.value.code == ErrorCode.UNAUTHENTICATED


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "# tenants", "", entry("red", "red-1", "red-2"), entry("blue", "blue-1", weight=3.0))


def test_each_key_of_a_tenant_is_its_key(world: World) -> None:
    names = [world.directory.authenticate(key).name for key in ("red-1", "red-2", "blue-1")]
    assert names == ["red", "red", "blue"]
    assert world.directory.needs_key


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "red-3",
        "red-1 ",
        "RED-1",
        digest("red-1"),
        "k\u00e9y",
        "\udcff",
        "\U0001f600",
        "x" * 10_000,
        "red-1\0",
    ],
)
def test_anything_else_is_refused_and_nothing_breaks(world: World, key: str | None) -> None:
    assert world.refused(key)


def test_a_key_may_have_any_length_up_to_the_bound(tmp_path: Path) -> None:
    key = "x" * MAX_KEY_CHARS
    world = World(tmp_path, entry("red", key, key + "x"))
    assert world.directory.authenticate(key).name == "red"
    assert world.refused(key + "x")


def test_all_digests_are_compared_in_constant_time_whichever_matches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(router.tenants.hmac, "compare_digest", counting)
    for key in ("red-1", "red-2", "blue-1"):
        compared.clear()
        world.directory.authenticate(key)
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}
    compared.clear()
    assert world.refused("nobody")
    assert len(compared) == 3


def test_no_digest_is_compared_by_equality() -> None:
    tree = ast.parse(Path(str(router.tenants.__file__)).read_text())
    method = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "authenticate")
    compares = [node for node in ast.walk(method) if isinstance(node, ast.Compare)]
    assert not [node for node in compares if any(isinstance(op, ast.Eq | ast.NotEq | ast.In) for op in node.ops)]


def test_keys_come_in_either_header() -> None:
    assert key_of("Bearer abc", None) == "abc"
    assert key_of("bearer   abc ", "other") == "abc"
    assert key_of(None, "abc") == "abc"
    assert key_of("Basic abc", "right") == "right"
    assert key_of("Bearer", "right") == "right"
    assert key_of("Basic abc", None) is None
    assert key_of(None, None) is None


def test_without_a_file_everybody_is_one_tenant_that_may_do_all() -> None:
    directory = TenantDirectory(None, SECRET, ManualClock())
    for key in (None, "anything", "k\u00e9y"):
        tenant = directory.authenticate(key)
        assert (tenant.name, tenant.is_limited, tenant.salt_for(None)) == ("", False, b"")
        assert tenant.check_priority(MAX_PRIORITY) == MAX_PRIORITY
    assert not directory.needs_key
    assert directory.find("") is not None
    assert directory.weight("") == 1.0


def test_a_changed_file_is_read_at_the_next_look_and_a_key_that_left_it_opens_nothing(world: World) -> None:
    write(world.path, entry("blue", "blue-1", weight=5.0), entry("green", "green-1"))
    assert world.directory.authenticate("red-1").name == "red"
    world.clock.advance(1.0)
    assert world.refused("red-1")
    assert world.directory.authenticate("green-1").name == "green"
    assert world.directory.find("red") is None
    assert (world.directory.weight("blue"), world.directory.weight("red")) == (5.0, 1.0)


def test_a_file_changed_in_place_is_seen(world: World) -> None:
    text = world.path.read_text().replace(digest("red-1"), digest("red-9"))
    world.path.write_text(text)
    os.utime(world.path, ns=(1, 1))
    world.clock.advance(1.0)
    assert world.directory.authenticate("red-9").name == "red"
    assert world.refused("red-1")


@pytest.mark.parametrize("broken", ["{", '{"tenant": "red"}', "", None])
def test_a_broken_file_keeps_the_keys_there_were_and_is_logged_once(
    world: World, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if broken is None:
        world.path.unlink()
    else:
        write(world.path, broken)
    for _ in range(3):
        world.clock.advance(1.0)
        if broken == "":
            assert world.refused("red-1")  # A file without tenants is no broken one.
        else:
            assert world.directory.authenticate("red-1").name == "red"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (0 if broken == "" else 1)
    assert all(str(world.path) in error for error in errors)
    write(world.path, entry("green", "green-1"))
    world.clock.advance(1.0)
    assert world.directory.authenticate("green-1").name == "green"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"tenant": "red", "key_sha256": "abc"}'], "line 1"),
        ([entry("", "x")], "line 1"),
        (["", entry("a b", "x")], "line 2"),
        ([entry("red", "x", surprise=1)], "surprise"),
        ([entry("red", "x", weight=0)], "weight"),
        ([entry("red", "x", max_in_flight=0)], "max_in_flight"),
        ([entry("red", "x", max_priority=101)], "max_priority"),
        ([entry("red")], "key_sha256"),
        ([entry("red", "x"), entry("red", "y")], "red is there twice"),
        ([entry("red", "x"), entry("blue", "x")], "red and blue have the same key"),
        (["[" * 100_000], "line 1"),
        ([entry("red", *map(str, range(17)))], "key_sha256"),
    ],
)
def test_a_bad_file_is_refused_at_the_start_by_its_line(tmp_path: Path, lines: list[str], words: str) -> None:
    path = tmp_path / "keys"
    write(path, *lines)
    with pytest.raises(ValueError, match=words):
        TenantDirectory(path, SECRET, ManualClock())


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\n" * (4 * 1024 * 1024 + 1))
    with pytest.raises(ValueError, match="larger"):
        TenantDirectory(path, SECRET, ManualClock())
    with pytest.raises(OSError):
        TenantDirectory(tmp_path / "nothing", SECRET, ManualClock())


def test_one_digest_need_not_be_a_list() -> None:
    (found,) = parse_entries(json.dumps({"tenant": "red", "key_sha256": digest("x")}).encode())
    assert found.key_sha256 == digest("x")


def test_a_priority_above_the_tenants_is_refused_by_name(tmp_path: Path) -> None:
    tenant = World(tmp_path, entry("red", "red-1", max_priority=5)).directory.authenticate("red-1")
    assert tenant.check_priority(5) == 5
    assert tenant.check_priority(-100) == -100
    with pytest.raises(KvferryError) as caught:
        tenant.check_priority(6)
    assert (caught.value.http_status, caught.value.field) == (400, "priority")


def block_names(salt: bytes) -> set[bytes]:
    return set(hash_blocks(root_hash("model", "revision", 16, "float32", salt), PROMPT, 16))


def test_equal_prompts_of_two_tenants_have_no_block_name_in_common(world: World) -> None:
    red, blue = (world.directory.authenticate(key) for key in ("red-1", "blue-1"))
    salts = [tenant.salt_for(client) for tenant in (red, blue) for client in (None, "a", "b", "red", "blue")]
    # What a client might name to reach another one's blocks: nothing it says is a salt by itself.
    salts += [red.salt_for(blue.salt.hex()), red.salt_for("tenant blue"), b""]
    named: set[bytes] = set()
    for salt in salts:
        names = block_names(salt)
        assert len(names) == 4
        assert not names & named
        named |= names
        assert len(salt) <= MAX_CACHE_SALT_BYTES


def test_salts_are_the_same_in_every_router_of_a_cluster_and_of_no_other(world: World, tmp_path: Path) -> None:
    clock = ManualClock()
    same = TenantDirectory(world.path, SECRET, clock)
    other = TenantDirectory(world.path, b"another secret of a cluster", clock)
    red = world.directory.authenticate("red-1")
    assert same.authenticate("red-2").salt_for("x") == red.salt_for("x")
    assert other.authenticate("red-1").salt_for("x") != red.salt_for("x")
    anonymous = [TenantDirectory(None, secret, clock).authenticate(None) for secret in (SECRET, SECRET, b"another one")]
    salts = [tenant.salt_for("x") for tenant in anonymous]
    assert salts[0] == salts[1] != salts[2]
    assert salts[0] != anonymous[0].salt_for("y") != b""


def test_neither_salts_nor_keys_are_shown_by_accident(world: World) -> None:
    tenant = world.directory.authenticate("red-1")
    assert tenant.salt.hex() not in repr(tenant)
    assert repr(tenant.salt) not in repr(tenant)
