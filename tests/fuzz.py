"""Hostile input to every door that reads what others wrote: `python -m tests.fuzz --seconds 600`.

Manifests, rows, checkpoints, rewards, run folders and the port of `orbit serve` are each given damaged or absurd
content, drawn from a fixed seed. Every case is a child process of one that has imported everything. What needs no torch
comes first; then each kind gets the same time. A finding is an end with 70 or by a signal, no end within the limit, too
much said, or damage that nobody is told of; the command prints it as a line of JSON and ends with 1.

Belongs here: drawing cases, carrying them out, judging their ends. Does not belong here: the right answer to one known
case (the tests of the part that gives it).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_SECONDS = {"manifests": 4.0, "rows": 4.0, "headers": 4.0, "folders": 4.0}
"""Processor time of one command, which does not depend on what else the machine does. One whose processes have all
slept for so long waits for what never comes."""
LONGEST_SECONDS = 20.0
"""The same of other kinds, whose commands compute."""
EARLY = 8
"""Cases of each kind that needs no torch before it is imported."""
WALL_SECONDS = 900.0
ANSWER_SECONDS = 60.0
"""Of a port on an idle machine; multiplied by how much slower this one is."""
HEAD_SECONDS = 40.0
"""By then a port has closed a connection whose head does not arrive."""
OUTPUT_BYTES = 64 << 10
GROWTH_BYTES = 300 << 20
"""Memory that a port may take for requests that it refuses."""
DATA_BYTES = 6 << 30

MANIFEST = """\
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {name: fuzzed, annotations: {a: b}}
spec:
  model: {uri: "builtin://tiny-adder", precision: INT4}
  algorithm: {groupSize: 4}
  data: {prompts: [{uri: "builtin://two-digit-addition"}], seed: 0}
  environment:
    rewards: [{name: correct, type: ExactMatch}]
  rollout: {sampling: {maxNewTokens: 4}}
  training: {steps: 1, promptsPerStep: 2, learningRate: 0.001}
  checkpoint: {everySteps: 1}
  storage: {uri: runs/a}
  observability: {metricsPort: -1}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One command of `orbit` on input that was written for it."""

    what: str
    argv: Sequence[str]
    told: str | None = None
    """What its output must hold where it ends with 0: damage that it should have noticed."""


@dataclass(frozen=True, slots=True)
class End:
    """How a command ended: its exit code, negative for a signal, None if it did not end."""

    code: int | None
    said: bytes


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    what: str
    why: str
    said: str = ""

    @property
    def sort(self) -> str:
        """The same for findings of one cause, as far as that can be seen from outside."""
        is_told = self.why == "ended with 70"
        return re.sub(r"\d+|'.*?'|/\S+", "#", f"{self.kind} {self.why} {self.said[-120:] if is_told else self.what}")


def carry_out(argv: Sequence[str], folder: Path, seconds: float) -> End:
    """One command in a child of this process, in a session of its own; its folder holds what it printed."""
    output = folder / ".output"
    pid = os.fork()
    if not pid:
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(written, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
            from orbit_runtime.cli.main import run_command

            code = run_command(argv)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)
    status, began = None, time.monotonic()
    used, moved_at, looked_at = 0.0, began, began
    while status is None and used < seconds and time.monotonic() < min(moved_at + seconds, began + WALL_SECONDS):
        time.sleep(0.02)
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        if status is None and time.monotonic() > looked_at + 1.0:
            looked_at = time.monotonic()
            now, is_awake = processor_time(pid)
            if is_awake or now != used:
                used, moved_at = now, looked_at
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    data = output.read_bytes() if output.exists() else b""
    return End(None if status is None else os.waitstatus_to_exitcode(status), data)


def processor_time(session: int) -> tuple[float, bool]:
    """Seconds that the processes of a session and their children have computed; whether one of them would go on now."""
    ticks, is_awake = 0, False
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = place.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session or int(fields[1]) == session:
                ticks += sum(map(int, fields[11:15]))
                is_awake |= fields[0] in "RD"
    return ticks / os.sysconf("SC_CLK_TCK"), is_awake


def judge(kind: str, case: Case, end: End) -> Finding | None:
    said = end.said[-300:].decode(errors="replace").strip()
    if end.code is None:
        return Finding(kind, case.what, "no end within the limit", said)
    if end.code < 0:
        return Finding(kind, case.what, f"ended by {signal.Signals(-end.code).name}", said)
    if end.code == 70:
        return Finding(kind, case.what, "ended with 70", said)
    if len(end.said) > OUTPUT_BYTES:
        return Finding(kind, case.what, f"said {len(end.said) >> 10} KiB", said)
    if end.code == 0 and case.told is not None and not re.search(case.told, end.said.decode(errors="replace")):
        return Finding(kind, case.what, "passed without a word", said)
    return None


# --- what is drawn ---

SCALARS = {
    "an empty binary number": "0b_",
    "a megabyte that may be a number": "1_" * 500_000,
    "half of a pair": r'"\ud800"',
    "memory": "/proc/self/mem",
    "a list of thousands that may be numbers": "[" + "1_0," * 2000 + "1_0]",
    "a megabyte": "x" * 1_000_000,
    "an empty octal number": "-0o_",
    "a hexadecimal number of thousands of digits": "0x" + "f" * 5000,
    "a number of thousands of digits": "9" * 5000,
    "an escape beyond Unicode": r'"\UFFFFFFFF"',
    "an escaped NUL": r'"a\0b"',
    "no number": ".nan",
    "too large a number": "1e400",
    "a number below zero": "-7",
    "the root": "/",
    "nobody's folder": "~nouser/x",
    "a password": '"https://user:pass@host/x"',
    "a scheme without slashes": "s3:/bucket",
    "a control character": r'"\e]0;x\a"',
    "a deep list": "[" * 2000,
    "a block": "{a: {b: 1}}",
    "nothing": "null",
}
PLACES = (
    ("steps: 1", "steps: {}"), ("annotations: {a: b}", "annotations: {{a: {}}}"), ("name: fuzzed", "name: {}"),
    ('prompts: [{uri: "builtin://two-digit-addition"}]', "prompts: [{{uri: {}}}]"), ("uri: runs/a", "uri: {}"),
    ("  environment:\n", "  environment:\n    code: {{uri: {}}}\n"), ('uri: "builtin://tiny-adder"', "uri: {}"),
    ("learningRate: 0.001", "learningRate: {}"), ("everySteps: 1", "everySteps: 1, resumeFrom: {}"),
)  # fmt: skip


def manifests(draw: random.Random, folder: Path) -> Iterator[Case]:
    first = draw.randrange(len(PLACES))
    # Each value somewhere, before one comes a second time.
    for turn, (at, name) in itertools.product(range(len(PLACES)), enumerate(SCALARS)):
        old, new = PLACES[(first + turn + at) % len(PLACES)]
        text = MANIFEST.replace(old, new.format(SCALARS[name]))
        (folder / "m.yaml").write_text(text)
        yield Case(f"{name} in {new}", ["validate", "m.yaml"])
    while True:
        text = bytearray(MANIFEST.encode())
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.choice(b"\0\t{}[]:&*!|>'\"%@`-#,?\\\x80\xff~0x_")
        (folder / "m.yaml").write_bytes(text)
        yield Case("bytes of a manifest", ["validate", "m.yaml"])


def write_tables(rows: Sequence[dict[str, str]], folder: Path) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table = pyarrow.table({key: [each[key] for each in rows] for key in rows[0]})
    pyarrow.feather.write_feather(table, str(folder / "whole.arrow"), compression="uncompressed")
    pyarrow.parquet.write_table(table, str(folder / "whole.parquet"))


def rows(draw: random.Random, folder: Path) -> Iterator[Case]:
    import zstandard

    listed = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 90)] * 5
    lines = "".join(json.dumps(each) + "\n" for each in listed).encode()
    packed, ends = io.BytesIO(), []
    with zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as writer:
        for start in range(0, len(listed), 40):
            writer.write("".join(json.dumps(each) + "\n" for each in listed[start : start + 40]).encode())
            writer.flush()
            ends.append(packed.tell())
    # In a child: the library starts threads, which this process must not have when it forks.
    if not (pid := os.fork()):
        write_tables(listed, folder)
        os._exit(0)
    os.waitpid(pid, 0)
    whole = {suffix: (folder / f"whole.{suffix}").read_bytes() for suffix in ("arrow", "parquet")}
    whole |= {"jsonl.zst": packed.getvalue(), "jsonl": lines, "csv": b"prompt,answer\n" + b"1+1=,2\n" * 50}
    texts = {"a name twice": '{"prompt": "1", "answer": "2", "answer": "3"}', "NaN": '{"prompt": "1", "answer": NaN}',
             "deep": '{"prompt": ' + "[" * 5000, "digits": '{"prompt": "1", "answer": ' + "9" * 5000 + "}",
             "no object": "[1]", "NUL": '{"prompt": "\\u0000", "answer": "\\ud800"}'}  # fmt: skip
    offset = whole["arrow"].index(b"10+10=")
    for number in itertools.count():
        for each in folder.glob("p.*"):
            each.unlink()
        kind, told = ("cut", "offsets", "pipe", "text", "flip", "loop")[number % 6], None
        suffix = draw.choice([*whole])
        if kind in ("pipe", "loop"):
            path = folder / "p.jsonl"
            os.mkfifo(path) if kind == "pipe" else path.symlink_to(path)
        elif kind == "text":
            name = draw.choice([*texts])
            path = folder / "p.jsonl"
            path.write_bytes(lines + texts[name].encode() + b"\n")
            kind, told = f"a row with {name}", "." if name == "a name twice" else None
        else:
            if kind == "cut":
                suffix, told = "jsonl.zst", "."
                data = whole[suffix][: draw.choice(ends[:-1]) + draw.choice((0, 0, 1, -3))]
            elif kind == "offsets":
                # An end of a text: four bytes somewhere in the page of offsets before the texts.
                suffix, data = "arrow", bytearray(whole["arrow"])
                at = offset - 64 - 4 * draw.randrange(300)
                data[at : at + 4] = (2**31 - 2).to_bytes(4, "little")
            else:
                data = bytearray(whole[suffix])
                for _ in range(3):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path = folder / f"p.{suffix}"
            path.write_bytes(data)
        text = MANIFEST.replace('"builtin://two-digit-addition"', path.name)
        (folder / "m.yaml").write_text(text)
        told = r"error|warning|note" if told else None
        yield Case(f"{kind} of {path.name}", ["validate", "m.yaml"], told)


VALUES = {
    "deep": "[" * 20_000, "digits": "9" * 5000, "below zero": "-1", "none": "0", "ten million": "10000000",
    "too large": "1e400", "NaN": "NaN", "a text": '"x"', "a pattern": '["re:["]', "true": "true", "null": "null",
    "an object": '{"a": 1}', "a list of lists": "[[]]", "99999": "99999",
}  # fmt: skip
SETTINGS = ("num_hidden_layers", "eos_token_id", "vocab_size", "rms_norm_eps", "hidden_size", "quantization_config",
            "rope_scaling", "model_type", "head_dim", "max_position_embeddings", "architectures")  # fmt: skip
PLACES_OF_SHARDS = ("7", '"../source/model.safetensors"', '"/etc/passwd"', "[]", '"a\\u0000"', '"a.safetensors"')
TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "a gigabyte": "{{ 'a' * 1000000000 }}",
    "a control character": "{{ raise_exception('\x1b]0;x\x07') }}",
    "itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
}


def copied_model(folder: Path) -> Path:
    """A checkpoint as it ships, to be damaged."""
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(Path(sys.modules["orbit_runtime"].__path__[0]) / "model_info/builtin/tiny-adder/bf16", model)
    return model


def headers(draw: random.Random, folder: Path) -> Iterator[Case]:
    """What `orbit inspect` reads of a checkpoint: settings, headers, indexes."""
    source = copied_model(folder).rename(folder / "source")
    config = json.loads((source / "config.json").read_text())
    (weights,) = source.glob("*.safetensors")
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")
    # First a number that is one, and more than any machine has: other values are refused by their type.
    settings = sorted(
        itertools.product(SETTINGS, VALUES),
        key=lambda pair: (pair[1] != "ten million", pair[0] != "num_hidden_layers", draw.random()),
    )
    given, places = itertools.cycle(settings), itertools.cycle(PLACES_OF_SHARDS)
    fields = zip(itertools.cycle(["shape", "__metadata__", "dtype", "data_offsets"]), itertools.cycle(VALUES))
    for number in itertools.count():
        model, told = copied_model(folder), None
        kind = ("setting", "header", "index", "pipe", "header", "setting")[number % 6]
        if kind == "setting":
            field, name = next(given)
            (model / "config.json").write_text(replaced(config, field, VALUES[name]))
            what = f"{field} is {name}"
        elif kind == "index":
            (model / weights.name).rename(model / "a.safetensors")
            place = next(places)
            names = ", ".join(f'"{each}": {place}' for each in header if each != "__metadata__")
            (model / "model.safetensors.index.json").write_text('{"weight_map": {' + names + "}}")
            what, told = f"a weight_map to {place}", "error" if ".." in place else None
        elif kind == "pipe":
            what = "config.json is a pipe"
            (model / "config.json").unlink()
            os.mkfifo(model / "config.json")
        else:
            field, name = next(fields)
            if field == "__metadata__":
                text = replaced(header, field, VALUES[name])
            else:
                text = replaced({**header, first: None}, first, replaced(header[first], field, VALUES[name]))
            body = text.encode()
            (model / weights.name).write_bytes(len(body).to_bytes(8, "little") + body + data[8 + length :])
            what = f"{field} of a header is {name}"
        yield Case(what, ["inspect", "model"], told)


def models(
    draw: random.Random, folder: Path, command: Sequence[str] = ("run", "m.yaml", "--out", "out")
) -> Iterator[Case]:
    """What a run, or `orbit validate`, reads of a checkpoint: tokenizer, template, end-of-sequence, settings."""
    config = json.loads((copied_model(folder) / "config.json").read_text())
    for number in itertools.count():
        model, prompt, told = copied_model(folder), "12+34=", None
        kind, name = ("id", "eos", "pattern", "template", "setting")[number % 5], draw.choice([*VALUES])
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        if kind == "id":
            what, prompt, told = "an id beyond the rows of the embedding", "<img>1+1=", "error"
            added = {**tokenizer["added_tokens"][-1], "id": 104 + draw.randrange(9), "content": "<img>"}
            tokenizer["added_tokens"].append(added)
        elif kind == "pattern":
            what, prompt = "a pattern that runs away", "x" * 60 + "+"
            pattern = {"Regex": draw.choice(["(x+x+)+y", "(x*)*y", "(x|xx)+y"])}
            tokenizer["pre_tokenizer"] = {
                "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False,
            }  # fmt: skip
        elif kind == "template":
            what = draw.choice([*TEMPLATES])
            (model / "chat_template.jinja").write_text(TEMPLATES[what])
        elif kind == "eos":
            name = draw.choice([each for each in VALUES if each not in ("null", "none")])
            (model / "generation_config.json").write_text(replaced({}, "eos_token_id", VALUES[name]))
            what, told = f"eos_token_id is {name}", r"eos|end.of.sequence|error"
        else:
            field = draw.choice(SETTINGS)
            (model / "config.json").write_text(replaced(config, field, VALUES[name]))
            what = f"{field} is {name}"
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "46"}) + "\n")
        text = MANIFEST.replace('"builtin://two-digit-addition"', "p.jsonl").replace("INT4", "BF16")
        text = text.replace("promptsPerStep: 2", "promptsPerStep: 1").replace('"builtin://tiny-adder"', "./model")
        (folder / "m.yaml").write_text(text)
        shutil.rmtree(folder / "out", ignore_errors=True)
        yield Case(f"{what} ({command[0]})", command, told)


def replaced(block: dict[str, Any], field: str, text: str) -> str:
    """JSON of the block with this text as the field's value, which no writer of JSON would write."""
    mark = "\0value"
    return json.dumps({**block, field: mark}).replace(json.dumps(mark), text)


