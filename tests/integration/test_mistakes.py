"""What a user can do wrong, through the command line: one clear message, the documented code, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.loop import run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.tiny_models import make_checkpoint

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Shell:
    """A user's folder with a manifest, and what the last command said."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    manifest: dict[str, Any] = field(default_factory=lambda: small_manifest(steps=2))
    shown: str = ""

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]  # type: ignore[no-any-return]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def run(self, *arguments: str) -> int:
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(self.manifest, indent=1))
        code = run_command(["run", str(path), "--out", str(self.out), *arguments])
        said = self.capture.readouterr()
        self.shown = said.err + said.out
        assert "Traceback" not in self.shown
        return code

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "report.json").read_text()))


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def model(change: Callable[[Path], None], *, architecture: str = "llama", **options: Any) -> Callable[[Shell], None]:
    def prepare(shell: Shell) -> None:
        folder = make_checkpoint(shell.folder / "model", architecture, **options)
        change(folder)
        shell.spec["model"] = {"uri": str(folder)}

    return prepare


def prompts(*lines: str) -> Callable[[Shell], None]:
    def prepare(shell: Shell) -> None:
        (shell.folder / "prompts.jsonl").write_text("\n".join(lines))
        shell.spec["data"]["prompts"] = [{"uri": "prompts.jsonl"}]

    return prepare


def put(path: str, value: Any) -> Callable[[Shell], None]:
    def prepare(shell: Shell) -> None:
        *parents, last = path.split(".")
        block = shell.manifest["spec"]
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value

    return prepare


def remove_tokenizer(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            path.unlink()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def lose_shard(folder: Path) -> None:
    next(folder.glob("model-*.safetensors")).unlink()


def quantise_strangely(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))


