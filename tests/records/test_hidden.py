"""Secrets in command lines and texts are hidden, and nothing else is."""

from __future__ import annotations

import shlex

import pytest

from dpbench.records import hidden

SECRET = "Tr0ub4dor-and-3"
HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "words",
    [
        ["--hf-token", SECRET],
        ["--hf_token", SECRET],
        ["--hfToken", SECRET],
        ["--hftoken", SECRET],
        [f"--hf-token={SECRET}"],
        ["--password", f"two words {SECRET}"],
        ["--password", f"it's {SECRET}"],
        [f"--password=a&b {SECRET}"],
        ["--wandb-key", SECRET],
        ["--api_key", SECRET],
        ["--api-keys", f"a,{SECRET}"],
        ["--auth", f"me:{SECRET}"],
        ["--aws-secret-access-key", SECRET],
        ["--credential", SECRET],
        ["--db-pass", SECRET],
        ["--password", f"-{SECRET}"],
        ["-D", f"hub.token={SECRET}"],
        [f"-Dhub.token={SECRET}"],
        [f"++wandb.api_key={SECRET}"],
        [f"HF_TOKEN={SECRET}"],
        [f"https://me:{SECRET}@example.com/data"],
        [f"--data=https://me:{SECRET}@example.com/data"],
        [f"https://example.com/data?sig={SECRET}&x=1"],
        ["--config", f'{{"hf_token": "{SECRET}"}}'],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["bash", "-c", f"python train.py --hf-token {SECRET}"],
        ["bash", "-c", f"HF_TOKEN='{SECRET}' python train.py"],
    ],
)
def test_values_whose_names_speak_of_secrets_are_hidden(words):
    command = shlex.join(["dpbench", "watch", "train.py", "--lr", "0.1", *words, "--epochs", "3"])
    shown = hidden.command(command)
    assert SECRET not in shown
    assert SECRET not in hidden.text(command) or " " in "".join(words)
    assert hidden.MARK in shown
    before = shlex.split(shown)
    assert before[:5] == ["dpbench", "watch", "train.py", "--lr", "0.1"]
    assert before[-2:] == ["--epochs", "3"]
    assert hidden.command(shown) == shown


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
        "sk-proj-abcdefgh12345678ABCDEFGH",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "github_pat_11ABCDEFG0123456789_abcdefghij",
        "glpat-abcdefghij1234567890",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-1234567890-abcdefghij",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        HEX,
    ],
)
def test_what_looks_like_a_token_is_hidden_without_a_name(token):
    for command in (f"dpbench watch train.py {token}", f"dpbench watch train.py --x={token}"):
        assert token not in hidden.command(command)
        assert hidden.MARK in hidden.command(command)
    if token != HEX:
        assert token not in hidden.text(f"OSError: {token} is not valid")


@pytest.mark.parametrize(
    "command",
    [
        "dpbench run --models mlp,resnet18 --devices 1,2 --rounds 3 --tag night=1",
        "dpbench run --model net.py:model --store 'my store.db'",
        "dpbench watch train.py --tokenizer gpt2 --max-tokens 4096 --pad-token '<pad>'",
        "dpbench watch train.py --author me --key-dim 64 --num-key-value-heads 8 --monitor loss",
        f"dpbench watch train.py --revision {HEX} --commit={HEX}",
        "dpbench watch train.py --token-file /run/token --url https://example.com/a?b=1",
        "dpbench watch   train.py  --lr 0.1",
        "/home/me/it's/rank0.json",
        "",
    ],
)
def test_what_is_no_secret_stays_as_it_is(command):
    assert hidden.command(command) == command


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Missing key(s) in state_dict: 'a.weight'",
        "KeyError: 'token'",
        "step 3: loss = 0.25, tokens=4096",
        "dpbench.toml has the unknown key 'moddel'; known: model",
        f"commit {HEX}",
    ],
)
def test_errors_stay_readable(text):
    assert hidden.text(text) == text


def test_a_secret_in_an_error_is_hidden():
    text = f"Command ['python', 'x.py'] failed: python x.py --hf-token {SECRET}\nexit 1"
    assert hidden.text(text) == text.replace(SECRET, hidden.MARK)


def test_secrets_are_hidden_in_facts_at_any_depth():
    facts = {
        "command": f"dpbench watch t.py --token {SECRET}",
        "observed": {"command": f"python t.py --token '{SECRET} x'", "reads": {"t.py:3": 4}},
        "variables": {"NCCL_AUTH_TOKEN": SECRET, "NCCL_DEBUG": "INFO"},
        "list": [{"password": SECRET}, 1.0, None],
        "dpbench": {"commit": HEX},
    }
    shown = hidden.everywhere(facts)
    assert SECRET not in str(shown)
    assert shown["observed"]["reads"] == {"t.py:3": 4}
    assert shown["variables"]["NCCL_DEBUG"] == "INFO"
    assert shown["dpbench"] == facts["dpbench"]


def test_a_command_to_run_says_what_to_fill_in():
    shown = hidden.command(f"dpbench watch t.py --hf-token {SECRET} --x.password={SECRET}")
    said = hidden.to_fill_in(shown)
    assert said.startswith(shown)
    assert "--hf-token" in said.removeprefix(shown)
    assert "--x.password" in said.removeprefix(shown)
    assert hidden.to_fill_in("dpbench run") == "dpbench run"
    assert shlex.split(said, comments=True) == shlex.split(shown)
