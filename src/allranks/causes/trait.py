"""Traits: what an engine may ask of a cause, so that no engine knows causes by id or name. And the families of ids."""

from __future__ import annotations

from enum import StrEnum


class Family(StrEnum):
    """What a cause is about: the first digit of its id."""

    NODE = "0"
    GPU = "1"
    NETWORK = "2"
    FABRIC = "3"
    GROUP = "4"
    JOB = "5"
    STATE = "6"


class Trait(StrEnum):
    """A property of a cause that an engine asks for; each with what it means and who asks."""

    CUTS_ITS_NODE_OFF = "cuts_its_node_off"
    """Nothing reaches its node on the data network: failed pair tests with it add no information (preflight.judge)."""
    ENDS_BY_ITSELF = "ends_by_itself"
    """A rank ended, and no reason but its end is known: an unnamed one is the rank that stopped first (why.naming,
    guard.ends)."""
    ENDS_FROM_OUTSIDE = "ends_from_outside"
    """The scheduler or a person ended the job."""
    ENDS_RANKS = "ends_ranks"
    """An exception of a rank with one of its signs is this cause, and no error of the script: its machine lacks
    something, which may be there the next time (guard.disk)."""
    FILLS_A_DIRECTORY = "fills_a_directory"
    """No room is left in a directory: the fix names it, and the command that shows its room (guard.disk)."""
    HEARS_NO_VERDICT = "hears_no_verdict"
    """The task on its node may run and never receives the verdict: the job step must be ended (launch.job)."""
    KEEPS_ITS_NODE_OUT = "keeps_its_node_out"
    """Its node takes no part in the roll call, and no other check has a result there: a check always looks for it
    (launch.check.outcome)."""
    NORMAL_AMONG_RANKS = "normal_among_ranks"
    """Ranks on one machine have it without harm where each of them takes part in the roll call (preflight.entry)."""
    OF_GRANTED_CORES = "of_granted_cores"
    """It judges the cores that SLURM gave the job: a check that asked for one core cannot judge it (cli.check)."""
    ONCE_A_NODE = "once_a_node"
    """Its node and the other nodes may report it, in other words: of two findings about a node the first counts
    (preflight.judge)."""
