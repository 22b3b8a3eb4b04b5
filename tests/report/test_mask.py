"""What looks like a secret is hidden, and what a log needs to prove something stays."""

from __future__ import annotations

import json
import re
import shlex
import string
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allranks.model.secret_names import is_secret_name
from allranks.report.mask import HIDDEN, mask_command, mask_fields, mask_secrets, mask_variable

HEX40 = "0123456789abcdef0123456789abcdef01234567"
ALNUM = string.ascii_letters + string.digits


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export WANDB_API_KEY=abc123", "export WANDB_API_KEY=(hidden)"),
        ('DB_PASSWORD="two words" python x.py', 'DB_PASSWORD="(hidden)" python x.py'),
        ("password = 1234", "password = (hidden)"),
        ("train.py --hf-token abc --lr 3e-4", "train.py --hf-token (hidden) --lr 3e-4"),
        ("train.py --api_key=abc", "train.py --api_key=(hidden)"),
        ('{"api_key": "abc def", "lr": 3}', '{"api_key": "(hidden)", "lr": 3}'),
        (r'"{\"api_key\": \"abc\"}"', r'"{\"api_key\": \"(hidden)\"}"'),
        ("{'AWS_SECRET_ACCESS_KEY': 'abc/def'}", "{'AWS_SECRET_ACCESS_KEY': '(hidden)'}"),
        ("Namespace(api_key=abc, lr=3)", "Namespace(api_key=(hidden), lr=3)"),
        ("os.environ['MY_SECRET'] = 'x'", "os.environ['MY_SECRET'] = '(hidden)'"),
        ("ValueError: HF_TOKEN=abc, a=b=api_key=c", "ValueError: HF_TOKEN=(hidden), a=b=api_key=(hidden)"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer (hidden)"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: Basic (hidden)"),
        ("cannot log in with hf_ABCDEFGHIJKLMNOPQRSTUVWX", "cannot log in with (hidden)"),
        ("key sk-proj-0123456789abcdefghij refused", "key (hidden) refused"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "(hidden)"),
        ("using AKIAIOSFODNN7EXAMPLE", "using (hidden)"),
        (f"wandb login {HEX40}", "wandb login (hidden)"),
        (f"wandb: api_key: {HEX40}", "wandb: api_key: (hidden)"),
        ("git clone https://me:pass:word@host/x.git", "git clone https://me:(hidden)@host/x.git"),
        ("redis://:pw@10.0.0.1:6379/0", "redis://:(hidden)@10.0.0.1:6379/0"),
        ("https://me:p@ss@host/x", "https://me:(hidden)@host/x"),
        ("GET /v1?token=abc&x=1", "GET /v1?token=(hidden)&x=1"),
        ("https://blob/x?sv=1&sig=aZ%2F9&se=2", "https://blob/x?sv=1&sig=(hidden)&se=2"),
        ("TOKEN=abc ./run", "TOKEN=(hidden) ./run"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----(hidden)-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_a_secret_is_hidden(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'model.layers.3.weight'",
        "num_tokens=131072 max_tokens: 4096 tokens=[1, 2] tokenizer=gpt2 pad_token_id=0",
        "keys: /default_pg/0//cuda//default_ncclUniqueId",
        "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store",
        "WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=1, Timeout(ms)=600000)",
        f"checkpoint {HEX40} of commit {HEX40[:12]}, md5=d41d8cd98f00b204e9800998ecf8427e",
        "node03:4123:4190 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.3<0>",
        "https://pytorch.org/docs/stable/distributed.html#x:y fe80::1%eth0 tcp://10.0.0.1:29500",
        "the bearer of bad news; scikit sk-learn-contrib-package-name; risk-0123456789abcdefghij",
        "from huggingface_hub import hf_hub_download",
        "--master-addr=node01 --port 29500 --key value",
        "",
    ],
)
def test_what_proves_something_stays(text: str) -> None:
    assert mask_secrets(text) == text


@given(
    name=st.sampled_from(["HF_TOKEN", "api_key", "MY_SECRET", "DbPassword", "aws-secret-access-key"]),
    value=st.text(ALNUM + "/+._-", min_size=8, max_size=60).map(lambda text: f"x9{text}y"),
    form=st.sampled_from(["{}={}", '{}="{}"', "--{} {}", '"{}": "{}"', "export {}='{}'", "{}: {}"]),
    around=st.sampled_from(["", " ", "\t", "[rank3]: "]),
)
def test_no_part_of_a_named_secret_is_left(name: str, value: str, form: str, around: str) -> None:
    shown = mask_secrets(around + form.format(name, value) + around)
    assert value not in shown
    assert HIDDEN in shown
    assert name in shown


