"""`kvferry demo`: the whole way on this machine in one go. A router, a prefill and a decode worker start; a prompt is
prefilled on one, its KV blocks move, the other streams the answer; the receipt proves it; everything stops."""

import argparse
import asyncio
from contextlib import aclosing
from pathlib import Path

from kv_transfer.options import TRANSPORTS
from kvferry.client import AsyncClient, chat_request
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.base import Command, absolute_path
from kvferry.commands.dtypes import add_dtype_arguments
from kvferry.commands.generation import Answer, answer_dict
from kvferry.commands.transfer import add_transfer_arguments, transfer_fields
from kvferry.commands.up import ProgressLines, show_event
from kvferry.console import Console
from kvferry.launchers.local import LocalCluster
from kvferry.model_prep import DEFAULT_CACHE_DIR, PREPARE_COMMAND, prepare_model
from kvferry.receipt_view import receipt_rows
from kvferry.run_dir import RunDir, process_start_ticks
from kvferry_rpc.common_pb2 import KVReceipt, SamplingParams

_MODEL = "smollm2-135m-instruct"
_PROMPT = "Why is the sky blue? Answer in two short sentences."
_ANSWER_TIMEOUT_S = 120.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=_MODEL, help="What to serve. Default: %(default)s.")
    parser.add_argument("--prompt", default=_PROMPT, help="What to ask. Default: %(default)s")
    parser.add_argument(
        "--cache-dir", type=absolute_path, default=DEFAULT_CACHE_DIR, help="Prepared models. Default: %(default)s."
    )
    add_dtype_arguments(parser)
    add_transfer_arguments(parser)


def _run(arguments: argparse.Namespace, console: Console) -> int:
    return asyncio.run(run_demo(arguments, console))


async def run_demo(
    arguments: argparse.Namespace,
    console: Console,
    *,
    commands: RoleCommands | None = None,
    prepare_command: tuple[str, ...] = PREPARE_COMMAND,
    run_root: Path | None = None,
) -> int:
    """Returns 0 when the answer came and its receipt proves the hand-off. Raises LaunchError or KvferryError."""
    progress = ProgressLines(console)
    model = await prepare_model(
        arguments.model,
        arguments.cache_dir,
        progress.show,
        command=prepare_command,
        weight_dtype=arguments.weight_dtype,
    )
    # Strict: however the router would weigh one short prompt, the demo shows it moving.
    spec = ClusterSpec(
        model_dir=model.path,
        served_model_name=model.name,
        strict_handoff=True,
        kv_cache_dtype=arguments.kv_cache_dtype,
        commands=commands or RoleCommands(),
        **transfer_fields(arguments),
    )
    run_dir = RunDir.create(root=run_root) if run_root else RunDir.create()
    cluster = LocalCluster(spec, run_dir, lambda event: show_event(event, console))
    await cluster.start()
    pids = cluster.pids
    try:
        answer = await _ask(cluster.grpc_address, model.name, arguments.prompt, console)
        clean = await cluster.stop()
    except BaseException:
        await cluster.kill()
        raise
    problems = _problems(answer)
    if not clean or any(process_start_ticks(pid) is not None for pid in pids.values()):
        problems.append("a process did not end by itself")
    console.emit({**answer_dict(answer, receipt=True), "problems": problems})
    for problem in problems:
        console.complain(f"demo failed: {problem}")
    if not problems:
        console.say("\nThe prompt was computed on one worker, its KV cache moved, verified, and decoded on the other.")
    return 1 if problems else 0


async def _ask(address: str, model: str, prompt: str, console: Console) -> Answer:
    sampling = SamplingParams(max_tokens=96, temperature=0.0)
    request_id, parts, finish = "", [], None
    console.say(f"\n> {prompt}")
    async with (
        AsyncClient(address, timeout_s=_ANSWER_TIMEOUT_S) as client,
        aclosing(client.generate(chat_request(model, [("user", prompt)], sampling))) as stream,
    ):
        async for part in stream:
            request_id = part.request_id
            parts.append(part.text)
            console.stream(part.text)
            if part.HasField("finish"):
                finish = part.finish
    console.say("\n")
    if finish is not None:
        console.table(receipt_rows(finish.receipt), indent="  ")
        console.say()
    return Answer(request_id, "".join(parts), finish)


def _problems(answer: Answer) -> list[str]:
    if answer.finish is None:
        return ["the stream ended without a finish"]
    problems = [] if answer.text.strip() else ["the answer is empty"]
    return problems + receipt_problems(answer.finish.receipt)


def receipt_problems(receipt: KVReceipt) -> list[str]:
    """What the receipt fails to prove, each as a sentence; empty when the hand-off was remote, whole and verified."""
    problems = []
    if receipt.prefill_worker == receipt.decode_worker or not receipt.blocks_sent:
        problems.append("no KV blocks moved from one worker to another")
    if receipt.tokens_recomputed:
        problems.append(f"{receipt.tokens_recomputed} prompt tokens were computed again on the decode worker")
    if not receipt.checksum_verified:
        problems.append("the checksums of the blocks were not verified")
    if receipt.transport not in TRANSPORTS:
        problems.append(f"the blocks moved over {receipt.transport or 'nothing'!r}, not over {', '.join(TRANSPORTS)}")
    return problems


COMMAND = Command("demo", "Start a cluster, send it a prompt, show the receipt, stop it.", _add_arguments, _run)