def spoil(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def spoiled(folder: Path) -> None:
        path = folder / name
        path.write_text(change(path.read_text()))

    return spoiled


def half(text: str) -> str:
    return text[: len(text) // 2]


ROWS: dict[str, tuple[Callable[[Shell], None], int, str]] = {
    "unknown field": (put("training.learningrate", 1e-3), 64, "learningRate"),
    "enum near miss": (put("adapter.type", "lora"), 64, "LoRA"),
    "contradictory fields": (put("adapter", {"type": "OFT", "lora": {"rank": 4}}), 64, "remove `lora`"),
    "model folder missing": (put("model", {"uri": "no/such/folder"}), 66, "does not exist"),
    "model without tokenizer": (model(remove_tokenizer), 66, "tokenizer"),
    "truncated safetensors": (model(truncate), 66, "model.safetensors"),
    "missing shard": (model(lose_shard, max_shard_size="60KB"), 66, "shards are missing"),
    "broken config.json": (model(spoil("config.json", lambda text: "{\n" + text)), 66, "config.json:2: not JSON"),
    "empty config.json": (model(spoil("config.json", lambda text: "")), 66, "config.json:1: the file is empty"),
    "config.json with a text for a number": (
        model(spoil("config.json", lambda text: text.replace('"hidden_size": 64', '"hidden_size": "x"'))),
        66,
        "config.json: transformers cannot read this configuration: Validation error for field 'hidden_size'",
    ),
    "half a generation_config.json": (model(spoil("generation_config.json", half)), 66, "generation_config.json:"),
    "half a tokenizer.json": (model(spoil("tokenizer.json", half)), 66, "tokenizer.json:"),
    "half a tokenizer_config.json": (model(spoil("tokenizer_config.json", half)), 66, "tokenizer_config.json:"),
    "unknown quantisation": (model(quantise_strangely), 66, "bitsandbytes"),
    "precision that the checkpoint is not": (
        lambda shell: (model(lambda folder: None)(shell), shell.spec["model"].update(precision="INT4"), None)[-1],
        64,
        "the checkpoint is BF16",
    ),
    "prompts missing": (put("data.prompts", [{"uri": "nowhere.jsonl"}]), 65, "does not exist"),
    "prompts empty": (prompts(""), 65, "empty"),
    "broken line": (prompts('{"prompt": "1+1="}', "{broken"), 65, "line 2"),
    "missing key": (prompts('{"question": "1+1="}'), 65, "'question'"),
    "prompt longer than the limit": (put("model.maxSequenceLength", 8), 65, "tokens"),
    "targets that match nothing": (put("adapter.targets", ["q_projj"]), 64, "q_proj"),
    "block size that does not divide": (put("adapter", {"type": "OFT", "oft": {"blockSize": 48}}), 64, "48"),
    "reward that does not import": (
        put("environment.rewards", [{"name": "mine", "entrypoint": "no_such_module:score"}]),
        64,
        "no_such_module",
    ),
}


@pytest.mark.parametrize("row", sorted(ROWS))
def test_a_mistake_is_named_and_nothing_is_left_behind(shell: Shell, row: str) -> None:
    prepare, code, words = ROWS[row]
    prepare(shell)
    assert shell.run() == code
    assert words in shell.shown
    assert not shell.out.exists(), "nothing that looks like a run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here SGLang can do it")
def test_deterministic_sampling_by_sglang_is_refused_without_a_gpu(shell: Shell) -> None:
    shell.spec["rollout"] |= {"engine": "SGLang", "deterministic": True}
    assert shell.run() == 78
    assert "remove rollout.deterministic, or write rollout.engine: Torch" in shell.shown
    assert not (shell.out / "run.json").exists()
    # From Python nothing is planned first: the engine says it.
    with pytest.raises(UnsupportedError, match="on GPUs only") as caught:
        run(OrbitRun.model_validate(shell.manifest), out=str(shell.out), progress=SilentProgress())
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.rollout.deterministic")
    assert not (shell.out / "run.json").exists()


def test_the_torch_engine_draws_the_same_whether_it_is_asked_for_it_or_not(shell: Shell) -> None:
    shell.spec["rollout"]["deterministic"] = True
    assert shell.run() == 0
    assert shell.report()["deterministic"] is True
    asked = timeless_rows(open_store(str(shell.out)))
    shell.spec["rollout"]["deterministic"] = False
    assert shell.run("--out", str(shell.folder / "plain")) == 0
    assert timeless_rows(open_store(str(shell.folder / "plain"))) == asked


def test_scalars_that_two_yaml_versions_read_differently_are_refused(shell: Shell) -> None:
    path = shell.folder / "run.yaml"
    text = (TESTS.parent / "examples" / "quickstart.yaml").read_text()
    path.write_text(text.replace("steps: 60", "steps: 0_10"))
    assert run_command(["run", str(path), "--out", str(shell.out)]) == 64
    assert "run.yaml:" in shell.capture.readouterr().err
    assert not shell.out.exists()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("raise", "crash"),
        *(pytest.param(each, "crash", marks=pytest.mark.long) for each in ("nan", "text")),
        ("hang", "timeout"),
        ("die", "crash"),
    ],
)
def test_a_reward_that_fails_is_counted_masked_and_above_the_limit_stops_the_run(
    shell: Shell, answer: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.folder / "mine.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "from fakes.bad_rewards import by_text\n"
        "def score(completion, prompt, fields, bad):\n"
        "    return by_text(bad, prompt, fields) if fields['answer'] == '46' else float(len(completion))\n"
    )
    rows = [{"prompt": "12+34=", "answer": "46"}, {"prompt": "12+35=", "answer": "47"}]
    prompts(*(json.dumps(row) for row in rows))(shell)
    reward = {"name": "mine", "entrypoint": "mine:score", "arguments": {"bad": answer}, "timeoutSeconds": 1.0}
    shell.spec["environment"] = {"rewards": [reward], "failureLimit": 1.0}
    shell.spec["training"] |= {"promptsPerStep": 2, "steps": 1}
    shell.spec["algorithm"]["groupSize"] = 2
    shell.spec["training"].pop("miniBatchPrompts")
    assert shell.run() == 0
    (row,) = timeless_rows(open_store(str(shell.out)))
    assert (row[f"reward_{outcome}"], row["reward_value"]) == (2, 2)
    assert row["reward_mean"] > 0, "failures are left out, not scored 0"
    shell.spec["environment"]["failureLimit"] = 0.4
    assert shell.run("--out", str(shell.folder / "strict")) == 86
    assert "2 of 4" in shell.shown
    strict = shell.folder / "strict"
    assert json.loads((strict / "failures" / "step-000001.json").read_text())["exit_code"] == 86
    assert (strict / "failures" / "step-000001.jsonl.zst").exists()


