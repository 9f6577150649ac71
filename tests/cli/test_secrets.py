"""No secret that a user gives, in whatever way, is printed or written anywhere."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cli.mdata
import cli.mtrain
from mdata.errors import UsageError, hide_secrets
from mdata.object_storage.address import parse_address
from mdata.object_storage.reading import list_objects, read_range
from tests.helpers.house_rules import ROOT
from tests.helpers.object_server import answering
from tests.mdata.object_storage.conftest import bucket, server  # noqa: F401 - fixtures
from tests.mdata.object_storage.test_preprocess_objects import put_folder

SECRET = "TOBEHIDDEN"
URLS = (
    f"https://user:{SECRET}@127.0.0.1:1/a.jsonl",
    f"https://127.0.0.1:1/a.jsonl?X-Amz-Signature={SECRET}",
    f"s3://key:{SECRET}@bucket/a",
    f"az://container/a.jsonl?sv=1&sig={SECRET}",
    f"https:/user:{SECRET}@host/x",
    f"ftp://user:{SECRET}@host/x",
)
PREPROCESS = "preprocess --tokenizer-type ByteTokenizer --workers 1"
COMMANDS = (
    f"mdata {PREPROCESS} --output-prefix out --input URL",
    f"mdata {PREPROCESS} --input in.jsonl --output-prefix URL",
    f"mdata {PREPROCESS} --input in.jsonl --output-prefix s3://b/x --work-folder URL",
    "mdata preprocess --tokenizer-type HuggingFaceTokenizer --tokenizer-model URL --input in.jsonl --output-prefix out",
    "mdata inspect URL",
    "mdata verify URL",
    "mdata cat URL 0",
    "mdata blend 1 URL --output m.json",
    "mdata fetch URL --output f",
    "mdata fetch s3://bucket/x --output URL",
    "mdata merge URL --output-prefix o",
    "mdata split URL --output o",
    "mdata sample URL --output o",
    "mdata shuffle URL --output o",
    "mdata adopt URL",
    "mdata report URL",
    "mdata trace URL 0",
    "mdata status URL",
    "mdata stage URL --cache c --sequence-length 8 --samples 0:1",
    "mdata build URL",
    f"mdata launch local --parts 2 -- {PREPROCESS} --input URL --output-prefix out",
    f"mdata launch slurm --parts 2 -- {PREPROCESS} --input in.jsonl --output-prefix URL",
    "mtrain inspect URL",
    "mtrain convert URL o",
    "mtrain generate URL --prompt x",
    "mtrain report URL",
    "mtrain config --from-megatron URL",
    "mtrain check URL",
    "mtrain train URL",
    "mtrain check run.toml data.blend=URL",
    "mtrain check run.toml checkpoint.init_from=URL",
)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("no https://user:word@host/x is", "no https://***@host/x is"),
        ("'https://h:1/x?a=b&sig=c' and s3:/k:s@b", "'https://h:1/x?***' and s3:/***@b"),
        ("hf://datasets/o/n@v1/x, s3://b/t/?.jsonl, a@b, x=?y", "hf://datasets/o/n@v1/x, s3://b/t/?.jsonl, a@b, x=?y"),
        ("data.blend='s3://b/x' key=value", "data.blend='s3://b/x' key=value"),
        ("s3://key:sec@ret@b/x and https://u:p@@h", "s3://***@b/x and https://***@h"),
        ("'s3://key:se/c+ret/@b/x', gs:/key:s/@b", "'s3://***@b/x', gs:/***@b"),
        ("http://h:80/a@b, http://[::1]:80/a@b, s3://b/k:1@2", "http://h:80/a@b, http://[::1]:80/a@b, s3://b/k:1@2"),
    ],
)
def test_texts_lose_secrets_and_nothing_else(text, hidden):
    assert hide_secrets(text) == hidden
    assert str(UsageError(text, found=text)) == f"{hidden}\n  found: {hidden}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_with_a_secret_is_never_repeated(tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a"}\n')
    Path("run.toml").write_text(
        "[model]\nnum_layers = 1\nhidden_size = 64\nnum_heads = 4\nvocab_size = 300\n[train]\nsequence_length = 8\n"
        'global_batch = 1\nmicro_batch = 1\nsteps = 1\n[optimizer]\nlr = 0.1\n[data]\nblend = "mock"\n'
    )
    program, *words = command.split()
    for url in URLS:
        main = cli.mdata.main if program == "mdata" else cli.mtrain.main
        code = main([word.replace("URL", url) for word in words])
        out, err = capfd.readouterr()
        assert code == 2 and "error" in err, out + err
        assert SECRET not in out + err
        assert not [path for path in tmp_path.rglob("*") if SECRET in str(path)]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def _run(said: list[str], environment: dict[str, str], *words: str) -> str:
    """In the work folder, where launch puts the folder of its job."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=environment,
        cwd=environment["PWD"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    said.append(done.stdout + done.stderr)
    assert done.returncode == 0, said[-1]
    return done.stdout


@pytest.mark.slow
def test_no_secret_of_the_environment_is_left_from_text_to_checkpoint(bucket, tmp_path):  # noqa: F811
    """Each way to give one has a word of its own; what was printed and written on the way is searched for all."""
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIDTOBEHIDDEN",
        "AWS_SECRET_ACCESS_KEY": "secrettobehidden",
        "AWS_SESSION_TOKEN": "sessiontobehidden",
        "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=sastobehidden",
        "HF_TOKEN": "hubtobehidden",
        "https_proxy": "http://user:proxytobehidden@127.0.0.1:1",
    }
    key = base64.b64encode(b"32 bytes of a key of a customer.").decode()
    environment = {**os.environ, **secrets, "AWS_SSE_CUSTOMER_KEY_BASE64": key, "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "PWD": str(tmp_path)}
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = [json.dumps({"text": f"{number} words and words"}) for number in range(200)]
    (texts / "a.jsonl").write_text("\n".join(rows))
    put_folder(texts, f"{bucket}/in")
    said: list[str] = []
    common = ["--tokenizer-type", "ByteTokenizer", "--workers", "2", "--work-folder", str(tmp_path / "work")]
    mdata, mtrain = "cli.mdata", "cli.mtrain"
    words = ["preprocess", "--input", f"{bucket}/in/", "--output-prefix", f"{bucket}/out/x", *common]
    _run(said, environment, mdata, *words, "--debug")
    names = [str(one.address) for one in list_objects(parse_address(f"{bucket}/out/"))]
    corpus = next(name for name in names if name.endswith(".json"))
    words = ["launch", "local", "--parts", "2", "--", "preprocess", "--input", f"{bucket}/in/"]
    _run(said, environment, mdata, *words, "--output-prefix", f"{bucket}/parts/x", *common)
    _run(said, environment, mdata, "fetch", corpus, "--output", str(tmp_path / "fetched"))
    local = str(next((tmp_path / "fetched").glob("*.json")))
    _run(said, environment, mdata, "blend", "1", local, "--output", str(tmp_path / "mix.json"))
    words = ["--sequence-length", "16", "--samples", "0:10", "--cache", str(tmp_path / "cache")]
    _run(said, environment, mdata, "stage", corpus, *words)
    (tmp_path / "run.toml").write_text(
        "[model]\nnum_layers = 1\nhidden_size = 64\nnum_heads = 4\n[train]\nsequence_length = 16\nglobal_batch = 2\n"
        f'micro_batch = 1\nsteps = 2\n[optimizer]\nlr = 0.1\n[data]\nblend = "{corpus}"\ncache = "{tmp_path}/cache"\n'
        f'[checkpoint]\nfolder = "{bucket}/run"\n[run]\nfolder = "{tmp_path}/run"\n'
    )
    _run(said, environment, mtrain, "train", str(tmp_path / "run.toml"), "--debug")
    _run(said, environment, mtrain, "report", str(tmp_path / "run"))
    written = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for facts in list_objects(parse_address(f"{bucket}/")):
        written[str(facts.address)] = read_range(facts, 0, stop=facts.size_bytes)
    assert any("run/checkpoints" in name or "/run/step-2" in name for name in written)
    for secret in ("AKIDTOBEHIDDEN", "tobehidden", key):
        assert not [text for text in said if secret in text]
        assert not [name for name, data in written.items() if secret.encode() in data]


def test_what_a_server_repeats_is_not_shown(monkeypatch, tmp_path, capfd):
    """A server that sends back the headers and the path of a request in each error."""
    monkeypatch.chdir(tmp_path)
    url = answering(
        lambda request: (400, {"X": SECRET}, f"<Message>{request.path}{request.headers}</Message>".encode())
    )
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": url.replace("//", f"//{SECRET}:{SECRET}@"),
        "AWS_ACCESS_KEY_ID": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SECRET,
        "AZURE_STORAGE_ENDPOINT": url,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={SECRET}",
        "HF_ENDPOINT": url.replace("//", f"//user:{SECRET}@"),
        "HF_TOKEN": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    for address in (
        "s3://bucket/a.jsonl",
        "s3://bucket/t/",
        "az://bucket/a.jsonl",
        "az://bucket/t/",
        "hf://datasets/o/n/t/",
    ):
        words = f"{PREPROCESS} --debug --output-prefix out --input {address}".split()
        assert cli.mdata.main(words) in (2, 5)
        out, err = capfd.readouterr()
        assert "error" in err and SECRET not in out + err