@given(
    st.lists(
        st.one_of(
            st.text("0123456789abcdef", min_size=7, max_size=64),
            st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){3}(:[0-9]{1,5})?", fullmatch=True),
            st.from_regex(r"(seq|SeqNum|rank|numel)=[0-9]{1,9}", fullmatch=True),
            st.from_regex(r"/[a-z]{1,9}(/[a-z0-9_]{1,9}){0,3}", fullmatch=True),
            st.uuids().map(str),
        ),
        max_size=8,
    ).map(" ".join)
)
def test_hashes_addresses_and_numbers_stay(text: str) -> None:
    assert mask_secrets(text) == text


@given(st.text(max_size=400))
@example("TOKEN=" * 200)
@example('"' * 400)
@example("a=" * 200)
def test_any_text_is_masked_once(text: str) -> None:
    shown = mask_secrets(text)
    assert mask_secrets(shown) == shown
    assert len(re.sub(re.escape(HIDDEN), "", shown)) <= len(text)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("ALLRANKS_SECRET", True),
        ("aws_secret_access_key", True),
        ("PGPASSWORD", True),
        ("MYSQL_PASSWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKEN", True),
        ("SMTP_PASS", True),
        ("DB_PWD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("PWD", False),
        ("PATH", False),
        ("MASTER_ADDR", False),
        ("NCCL_SOCKET_IFNAME", False),
        ("PYTHONPATH", False),
    ],
)
def test_names_of_secrets_are_known(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret


# What a user types, and what is left of it: `|` is between words that have blanks.
_HIDDEN_WORDS = """
train.py --hf-token abc --lr 3e-4              -> train.py --hf-token (hidden) --lr 3e-4
train.py --hf-token=abc --lr 3e-4              -> train.py --hf-token=(hidden) --lr 3e-4
train.py --api-key=1234567890                  -> train.py --api-key=(hidden)
train.py --password 12345678                   -> train.py --password (hidden)
train.py --token abc                           -> train.py --token (hidden)
train.py -token abc                            -> train.py -token (hidden)
train.py '--password=two words, "quoted"'      -> train.py '--password=(hidden)'
train.py --password 'two words'                -> train.py --password (hidden)
train.py --api-keys k1 k2 --out x              -> train.py --api-keys (hidden) (hidden) --out x
train.py +hub.login.token=abc lr=1             -> train.py +hub.login.token=(hidden) lr=1
train.py wandb.api_key=abc ++a.b.secret=x      -> train.py wandb.api_key=(hidden) ++a.b.secret=(hidden)
train.py tokenizer.api_key=abc tokenizer.token=x -> train.py tokenizer.api_key=(hidden) tokenizer.token=(hidden)
docker run -e HF_TOKEN=abc -e LR=1 image       -> docker run -e HF_TOKEN=(hidden) -e LR=1 image
docker run --env=HF_TOKEN=abc image            -> docker run --env=HF_TOKEN=(hidden) image
docker run -eHF_TOKEN=abc image                -> docker run -eHF_TOKEN=(hidden) image
x '{"api_key": "a\\"b", "lr": 3}'              -> x '{"api_key": "(hidden)", "lr": 3}'
x '--config={"hub": {"token": "a b"}, "n": 1}' -> x '--config={"hub": {"token": "(hidden)"}, "n": 1}'
x --db postgres://ada:pw@db:5432/runs          -> x --db postgres://ada:(hidden)@db:5432/runs
x '--args=--api-key abc --lr 3'                -> x '--args=--api-key (hidden) --lr 3'
curl -H 'Authorization: Bearer abc123def'      -> curl -H 'Authorization: Bearer (hidden)'
curl -H 'X-Api-Key: abc123'                    -> curl -H 'X-Api-Key: (hidden)'
bash -c 'export HF_TOKEN=abc; python x.py'     -> bash -c 'export HF_TOKEN=(hidden); python x.py'
x --use-auth-token hf_abcdefghijklmnop12       -> x --use-auth-token (hidden)
x hf_abcdefghijklmnop12                        -> x (hidden)
x --image-key 0a1b2c3d4e5f6a7b8c9d             -> x --image-key (hidden)
"""
_SHOWN_WORDS = """
train.py --num-tokens 512 --tokenizer gpt2 --key-dim 64 --max-tokens=8192 --tokenizer-path x
train.py --tokenizer=gpt2 --tokens 1e9 --max_new_tokens 100 model.tokenizer.path=gpt2 data.num_tokens=1_000_000
train.py --image-key jpg --label_key cls --sort-key name --key value data.keys=[a,b] n_kv_keys=8
train.py --bos-token '<s>' --pad-token x --placeholder-token sks --mask-token '[MASK]' --special-tokens a,b
train.py --use-auth-token data.json --no-password --keyword spam --monkey-patch all
train.py --token-file /run/secrets/hub --password-file=/run/secrets/db --ssh-key-path ~/.ssh/id_ed25519
train.py --valid-tokens 512 valid_tokens=131072 --grid-tokens 9 --hf-token --lr 3
train.py --passes 3 --bypass x --compass north --keep-last 3
srun -N2 --export=ALL,LR=1 python -c 'print(1 + 1)' 'a;b' '{"lr": 3, "num_tokens": 512}' '' '--=' '=x' ---
"""


@pytest.mark.parametrize("line", _HIDDEN_WORDS.strip().splitlines())
def test_only_the_value_of_a_secret_argument_is_hidden(line: str) -> None:
    typed, shown = line.split(" -> ")
    assert mask_command(shlex.split(typed)) == shlex.split(shown.strip().replace("(hidden)", "'(hidden)'"))


@pytest.mark.parametrize("line", _SHOWN_WORDS.strip().splitlines())
def test_arguments_that_only_sound_like_secrets_stay(line: str) -> None:
    assert mask_command(shlex.split(line)) == shlex.split(line)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["train.py", "--lr", "3e-4"], ["train.py", "--lr", "3e-4"]),
        (["train.py", "--token", "hf_swordfish"], ["train.py", "--token", "(hidden)"]),
        (["train.py", "--url=https://u:hf_swordfish@hub"], ["train.py", "--url=https://u:(hidden)@hub"]),
        (["train.py", "--note", "two hf_swordfish hf_swordfish"], ["train.py", "--note", "two (hidden) (hidden)"]),
        (["train.py", "--seed", "1"], ["train.py", "--seed", "1"]),
        ([], []),
    ],
)
def test_a_commands_record_has_no_secret_of_its_environment(command: list[str], shown: list[str]) -> None:
    env = {"HF_TOKEN": "hf_swordfish", "SHORT_KEY": "1", "EMPTY_KEY": "", "NUM_TOKENS": "100000000", "LR": "3e-4"}
    assert mask_command(command, env) == shown