def test_an_output_that_cannot_be_a_folder_is_refused(shell: Shell) -> None:
    shell.out.write_text("a file")
    assert shell.run() == 73
    assert shell.out.read_text() == "a file"
    assert run_command(["run", str(shell.folder / "run.yaml"), "--out", "/proc/nowhere"]) == 73


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_the_run_and_more_room_continues_it(shell: Shell, small_disk: Path) -> None:
    shell.spec["training"]["steps"] = 4
    shell.spec["checkpoint"] = {"keep": 10}
    alone = shell.folder / "alone"
    assert shell.run("--out", str(alone)) == 0
    environment = os.environ.get("ORBIT_STORE_DEADLINE_SECONDS")
    os.environ["ORBIT_STORE_DEADLINE_SECONDS"] = "1"
    try:
        assert shell.run("--out", str(small_disk / "run")) == 74
    finally:
        if environment is None:
            del os.environ["ORBIT_STORE_DEADLINE_SECONDS"]
    assert "space" in shell.shown.lower()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert shell.run("--out", str(small_disk / "run")) == 0
    assert timeless_rows(open_store(str(small_disk / "run"))) == timeless_rows(open_store(str(alone)))


def test_fields_that_may_change_are_listed_and_others_are_refused_by_name(shell: Shell) -> None:
    assert shell.run() == 0
    shell.spec["training"]["steps"] = 3
    shell.spec["checkpoint"] = {"everySteps": 2}
    shell.spec["observability"]["logLevel"] = "Error"
    shell.spec["rollout"]["maxRunningRequests"] = 7
    assert shell.run() == 0
    for name in ("steps", "everySteps", "logLevel", "maxRunningRequests"):
        assert name in shell.shown
    before = (shell.out / "metrics.jsonl").read_bytes()
    shell.spec["training"]["learningRate"] = 5e-4
    assert shell.run() == 73
    assert "spec.training.learningRate: 0.001 then, 0.0005 now" in shell.shown
    assert (shell.out / "metrics.jsonl").read_bytes() == before


def test_inputs_that_moved_continue_the_run_bit_for_bit_and_another_content_is_refused(shell: Shell) -> None:
    first, elsewhere = shell.folder / "first", shell.folder / "elsewhere"
    model(lambda folder: None)(shell)
    prompts(*(json.dumps({"prompt": f"1{n}+11=", "answer": str(21 + n)}) for n in range(6)))(shell)
    shell.spec["training"]["steps"] = 3
    assert shell.run("--out", str(first)) == 0
    shell.spec["training"]["steps"] = 2
    assert shell.run() == 0
    elsewhere.mkdir()
    (shell.folder / "model").rename(elsewhere / "base")
    (shell.folder / "prompts.jsonl").rename(elsewhere / "renamed.jsonl")
    shell.spec["model"]["uri"] = str(elsewhere / "base")
    shell.spec["data"]["prompts"] = [{"uri": "elsewhere/renamed.jsonl"}]
    shell.spec["training"]["steps"] = 3
    assert shell.run() == 0
    assert f"spec.model.uri moved from {shell.folder / 'model'} to {elsewhere / 'base'}, with the same" in shell.shown
    assert "spec.data.prompts[0].uri moved" in shell.shown
    assert timeless_rows(open_store(str(shell.out))) == timeless_rows(open_store(str(first)))
    before = (shell.out / "run.json").read_bytes()
    shell.spec["training"]["steps"] = 4
    for path in ("base/config.json", "base/tokenizer.json", "renamed.jsonl"):
        file = elsewhere / path
        kept = file.read_bytes()
        file.write_bytes(kept + b"\n")
        assert shell.run() == 73
        named = {"renamed.jsonl": "content.data.prompts[0]"}.get(path, f"content.model.{file.name}")
        assert f"{named}: sha256:" in shell.shown
        file.write_bytes(kept)
    make_checkpoint(elsewhere / "other", "llama", seed=1)
    shell.spec["model"]["uri"] = str(elsewhere / "other")
    assert shell.run() == 73
    assert "content.model.tensors: sha256:" in shell.shown
    assert "config.json" not in shell.shown, "only what differs is named"
    assert (shell.out / "run.json").read_bytes() == before


