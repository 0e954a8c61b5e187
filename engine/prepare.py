"""Turn a model into kvferry's own form, once, however many processes ask at the same time.

1. Find the source and name its content by a digest.
2. A directory for that digest exists in the cache: open it. Done.
3. Take the file lock. Whoever waited finds the work done by the one before, and goes to 2.
4. Convert into a hidden directory beside the target, tensor by tensor; write it to the disk; rename it.
   A failure, or a process that dies, leaves no target. The next one to hold the lock clears what is left over.

`python -m engine.prepare SOURCE` does this from the command line.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from engine.checkpoint import ModelReader, check_tensor_names, open_checkpoint, write_json
from engine.fallback_manifest import fallback_manifest, fallback_revision
from engine.families import parse_eos_token_ids, parse_model_config
from engine.gguf_source import GgufFile
from engine.model_config import unusable
from engine.model_source import (
    INDEX_FILE,
    ModelSource,
    SourceDigest,
    SourceKind,
    digest_source,
    resolve_source,
    weight_files,
)
from engine.models.fallback import load_fallback
from engine.models.fallback_probe import probe_shape
from engine.options import DEFAULT_CACHE_DIR
from engine.prepared_model import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    PreparedModel,
    is_prepared,
    manifest,
    open_prepared,
)
from engine.tensor_map import fuse, prepared_tensors
from engine.weight_dtypes import WeightDtype, source_of, stored, stored_forms
from engine.weights import write_weights
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

# What is being done, in words, and how far the whole preparation is, 0 to 1; never goes back.
Progress = Callable[[str, float], None]

# Where in the whole each part ends.
_HASHED, _OPENED, _TOKENIZER, _CHECKED, _WRITTEN = 0.1, 0.2, 0.4, 0.7, 0.95
_SPARE_BYTES = 64 * 1024 * 1024


def prepare_model(
    source: str | Path, cache_dir: Path, progress: Progress, weight_dtype: WeightDtype | None = None
) -> PreparedModel:
    """The model, converted now or before. A prepared directory given as `source` is used as it is.

    `weight_dtype`: how the weights are stored; None = fp32, or what a prepared directory has.
    Blocks for as long as the conversion takes (seconds to minutes), also when another process does it.
    Raises KvferryError: UNKNOWN_MODEL for a source that does not exist, INVALID_REQUEST for one that is damaged or
    not supported or prepared in another dtype, UNAVAILABLE when the cache directory cannot be written or its disk is
    full.
    """
    found = resolve_source(source)
    if found.kind is SourceKind.PREPARED:
        return _as_wanted(open_prepared(found.path), weight_dtype)
    digest = digest_source(found, lambda fraction: progress("reading the source", fraction * _HASHED))
    digest = _of_dtype(digest, weight_dtype or WeightDtype.FP32)
    cache_dir = cache_dir.expanduser().absolute()
    target = cache_dir / f"{found.name}-{digest.key}"
    ready = _open_if_whole(target)
    if ready is None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _locked(cache_dir / f".{target.name}.lock", progress):
                ready = _open_if_whole(target) or _convert(
                    found, digest, weight_dtype or WeightDtype.FP32, target, progress
                )
        except OSError as error:
            raise KvferryError(
                ErrorCode.UNAVAILABLE,
                f"cannot prepare {found.name} in {cache_dir}: {error.strerror or error}",
                field="cache_dir",
            ) from error
    progress("ready", 1.0)
    return ready


def _as_wanted(model: PreparedModel, weight_dtype: WeightDtype | None) -> PreparedModel:
    if weight_dtype not in (None, model.weight_dtype):
        raise unusable(
            f"{model.path} was prepared in {model.weight_dtype.value}, not {weight_dtype.value}: name its source"
        )
    return model


def _of_dtype(digest: SourceDigest, dtype: WeightDtype) -> SourceDigest:
    """Other weights give other K and V: models of unequal dtype are different models."""
    if dtype is WeightDtype.FP32:
        return digest
    revision = hashlib.sha256(f"{digest.revision} {dtype.value}".encode()).hexdigest()
    return SourceDigest(revision[: len(digest.revision)], f"{digest.key}-{dtype.value}")


def _open_if_whole(target: Path) -> PreparedModel | None:
    if not is_prepared(target):
        return None
    try:
        return open_prepared(target)
    except KvferryError:
        return None  # damaged since it was made: the source is at hand, so it is made again


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is preparing this model", _HASHED)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(
    source: ModelSource, digest: SourceDigest, dtype: WeightDtype, target: Path, progress: Progress
) -> PreparedModel:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        progress(f"opening {source.path.name}", _HASHED)
        with _open_source(source) as reader:
            _write(source, digest, dtype, reader, partial, progress)
        _sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_prepared(target)


def _open_source(source: ModelSource) -> AbstractContextManager[ModelReader]:
    if source.kind is SourceKind.GGUF:
        return nullcontext(GgufFile(source.path))
    return open_checkpoint(source.path)


def _write(
    source: ModelSource,
    digest: SourceDigest,
    dtype: WeightDtype,
    reader: ModelReader,
    target: Path,
    progress: Progress,
) -> None:
    try:
        config = parse_model_config(reader.config_json)
    except KvferryError as error:
        if dtype is not WeightDtype.FP32:
            raise unusable(
                f"{error.message}; and without native code weights stay as they are, not {dtype.value}"
            ) from error
        _write_fallback(source, digest, reader, target, error, progress)
        return
    parse_eos_token_ids(reader.generation_config_json, reader.config_json, config.vocab_size)
    check_tensor_names(reader.tensor_names, config, source.path)
    tensors = {tensor.name: tensor for tensor in prepared_tensors(config)}
    forms = stored_forms(tensors.values(), dtype)
    total_bytes = sum(form.num_bytes for form in forms.values())
    _check_space(target, total_bytes)
    progress("writing the tokenizer", _OPENED)
    reader.write_tokenizer(target)
    done_bytes = 0

    def produce(name: str) -> torch.Tensor:
        nonlocal done_bytes
        progress("converting weights", _TOKENIZER + (_WRITTEN - _TOKENIZER) * done_bytes / total_bytes)
        done_bytes += forms[name].num_bytes
        return stored(name, forms[name], fuse(tensors[source_of(name)], config.head_dim, reader.read))

    write_weights(target / WEIGHTS_NAME, forms, produce)
    progress("writing to the disk", _WRITTEN)
    write_json(target / CONFIG_NAME, reader.config_json)
    write_json(target / GENERATION_CONFIG_NAME, reader.generation_config_json)
    weights_bytes = (target / WEIGHTS_NAME).stat().st_size
    facts = manifest(source.name, digest.revision, str(source.path), dtype, weights_bytes)
    write_json(target / MANIFEST_NAME, facts)


def _write_fallback(
    source: ModelSource,
    digest: SourceDigest,
    reader: ModelReader,
    target: Path,
    not_native: KvferryError,
    progress: Progress,
) -> None:
    """For a model without native code: the checkpoint as it is, if transformers can compute it over the paged pool."""
    if source.kind is SourceKind.GGUF:
        raise not_native
    progress("asking transformers about the model", _OPENED)
    try:
        shape = probe_shape(source.path)
    except KvferryError as error:
        raise unusable(f"{not_native.message}; transformers cannot stand in: {error.message}") from error
    files = [name for name in (*weight_files(source.path), INDEX_FILE) if (source.path / name).is_file()]
    sizes = {name: (source.path / name).stat().st_size for name in files}
    _check_space(target, sum(sizes.values()))
    parse_eos_token_ids(reader.generation_config_json, reader.config_json, shape.vocab_size)
    reader.write_tokenizer(target)
    for number, name in enumerate(files):
        progress("copying weights", _TOKENIZER + (_CHECKED - _TOKENIZER) * number / len(files))
        shutil.copyfile(source.path / name, target / name)
    write_json(target / CONFIG_NAME, reader.config_json)
    write_json(target / GENERATION_CONFIG_NAME, reader.generation_config_json)
    progress("comparing with transformers", _CHECKED)
    load_fallback(target, shape)
    progress("writing to the disk", _WRITTEN)
    facts = fallback_manifest(
        name=source.name,
        revision=fallback_revision(digest.revision),
        source=str(source.path),
        shape=shape,
        weight_bytes=sizes,
    )
    write_json(target / MANIFEST_NAME, facts)


def _check_space(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise KvferryError(
            ErrorCode.UNAVAILABLE,
            f"{directory.parent} has {free_bytes >> 20} MiB free, but the prepared weights need "
            f"{(needed_bytes + _SPARE_BYTES) >> 20} MiB: make room or choose another cache directory",
            field="cache_dir",
        )


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 when the model cannot be prepared."""
    parser = argparse.ArgumentParser(prog="python -m engine.prepare", description="Convert a model for kvferry.")
    parser.add_argument("source", help="a model directory, a .gguf file, or smollm2-135m-instruct")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    parser.add_argument("--weight-dtype", choices=[dtype.value for dtype in WeightDtype], help="default: fp32")
    parser.add_argument("--link", type=Path, help="make this a symbolic link to the prepared model")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args(argv)
    report = _Report(as_json=arguments.json)
    try:
        dtype = WeightDtype(arguments.weight_dtype) if arguments.weight_dtype else None
        model = prepare_model(arguments.source, arguments.cache_dir, report.progress, dtype)
        if arguments.link is not None:
            _link(arguments.link, model.path)
    except KvferryError as error:
        report.line({"event": "error", "code": error.code_name, "message": error.message}, f"error: {error.message}")
        return 1
    facts = {"event": "ready", "path": str(model.path), "name": model.name, "revision": model.revision}
    report.line(facts, str(model.path))
    return 0


def _link(link: Path, target: Path) -> None:
    """Make `link` point at `target`, in place of what it pointed at before: one that is read always leads somewhere.
    Raises KvferryError: UNAVAILABLE when it cannot be made."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(target.absolute())
        fresh.replace(link)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise KvferryError(ErrorCode.UNAVAILABLE, f"cannot make the link {link}: {error.strerror or error}") from error


class _Report:
    """Prints a line when the stage changes or five more percent are done."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: tuple[str, float] = ("", 0.0)

    def progress(self, stage: str, fraction: float) -> None:
        last_stage, last_fraction = self._last
        if stage != last_stage or fraction >= last_fraction + 0.05:
            self._last = (stage, fraction)
            self.line({"event": "progress", "stage": stage, "fraction": round(fraction, 3)}, f"{fraction:4.0%} {stage}")

    def line(self, facts: Mapping[str, object], text: str) -> None:
        sys.stdout.write((json.dumps(facts) if self._as_json else text) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