def test_a_secret_that_begins_with_another_is_hidden_whole() -> None:
    env = {"A_TOKEN": "abcdefgh", "B_KEY": "abcdefghTAIL"}
    assert mask_command(["--key", "abcdefghTAIL"], env) == ["--key", "(hidden)"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "abc", HIDDEN),
        ("PASSWORD", "1234", HIDDEN),
        ("SOME_KEY", "words", HIDDEN),
        ("HF_TOKEN", "", ""),
        ("NUM_TOKENS", "512", "512"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("HTTPS_PROXY", "http://me:pw@proxy:3128", "http://me:(hidden)@proxy:3128"),
        ("ARGS", "--api-key abc --lr 3", "--api-key (hidden) --lr 3"),
    ],
)
def test_a_variable_is_shown_without_its_secret(name: str, value: str, shown: str) -> None:
    assert mask_variable(name, value) == shown


def test_data_is_masked_at_every_depth() -> None:
    told = {
        "command": ["a.py", "--hf-token", "abc"],
        "env": {"DB_PASSWORD": 1234, "credentials": {"user": "ada"}, "NUM_TOKENS": 5},
        "evidence": [{"seen": "with api_key=abc"}, 7, None, True],
    }
    assert mask_fields(told) == {
        "command": ["a.py", "--hf-token", HIDDEN],
        "env": {"DB_PASSWORD": HIDDEN, "credentials": HIDDEN, "NUM_TOKENS": 5},
        "evidence": [{"seen": f"with api_key={HIDDEN}"}, 7, None, True],
    }


@pytest.mark.parametrize("unit", ["a:b@", "my_key=[", "my_token=(hidden)", "key: 1,", "://a:", "PASSWORD='"])
def test_megabytes_of_a_log_take_no_longer_than_their_length(unit: str) -> None:
    """A value that is read again at each name in it makes minutes of 60 kB."""
    text = unit * (60_000 // len(unit))
    began_s = time.thread_time()
    mask_secrets(text)
    assert time.thread_time() - began_s < 3.0


_FLAGS = ["hf-token", "api_key", "db-password", "hub.access-token", "client-secret"]


@given(
    before=st.lists(st.text(ALNUM + "-./=", max_size=12), max_size=4),
    flag=st.sampled_from(_FLAGS),
    value=st.text(min_size=6, max_size=80).map(lambda text: f"x9{text}y"),
    form=st.sampled_from(["two", "--{}={}", "{}={}", "+{}={}", "json"]),
)
def test_no_part_of_a_secret_argument_is_left(before: list[str], flag: str, value: str, form: str) -> None:
    pair = {"two": [f"--{flag}", value], "json": [json.dumps({"a": [{flag: value}]})]}.get(
        form, [form.format(flag, value)]
    )
    shown = mask_command([*before, "x", *pair, "train.txt"])
    assert len(shown) == len(before) + len(pair) + 2
    assert value not in "\n".join(shown[len(before) :])
    assert json.dumps(value)[1:-1] not in "\n".join(shown[len(before) :])
    assert HIDDEN in "\n".join(shown)
    assert (shown[-1], flag in "\n".join(shown)) == ("train.txt", True)
