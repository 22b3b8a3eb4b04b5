"""Whose connections fail, where Gloo says who could not dial whom?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion

UNREACHABLE = (
    "2: RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1. "
    "connect: Network is unreachable\n"
)
LEFT = "2: RuntimeError: it did not come up\n"
Why = Callable[[str | Mapping[str, str]], list[Conclusion]]


def dials(ranks: Iterable[int], remote: str, *, local: str = "192.168.20.{}", error: str = "No route to host") -> str:
    """What ranks of six print (PyTorch 2.13); rank 0 has the address 192.168.20.15."""
    return "".join(
        f"{rank}: [/pytorch/third_party/gloo/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, "
        f"willRetry=1, retry=1, retryLimit=3, rank={rank}, size=6, local=[{local.format(15 + rank)}]:6374, "
        f"remote=[{remote}]:52122$4, error=SO_ERROR: {error}, remote=[{remote}]:52122$4\n"
        for rank in ranks
    )


@pytest.mark.parametrize(
    ("log", "cause", "ranks"),
    [
        (dials([3, 4, 5], "192.168.20.17") + UNREACHABLE, "link-down", (2,)),
        (dials([0, 5], "192.168.20.19") + dials([4], "192.168.20.15"), "link-down", (4,)),
        (dials([3, 4, 5], "192.168.20.17", error="Connection timed out") + LEFT, "user-code-error", (2,)),
        (dials([4], "192.168.20.15"), "partition", (0, 4)),
        (dials([3, 4, 5], "192.168.20.15"), "partition", (3, 4, 5)),
        (dials([0, 2, 3, 4, 5], "172.17.0.1", local="172.17.0.1", error="Connection refused"), "wrong-nic", (1,)),
    ],
)
def test_the_culprit_follows_from_who_dials_whom(why: Why, log: str, cause: str, ranks: tuple[int, ...]) -> None:
    first = why(log)[0]
    assert (first.cause.name, first.culprit.ranks) == (cause, ranks)
    assert first.confidence is Confidence.LIKELY


def test_one_pair_alone_is_undecided(why: Why) -> None:
    text = dials([3, 4], "192.168.20.15") + dials([5], "192.168.20.16", error="Connection timed out")
    two = dials([5], "192.168.20.18", error="Connection timed out") + dials([4], "192.168.20.15")
    assert why(text)[0].cause.name == "partition"
    assert all(each.confidence is not Confidence.CERTAIN for each in why(two))


def test_connections_that_failed_before_a_step_were_made_in_the_end(why: Why) -> None:
    steps = "".join(f"0: step {step} loss 0.1\n" for step in (1, 2, 3))
    found = why(dials([1, 2], "192.168.20.15") + steps + "2: KeyError: 17\n")
    assert found[0].cause.name == "user-code-error"
    assert "partition" not in {one.cause.name for one in found}