EARLIER_RUN = Path(__file__).parent / "data/earlier_run/run"
BAD_ROWS = {"null": b"null", "empty": b"", "an object": b"{}", "a list": b"[]", "bytes": b"\xff\xfe\0", "cut": None}


def folders(draw: random.Random, folder: Path) -> Iterator[Case]:
    """What `orbit report` reads of the folder of a run."""
    shutil.copytree(EARLIER_RUN, folder / "whole")
    # As before its rows were copied into one file, from which the report would take what is damaged.
    (folder / "whole/metrics.jsonl").unlink()
    yield from damaged_folders(draw, folder, ["report", "run"])


def resumes(draw: random.Random, folder: Path) -> Iterator[Case]:
    """What a run that goes on reads of its folder."""
    (folder / "m.yaml").write_text(MANIFEST.replace("steps: 1", "steps: 2"))
    assert carry_out(["run", "m.yaml", "--out", "whole"], folder, 600).code == 0
    (folder / "m.yaml").write_text(MANIFEST.replace("steps: 1", "steps: 3"))
    yield from damaged_folders(draw, folder, ["run", "m.yaml", "--out", "run"])


def damaged_folders(draw: random.Random, folder: Path, argv: Sequence[str]) -> Iterator[Case]:
    files = sorted(each.relative_to(folder / "whole") for each in (folder / "whole").rglob("*") if each.is_file())
    # Not the first: an earlier version lists no steps, and rows may begin with any.
    _, *metrics = [each for each in files if each.parts[0] == "metrics"]
    order = [(name, path) for name in BAD_ROWS for path in metrics[:1]] + [("a folder", Path("executions/000001.json"))]
    # The folder of an earlier version has no digests that a changed number would contradict.
    order += [("gone", metrics[0]), *([("changed", metrics[0])] if argv[0] == "run" else [])]
    for number in itertools.count():
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "run", symlinks=True)
        if number < len(order):
            name, path = order[number]
        else:
            name, path = draw.choice([*BAD_ROWS, "flip", "gone", "a folder", "a pipe"]), draw.choice(files)
        file = folder / "run" / path
        data = bytearray(file.read_bytes())
        told = r"\b(error|warning|note|missing|damaged|changed)\b" if path in metrics else None
        if name in BAD_ROWS:
            file.write_bytes(bytes(data[: len(data) // 2]) if BAD_ROWS[name] is None else BAD_ROWS[name] or b"")
        elif name == "flip" and data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(7)
            file.write_bytes(data)
            told = None
        elif name == "changed":
            file.write_bytes(re.sub(rb'("reward[^"]*": *)[0-9.]+', rb"\g<1>0.123", bytes(data)))
        else:
            file.unlink()
            if name == "a folder":
                file.mkdir()
            elif name == "a pipe":
                os.mkfifo(file)
        yield Case(f"{path} is {name} ({argv[0]})", argv, told)


WRITTEN = (
    "rubbish\\n",
    '["value", 1.0, "", 0.1]\\n',
    '["value", 1.0, "", 0.1]\\n' * 9,
    '{"taken": true}\\n',
    '["value", null, "", 0.1]\\n',
    '{"error": {}}\\n',
    "[[[[\\n",
    "\\xff\\n",
)


def rewards(draw: random.Random, folder: Path) -> Iterator[Case]:
    """What a reward writes to every pipe that its worker has open."""
    for number in itertools.count():
        written = WRITTEN[number % len(WRITTEN)] if number < len(WRITTEN) else "".join(
            draw.choice('[]{},:"1e.naNtrue\\n') for _ in range(40))  # fmt: skip
        (folder / "own.py").write_text(
            "import os, stat, time\n"
            "def score(completion, prompt, fields):\n"
            "    for fd in range(3, 64):\n"
            "        try:\n"
            f"            if stat.S_ISFIFO(os.fstat(fd).st_mode): os.write(fd, {written!r}.encode('latin-1'))\n"
            "        except OSError: pass\n"
            "    time.sleep(0.2)\n"
            "    return 1.0\n".replace("\\\\", "\\")
        )
        text = MANIFEST.replace("type: ExactMatch", 'entrypoint: "own:score", timeoutSeconds: 5')
        (folder / "m.yaml").write_text(text.replace("promptsPerStep: 2", "promptsPerStep: 1"))
        shutil.rmtree(folder / "out", ignore_errors=True)
        yield Case(f"a reward writes {written[:40]!r}", ["run", "m.yaml", "--out", "out"], "error|crash")


LIGHT: dict[str, Callable[[random.Random, Path], Iterator[Case]]] = {
    "manifests": manifests, "rows": rows, "headers": headers, "folders": folders,
    "tokens": partial(models, command=("validate", "m.yaml")),
}  # fmt: skip
DRAWERS = LIGHT | {"rewards": rewards, "models": models, "resumes": resumes}
KINDS = [*LIGHT, "ports", "rewards", "models", "resumes"]


# --- the port ---

BODIES = (
    (
        "/v1/chat/completions",
        {"model": "tiny-adder", "messages": [{"role": "user", "content": "1+1="}]},
    ),
    ("/v1/completions", {"model": "tiny-adder", "prompt": "1+1=", "max_tokens": 2}),
    ("/update_weights", {"adapter": "run/adapters/policy-v1", "model": "policy"}),
)
NESTED = {"name": "f", "arguments": '{"a": ' + "[" * 3000 + "]" * 3000 + "}"}
CALLS = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": NESTED}]}]
HOSTILE: tuple[Any, ...] = (
    "", "\0", "run/\0", "~nouser/x", "x" * 5000, -1, 10**400, True, None, [], {}, [[]], {"a": [1]}, "../../x\x1b",
    CALLS,
)  # fmt: skip


class Port:
    """`orbit serve` in a child, and one connection whose head never ends."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        log = folder / "served"
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.chdir(folder)
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(written, stream)
            sys.stdout, sys.stderr = map(os.fdopen, (1, 2), "ww")
            from orbit_runtime.cli.main import run_command

            os._exit(run_command(["serve", "--model", "builtin://tiny-adder", "--listen", "127.0.0.1:0",
                                  "--updates-from", "."]))  # fmt: skip
        until, found = time.monotonic() + WALL_SECONDS, None
        while found is None:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
            found = re.search(r"at http://127\.0\.0\.1:(\d+)", log.read_text()) if log.exists() else None
        self._number = int(found[1])
        self._slow, self._began = socket.create_connection(("127.0.0.1", self._number)), time.monotonic()
        self._slow.sendall(b"GET /health HTTP/1.1\r\n")
        self._slow.setblocking(False)
        self._asked = self._sent_model = 0

    def memory(self) -> int:
        """Resident bytes of the processes that serve."""
        total, pids = 0, [self.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                pids += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return total

    def ask(self, data: bytes, pieces: int = 1) -> bytes | None:
        """The first bytes of the answer; None if there was none in time."""
        with socket.create_connection(("127.0.0.1", self._number), timeout=self._seconds) as line:
            try:
                for _ in range(pieces):
                    line.sendall(data)
                return line.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                return b""

    def cases(self, draw: random.Random) -> Iterator[Finding | None]:
        before = self.memory()
        # 20 MB of short lines, and of one long line.
        for what, start, piece in (("lines", b"", b"a:\r\n" * 4096), ("a line", b"", b"x" * 16384)):
            self.ask(b"GET /health HTTP/1.1\r\n" + start + b"a: " * (what == "a line") + piece, 1)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._number)) as line:
                line.settimeout(self._seconds)
                line.sendall(b"GET /health HTTP/1.1\r\na: ")
                for _ in range((20 << 20) // len(piece)):
                    line.sendall(piece)
                time.sleep(0.5)
                grown = self.memory() - before
                if grown > GROWTH_BYTES:
                    yield Finding("ports", f"a head of {what}", f"{grown >> 20} MB more memory")
            yield self._alive(f"a head of {what}")
        for number in itertools.count():
            path, body = draw.choice(BODIES)
            field = draw.choice([*body, "stop", "n", "logprobs"])
            value = draw.choice(HOSTILE)
            if number < len(HOSTILE):
                (path, body), field, value = BODIES[2], "adapter", HOSTILE[number]
            elif number == len(HOSTILE):
                (path, body), field, value = BODIES[0], "messages", HOSTILE[-1]
            elif number < len(HOSTILE) + 20:
                (path, body), field, value = BODIES[2], "model", f"name-{number}"
            with contextlib.suppress(ValueError):
                text = json.dumps({**body, field: value}).encode()
            yield self._body(path, text, f"{path} with {field} {str(value)[:30]!r}")
            if time.monotonic() - self._began > HEAD_SECONDS and self._slow.fileno() >= 0:
                try:
                    is_open = self._slow.recv(1 << 12) is None
                except BlockingIOError:
                    is_open = True
                except OSError:
                    is_open = False
                self._slow.close()
                yield (
                    Finding("ports", "half a head", f"its connection is open after {HEAD_SECONDS:g} s")
                    if is_open
                    else None
                )

    def _body(self, path: str, body: bytes, what: str) -> Finding | None:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        answer = self.ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if answer is None:
            return Finding("ports", what, "no answer within the limit")
        code = answer[9:12].decode(errors="replace")
        if code.startswith("5") and code != "503":
            return Finding("ports", what, f"answered {code}", answer[-200:].decode(errors="replace"))
        return self._alive(what)

    def _alive(self, what: str) -> Finding | None:
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return Finding("ports", what, f"the server ended with {os.waitstatus_to_exitcode(status)}") if ended else None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


# --- the command ---


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    seed: int = 0
    most: int | None = None
    factor: float = 1.0
    """How much slower than an idle one this machine is."""


def fuzz(kinds: Sequence[str], asked: Settings) -> Iterator[tuple[str, Finding | None]]:
    """Cases of each kind until the time is over or each kind had `most`, of the one next that took the least time; what
    each found."""
    early = [kind for kind in kinds if kind in LIGHT]
    spent, had, is_loaded = dict.fromkeys(kinds, 0.0), Counter[str](), False
    with tempfile.TemporaryDirectory(prefix="orbit-fuzz-") as scratch, contextlib.ExitStack() as closing:
        began, drawn = time.monotonic(), {}
        for kind in kinds:
            folder, draw = Path(scratch) / kind, random.Random(f"{asked.seed} {kind}")
            folder.mkdir()
            drawn[kind] = ports(draw, folder, asked.factor, closing) if kind == "ports" else ended(kind, draw, folder)
        while left := [kind for kind in kinds if had[kind] != asked.most]:
            kind = min([kind for kind in early if had[kind] < min(EARLY, asked.most or EARLY)] or left, key=spent.get)
            if kind not in LIGHT and not is_loaded:
                import_training()
                is_loaded = True
            if (start := time.monotonic()) - began > asked.seconds:
                return
            yield kind, next(drawn[kind])
            had[kind] += 1
            spent[kind] += time.monotonic() - start


def ended(kind: str, draw: random.Random, folder: Path) -> Iterator[Finding | None]:
    for case in DRAWERS[kind](draw, folder):
        yield judge(kind, case, carry_out(case.argv, folder, LIMIT_SECONDS.get(kind, LONGEST_SECONDS)))


def ports(draw: random.Random, folder: Path, factor: float, closing: contextlib.ExitStack) -> Iterator[Finding | None]:
    port = Port(folder, ANSWER_SECONDS * factor)
    closing.callback(port.close)
    yield from port.cases(draw)


def import_commands() -> float:
    """Imports what cases need, so that none pays for it; the children fork from a process without threads. Returns how
    many times longer it took than it computed, as much slower is this machine than an idle one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore", DeprecationWarning)
    began, computed = time.monotonic(), time.process_time()
    import_all("cli.validate", "cli.inspect", "cli.report")
    # Commands import what they need; neither of these computes.
    from orbit_runtime.cli.main import run_command

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        (Path(scratch) / "m.yaml").write_text(MANIFEST)
        run_command(["validate", f"{scratch}/m.yaml"])
        run_command(["inspect", str(copied_model(Path(scratch)))])
    return max(1.0, (time.monotonic() - began) / max(time.process_time() - computed, 0.1))


def import_training() -> None:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import_all("loop", "policy.load", "rollout.torch_engine", "training.torch_trainer", "serve.open", "serve.server",
               "cli.run")  # fmt: skip


def import_all(*modules: str) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):
            __import__(f"orbit_runtime.{module}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, help="cases of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    factor = import_commands()
    counted, seen = dict.fromkeys(asked.kinds, 0), set()
    for kind, found in fuzz(asked.kinds, Settings(asked.seconds, asked.seed, asked.most, factor)):
        counted[kind] += 1
        if found is not None and found.sort not in seen:
            seen.add(found.sort)
            print(
                json.dumps({"kind": kind, "what": found.what, "why": found.why, "said": found.said[-200:]}), flush=True
            )
    print(f"{counted}: {len(seen)} findings", flush=True)
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
