"""What is said of a restart?"""

from __future__ import annotations

from allranks.launch.lead.outcome import describe_restart


def test_a_restart_says_where_it_goes_on():
    nodes = ["node01", "node02"]
    assert (
        describe_restart(1, nodes, ["node03"], 120, num_left=2)
        == "restart 1 on 2 nodes without node03, from the checkpoint of step 120; 2 more restarts left"
    )
    assert describe_restart(1, nodes, [], None, num_left=0) == (
        "restart 1 on 2 nodes, from the beginning; 0 more restarts left"
    )


def test_of_a_script_that_tells_nothing_allranks_does_not_know_where_it_goes_on():
    assert describe_restart(2, ["node01"], [], None, num_left=1, is_tracked=False) == (
        "restart 2 on 1 node, from what the script itself saved; 1 more restart left"
    )