def test_a_shipped_model_may_move_into_a_folder_of_its_own(shell: Shell) -> None:
    shell.spec["model"] = {"uri": "builtin://tiny-adder"}
    assert shell.run() == 0
    shutil.copytree(builtin_folder("tiny-adder", "INT4"), shell.folder / "copy")
    shell.spec["model"]["uri"] = "copy"
    shell.spec["training"]["steps"] = 3
    assert shell.run() == 0
    shell.spec["model"]["uri"] = "no/such/folder"
    assert shell.run() == 66
    assert "the model folder does not exist" in shell.shown


def test_a_finished_run_that_is_started_again_says_that_nothing_is_left(shell: Shell) -> None:
    assert shell.run() == 0
    assert "nothing left" not in shell.shown
    before = shell.report()["adapter_digest"]
    assert shell.run() == 0
    assert "nothing left to train: 2 steps are done; to go on, raise spec.training.steps (2)" in shell.shown
    assert shell.report()["adapter_digest"] == before


def test_a_run_with_more_steps_done_than_asked_for_says_so_and_keeps_them(shell: Shell) -> None:
    assert shell.run() == 0
    before = shell.report()["adapter_digest"]
    shell.spec["training"]["steps"] = 1
    assert shell.run() == 0
    assert "nothing left to train: spec.training.steps is 1, and 2 steps are done already" in shell.shown
    assert "set spec.training.steps above 2" in shell.shown
    assert "resumed after" not in shell.shown
    assert shell.report()["adapter_digest"] == before
    assert "2 steps in" in shell.shown


