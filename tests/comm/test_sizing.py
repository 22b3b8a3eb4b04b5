"""Which size of buckets is chosen for which network?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from allranks.comm import sizing
from allranks.comm.sizing import choose_bucket_size, choose_by_environment, split

GPT = 13_100_000
MANY = 400 << 20


@pytest.mark.parametrize(
    ("gradients", "ranks", "link", "more", "mb"),
    [
        (GPT, 6, 500, {}, 2),
        (GPT, 6, 500, {"backward_s": 0.1}, 2),
        (GPT, 6, 100, {}, 1),
        (GPT, 6, 250, {"interfaces": 2}, 2),
        (GPT, 6, 500, {"compress": "bf16"}, 2),
        (GPT, 6, 500, {"compress": "powersgd"}, None),
        (GPT, 6, 10_000, {}, None),
        (GPT, 6, None, {}, None),
        (GPT, 6, 500, {"backend": "nccl"}, None),
        (GPT, 1, 500, {}, None),
        (MANY, 6, 1000, {}, None),  # sixteen buckets of torch's already
        (MANY, 6, 1000, {"backward_s": 0.3}, None),
        ([4 << 20] * 3, 6, 500, {}, 4),  # no bucket is smaller than a gradient
        (64 << 10, 6, 500, {}, None),
        (0, 6, 500, {}, None),
    ],
)
def test_the_size_fits_network_and_gradients(gradients, ranks, link, more, mb):
    assert choose_bucket_size(gradients, ranks=ranks, link_mbit_s=link, **more).mb == mb


def test_a_wrong_number_in_the_environment_is_no_bandwidth_and_empty_names_are_no_interfaces():
    def mb(link, names):
        env = {"ALLRANKS_LINK_MBIT": link, "GLOO_SOCKET_IFNAME": names}
        return choose_by_environment(env, GPT, ranks=6, backend="gloo").mb

    assert [mb("fast", "eth0"), mb("", ""), mb("250", ""), mb("250", "eth0,eth1,"), mb("250", "eth0,eth1")] == [
        None,
        None,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("told", ["abc", "nan", "-5", "0", "5e-324"])
def test_what_is_no_speed_in_the_environment_is_told(told):
    size = choose_by_environment({"ALLRANKS_LINK_MBIT": told}, GPT, ranks=6, backend="gloo")
    assert size == (None, f"ALLRANKS_LINK_MBIT is {told!r}: expected Mbit/s, for example 940")
    assert choose_bucket_size(GPT, ranks=6, link_mbit_s=5e-324).mb is None


def test_a_bucket_ends_with_the_gradient_that_fills_it():
    assert split([3, 3, 3, 3, 3], 2, 5) == [3, 6, 6]
    assert split([10, 1, 1], 5) == [10, 2]


def test_it_is_loaded_by_path_without_allranks():
    call = "choose_bucket_size(1, ranks=1, link_mbit_s=1).mb"
    program = f"import runpy; print(eval({call!r}, runpy.run_path({sizing.__file__!r})))"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("None\n", "")
