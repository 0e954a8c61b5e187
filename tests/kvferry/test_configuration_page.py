"""docs/configuration.md: every option, as the code declares it."""

from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeConfig
from docs.configuration import MARK, PAGE, tables
from kvferry.__main__ import build_parser
from kvferry.cluster_file import settle
from kvferry.cluster_spec import ClusterSpec
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import parse_config
from runtime.config_file import Section, read_config_file
from runtime.config_options import options_of


def test_the_tables_are_current() -> None:
    assert PAGE.read_text().partition(MARK)[2] == "\n\n" + tables(), "run `make config-page`"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (RouterConfig, "--http-port=0 --api-keys-file=/k --strict-handoff --require-transport=ucx,tcp"),
        (PrefillConfig, "--worker-id=prefill-0 --routers=r:1,r:2 --cache-dir=/c --transports=tcp --lease-s=1e-1"),
        (DecodeConfig, "--worker-id=decode-0 --routers=[::1]:1 --cache-dir=/c --pin-cpus=0 --weight-dtype=int8"),
    ],
)
def test_each_process_reads_what_it_prints(
    config: Any, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model=/m", "--cluster-secret-file=/s", *flags.split()]
    with pytest.raises(SystemExit):
        parse_config(config, [*argv, "--print-config"])
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert parse_config(config, ["--config", str(path)]) == parse_config(config, argv)


def test_the_examples_on_the_page_are_taken(tmp_path: Path) -> None:
    decode, cluster = (part.partition("```")[0] for part in PAGE.read_text().split("```yaml\n")[1:])
    path = tmp_path / "example.yaml"
    path.write_text(decode)
    config = DecodeConfig(**read_config_file(path, Section(options_of(DecodeConfig))), worker_id="decode-0")
    config.validate()
    path.write_text(cluster)
    arguments = settle(build_parser().parse_args(["up", f"--config={path}"]))
    assert arguments.sections["decode"] == {"speculative_tokens": 4, "log_level": "info"}
    ClusterSpec(model_dir=Path("/m"), served_model_name="m", **arguments.sections).validate()
