"""What looks like a secret is hidden, and what a log needs to prove something stays."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allranks.report.mask import HIDDEN, mask_secrets

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
