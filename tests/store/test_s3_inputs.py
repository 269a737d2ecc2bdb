"""Models, prompts and code from a real S3 server: fetched, continued, verified, refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes.guide import commands, run_shell, write_files
from fakes.s3_server import S3Server

from orbit_runtime.errors import CredentialsError, DataError, ModelError, OrbitError, StorageError, UsageError
from orbit_runtime.storage import Store, open_store
from orbit_runtime.storage.cache import Cache, RetryPolicy, fetch_files
from orbit_runtime.storage.inputs import BucketFolder, FetchedInput, code_digest, fetch_input

ROOT = Path(__file__).parents[2]
TINY = ROOT / "orbit_runtime/model_info/builtin/tiny-adder/int4"
MODEL = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
GUIDE = (ROOT / "docs/guides/inputs.md").read_text()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ORBIT_STORE_DEADLINE_SECONDS", "2")
    return tmp_path / "cache"


def put_all(uri: str, files: dict[str, bytes]) -> Store:
    store = open_store(uri)
    for name, data in files.items():
        store.put(name, data)
    return store


def fetch(uri: str, kind: str) -> FetchedInput:
    return fetch_input(uri, kind, f"spec.{kind}")  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_without_pickles_and_code(s3_bucket: str) -> None:
    put_all(
        f"{s3_bucket}/tiny", {**MODEL, "pytorch_model.bin": b"pickle", "modeling.py": b"evil", "old/config.json": b""}
    )
    found = fetch(f"{s3_bucket}/tiny", "model")
    assert content(found.path) == MODEL
    assert fetch(f"{s3_bucket}/tiny", "model") == found


def test_prompts_keep_their_name(s3_bucket: str) -> None:
    put_all(s3_bucket, {"sums/train.jsonl": b'{"prompt": "1+1"}\n'})
    found = fetch(f"{s3_bucket}/sums/train.jsonl", "prompts")
    assert (found.path.name, found.path.read_bytes()) == ("train.jsonl", b'{"prompt": "1+1"}\n')


def test_a_folder_of_prompts_comes_with_its_rows_alone(s3_bucket: str) -> None:
    rows = {f"part-{number}.jsonl.gz": b"x" for number in (0, 1)}
    put_all(f"{s3_bucket}/sums", {**rows, "README.md": b"#", "_SUCCESS": b""})
    assert content(fetch(f"{s3_bucket}/sums/", "prompts").path) == rows
    with pytest.raises(DataError, match="no file of rows is there"):
        fetch(f"{s3_bucket}/none/", "prompts")


def test_code_has_the_digest_of_the_folder_that_was_uploaded(s3_bucket: str, tmp_path: Path) -> None:
    files = {"a.py": b"x = 1\n", "pack/__init__.py": b""}
    for name, data in {**files, ".git/config": b"", "__pycache__/a.pyc": b""}.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_bytes(data)
    put_all(f"{s3_bucket}/code", files)
    found = fetch(f"{s3_bucket}/code", "code")
    assert content(found.path) == files
    assert found.digest == code_digest(tmp_path / "code", "w") == fetch(f"file://{tmp_path}/code", "code").digest


def test_a_part_is_continued_and_a_broken_one_is_not_believed(s3_bucket: str, cache: Path) -> None:
    data = os.urandom(3 * 2**20)
    put_all(s3_bucket, {"train.jsonl": data})
    uri = f"{s3_bucket}/train.jsonl"
    found = fetch(uri, "prompts")
    assert found.path.read_bytes() == data
    # The same key again, now with a part that holds other bytes: the ETag tells.
    (blob,) = (cache / "blobs").iterdir()
    (known,) = (cache / "known").iterdir()
    blob.unlink()
    (cache / "parts" / known.name).write_bytes(b"x" * 1000)
    assert fetch(uri, "prompts").path.read_bytes() == data
    blob.unlink()
    (cache / "parts" / known.name).write_bytes(data[: 2**20])
    assert fetch(uri, "prompts").path.read_bytes() == data


def test_an_object_that_is_replaced_meanwhile_is_not_kept(s3_bucket: str, cache: Path) -> None:
    store = put_all(s3_bucket, {"train.jsonl": b"a" * 100})

    def missing(message: str, *, fix: str | None = None) -> OrbitError:
        return DataError(message, fix=fix)

    bucket = BucketFolder(s3_bucket, missing, RetryPolicy(2.0))
    file = bucket.describe("train.jsonl")
    store.put("train.jsonl", b"b" * 100)
    with pytest.raises(StorageError, match="was replaced while it was downloaded"):
        fetch_files(bucket, [file], Cache(cache), RetryPolicy(2.0), lambda message, name: DataError(message))
    assert not (cache / "blobs").exists()


@pytest.mark.parametrize(
    ("path", "kind", "error", "words"),
    [
        ("none", "model", ModelError, "no config.json"),
        ("none.jsonl", "prompts", DataError, "none.jsonl is not there"),
        ("none", "code", UsageError, "0 files are there"),
        ("none.zip", "code", UsageError, "none.zip is not there"),
        ("a b.jsonl", "prompts", DataError, "not every store can hold"),
    ],
)
def test_what_is_not_there_names_its_field(
    s3_bucket: str, path: str, kind: str, error: type[OrbitError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        fetch(f"{s3_bucket}/{path}", kind)
    assert caught.value.where == f"spec.{kind}"
    with pytest.raises(error, match="bucket does not exist"):
        fetch("s3://no-such-bucket/x.jsonl", kind)


def test_wrong_keys_are_77_and_a_server_that_is_down_74(
    own_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = own_s3_server.make_bucket("models")
    put_all(f"{uri}/tiny", MODEL)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialsError):
        fetch(f"{uri}/tiny", "model")
    own_s3_server.kill()
    with pytest.raises(StorageError):
        fetch(f"{uri}/tiny", "model")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_guide_work(own_s3_server: S3Server, tmp_path: Path) -> None:
    own_s3_server.make_bucket("models")
    write_files(GUIDE, tmp_path)
    prompts = (ROOT / "orbit_runtime/data/builtin/two-digit-addition.jsonl").read_bytes()
    reward = (tmp_path / "rewards/my_rewards.py").read_bytes()
    files = {f"tiny-adder/{name}": data for name, data in MODEL.items()}
    put_all("s3://models", {**files, "sums/train.jsonl": prompts, "rewards/my_rewards.py": reward})
    for text in commands(GUIDE, "From S3"):
        done = run_shell(text, tmp_path, {})
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/s3/report.html").is_file()