def test_a_second_run_on_a_live_output_stops(shell: Shell) -> None:
    program = (
        "import sys, time\n"
        "from orbit_runtime.storage import claim_execution, open_store\n"
        "claim_execution(open_store(sys.argv[1]), run_name='small').start_heartbeat()\n"
        "print('held', flush=True); time.sleep(120)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(shell.out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert shell.run() == 73
        assert str(holder.pid) in shell.shown
    finally:
        holder.kill()
        holder.wait()
    assert shell.run() == 0, "a killed holder holds nothing"


def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(shell: Shell) -> None:
    shell.spec["training"]["steps"] = 4
    assert shell.run("--out", str(shell.folder / "alone")) == 0
    shell.spec["training"]["steps"] = 3
    assert shell.run() == 0
    part = next((shell.out / "checkpoints" / "step-000003").glob("trainer*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    shell.spec["training"]["steps"] = 4
    assert shell.run() == 0
    assert "damaged checkpoint" in shell.shown
    assert any("damaged checkpoint" in warning for warning in shell.report()["warnings"])
    alone = json.loads((shell.folder / "alone" / "report.json").read_text())
    assert shell.report()["adapter_digest"] == alone["adapter_digest"]
    assert timeless_rows(open_store(str(shell.out))) == timeless_rows(open_store(str(shell.folder / "alone")))


def test_a_loss_that_is_not_finite_ends_with_85_and_its_evidence(shell: Shell) -> None:
    """Rewards near the largest float overflow in fp32: the gradient is infinite."""
    (shell.folder / "huge.py").write_text(
        "def score(completion, prompt, fields):\n    return 1e300 if len(completion) % 2 else -1e300\n"
    )
    shell.spec["environment"]["rewards"] = [{"name": "huge", "entrypoint": "huge:score"}]
    shell.spec["algorithm"]["advantage"] = {"normalize": "None"}
    assert shell.run() == 85
    assert json.loads((shell.out / "failures" / "step-000001.json").read_text())["exit_code"] == 85
    assert not (shell.out / "checkpoints").exists()


def test_one_prompt_and_one_sample_at_a_tiny_rate_works_and_warns(shell: Shell) -> None:
    prompts('{"prompt": "12+34=", "answer": "46"}')(shell)
    shell.spec["algorithm"]["groupSize"] = 1
    shell.spec["training"] |= {"promptsPerStep": 1, "learningRate": 1e-6}
    shell.spec["training"].pop("miniBatchPrompts")
    assert shell.run() == 0
    assert "a group of one has no gradient" in shell.shown
    assert "learningRate is 1e-06, a rate for training all weights; adapters usually take 1e-5 to 2e-3" in shell.shown
    assert {warning.split()[0] for warning in shell.report()["warnings"]} >= {"a", "training.learningRate"}


def test_prompts_that_run_out_end_the_run_well(shell: Shell) -> None:
    prompts(*(json.dumps({"prompt": f"1{n}+11=", "answer": str(21 + n)}) for n in range(6)))(shell)
    shell.spec["data"]["epochs"] = 1
    shell.spec["training"] |= {"steps": 9, "promptsPerStep": 4}
    assert shell.run() == 0
    assert "used up" in shell.shown
    assert shell.report()["base_digest_after"] == shell.report()["base_digest_before"]
    assert shell.report()["steps"] == 2


@pytest.mark.parametrize("arguments", [["run"], ["run", "nowhere.yaml"], ["run", "x.yaml", "--no-such-flag"], ["fly"]])
def test_usage_errors_have_their_code(shell: Shell, arguments: list[str]) -> None:
    assert run_command(arguments) == 64
    assert "Traceback" not in shell.capture.readouterr().err


def test_a_dry_run_lists_processes_and_writes_nothing(shell: Shell) -> None:
    assert shell.run("--dry-run") == 0
    assert "reward_worker" in shell.shown
    assert not shell.out.exists()


def test_a_dry_run_shows_servers_and_refuses_those_that_cannot_be_cut(shell: Shell) -> None:
    shell.spec["rollout"] |= {"engine": "SGLang", "replicas": 3, "tensorParallel": 2}
    assert shell.run("--dry-run") == 0
    assert "sglang-server x 3" in shell.shown
    assert "--tp-size 2" in shell.shown
    shell.spec["rollout"]["tensorParallel"] = 3
    for arguments in (("--dry-run",), ()):
        assert shell.run(*arguments) == 78
        assert "spec.rollout.tensorParallel: 4 attention heads cannot be divided among 3" in shell.shown
        assert "write tensorParallel: 1 or 2" in shell.shown
    assert not shell.out.exists()


def test_a_dry_run_shows_ranks_and_refuses_sizes_that_do_not_divide_the_model(shell: Shell) -> None:
    shell.spec["training"] |= {"trainer": "Megatron", "parallel": {"tensor": 2, "data": 2}}
    assert shell.run("--dry-run") == 0
    for said in ("trainer-rank x 4", "TP2 EP2 PP1 CP1 DP2", "rank-guard x 1", "sglang-server x 1", "WORLD_SIZE=4"):
        assert said in shell.shown
    for sizes, says in (
        ({"tensor": 4}, "2 heads of keys and values cannot be divided among 4 ranks"),
        ({"tensor": 3}, "4 attention heads cannot be divided among 3 ranks"),
        ({"pipeline": 9}, "layers cannot be divided into 9 stages"),
    ):
        shell.spec["training"]["parallel"] = sizes
        for arguments in (("--dry-run",), ()):
            assert shell.run(*arguments) == 78
            assert says in shell.shown
    assert not shell.out.exists()


def test_another_chat_template_is_another_run_and_is_named(shell: Shell) -> None:
    model(lambda folder: None)(shell)
    prompts(json.dumps({"prompt": "11+11=", "answer": "22"}))(shell)
    assert shell.run() == 0
    template = shell.folder / "model" / "chat_template.jinja"
    kept = template.read_text()
    template.write_text("Solve this. " + kept)
    shell.spec["training"]["steps"] += 1
    assert shell.run() == 73
    assert f"content.model.{template.name}: sha256:" in shell.shown
    template.write_text(kept)
    assert shell.run() == 0
