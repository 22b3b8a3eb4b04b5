"""The job's key: who may read it, and what it proves."""

from __future__ import annotations

import re

import msgspec
import pytest

from allranks.model.card import Card
from allranks.wire.protocol import PROTOCOL, Join
from allranks.wire.secret import (
    OPEN_GROUP,
    Secret,
    answer_join,
    group_name,
    prove_join,
    secret_from_user,
)

CARD = Card(host="node02", pid=812, node_index=1, num_workers=6, num_gpus=0)
KEY = Secret(b"swordfish", "test")


def test_the_key_is_never_printed():
    assert repr(KEY) == "Secret(source='test')"
    assert str(KEY) == "Secret(source='test')"
    assert f"{[KEY]} {KEY!s}" == "[Secret(source='test')] Secret(source='test')"


@pytest.mark.parametrize(
    ("env", "key"),
    [({}, None), ({"ALLRANKS_SECRET": ""}, None), ({"ALLRANKS_SECRET": "a b\n"}, Secret(b"a b\n", "$ALLRANKS_SECRET"))],
)
def test_the_key_of_the_environment_counts_unless_empty(env, key):
    assert secret_from_user(env, None) == key


def test_the_key_of_the_environment_comes_before_the_name_of_the_group():
    assert secret_from_user({"ALLRANKS_SECRET": "key"}, "exp 7") == Secret(b"key", "$ALLRANKS_SECRET")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (None, None),
        ("", None),
        # python3 -c "import hashlib; ... pbkdf2_hmac('sha256', b'exp 7', b'allranks rdzv-id', 100_000)"
        ("exp 7", "ef8d106020be4400facb94051e886e79b32ff122cbb0d865b5510b6de733b203"),
    ],
)
def test_a_key_is_derived_from_the_name_of_the_group(name, key):
    assert secret_from_user({}, name) == (key and Secret(bytes.fromhex(key), "--rdzv-id"))


def test_a_named_group_is_not_the_open_group():
    named = secret_from_user({}, "open group")
    assert named is not None
    assert named.key != OPEN_GROUP.key


JOIN = Join(protocol=PROTOCOL, version="1.0", job="4711", nonce=b"N" * 16, card=CARD)
PROVEN = prove_join(KEY, JOIN, leader_nonce=b"L" * 16)


def test_the_same_words_prove_the_same():
    assert prove_join(KEY, PROVEN, leader_nonce=b"L" * 16) == PROVEN
    assert len(PROVEN.proof) == 32


@pytest.mark.parametrize(
    "other",
    [
        {"secret": Secret(b"Swordfish", "test")},
        {"leader_nonce": b"M" * 16},
        {"nonce": b"M" * 16},
        {"job": "4712"},
        {"card": msgspec.structs.replace(CARD, attempt=1)},
        {"card": msgspec.structs.replace(CARD, num_workers=7)},
        {"card": msgspec.structs.replace(CARD, problem="no GPU")},
        # The same bytes, divided otherwise.
        {"leader_nonce": b"L" * 16 + b"N", "nonce": b"N" * 15},
    ],
    ids=lambda other: ",".join(other),
)
def test_a_proof_is_bound_to_everything_it_is_about(other):
    assert answer_join(KEY, PROVEN, leader_nonce=b"L" * 16)
    said = {"secret": KEY, "leader_nonce": b"L" * 16} | other
    secret, leader_nonce = said.pop("secret"), said.pop("leader_nonce")
    assert answer_join(secret, msgspec.structs.replace(PROVEN, **said), leader_nonce=leader_nonce) is None


def test_the_leaders_proof_is_no_agents_proof():
    welcome = answer_join(KEY, PROVEN, leader_nonce=b"L" * 16)
    assert welcome is not None
    assert welcome.proof != PROVEN.proof
    swapped = prove_join(KEY, msgspec.structs.replace(JOIN, nonce=b"L" * 16), leader_nonce=b"N" * 16)
    assert welcome != answer_join(KEY, swapped, leader_nonce=b"N" * 16)


def test_a_group_is_called_by_something_that_does_not_tell_its_name():
    called = group_name("exp 7")
    assert called == group_name("exp 7") != group_name("exp 8")
    assert re.fullmatch(r"rdzv-[0-9a-f]{16}", called)
    secret = secret_from_user({}, "exp 7")
    assert secret is not None
    assert b"exp 7" not in secret.key
    assert called[5:] not in secret.key.hex()
