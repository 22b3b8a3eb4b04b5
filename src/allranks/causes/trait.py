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

    AFTER_THE_END = "after_the_end"
    """torchrun's agents print it, too, when they are done and the first one has ended with the store (why.overcome)."""
    ALL_OTHERS_REPORT_IT = "all_others_report_it"
    """All ranks but the culprit report it: a rank without a report is the culprit (why.naming)."""
    AT_THE_MEETING = "at_the_meeting"
    """It is about the rendezvous, whose address is the culprit if no rank or node is named (why.naming,
    why.readings.ends)."""
    BEFORE_THE_FIRST_STEP = "before_the_first_step"
    """No rank reaches its first step with it: a step after it shows that it was overcome (why.overcome)."""
    BREAKS_WITH_ITS_PEER = "breaks_with_its_peer"
    """A connection breaks in this way when the rank at its other end has ended (why.verdicts)."""
    CUTS_ITS_NODE_OFF = "cuts_its_node_off"
    """Nothing reaches its node on the data network: failed pair tests with it add no information (preflight.judge)."""
    ENDS_BY_ITSELF = "ends_by_itself"
    """A rank ended, and no reason but its end is known: an unnamed one is the rank that stopped first (why.naming,
    guard.ends)."""
    ENDS_FROM_OUTSIDE = "ends_from_outside"
    """The scheduler or a person ended the job (why.blame, why.readings.silence, why.verdicts)."""
    ENDS_RANKS = "ends_ranks"
    """An exception of a rank with one of its signs is this cause, and no error of the script: its machine lacks
    something, which may be there the next time (guard.disk)."""
    ERROR_OF_SCRIPT = "error_of_script"
    """An exception that nothing but the user's script explains (why.blame, why.naming)."""
    EXPLAINS_A_KILL = "explains_a_kill"
    """It may be why a process got a SIGKILL that the launcher did not send (why.blame, why.naming)."""
    FILLS_A_DIRECTORY = "fills_a_directory"
    """No room is left in a directory: the fix names it, and the command that shows its room (guard.disk)."""
    FOLLOWS_AN_END_ELSEWHERE = "follows_an_end_elsewhere"
    """A network card reports it, too, when a process on another node has ended (why.blame)."""
    FOLLOWS_A_DEATH = "follows_a_death"
    """Other ranks see it after a rank is gone: the store was on its host, collectives no longer end (why.blame)."""
    HEARS_NO_VERDICT = "hears_no_verdict"
    """The task on its node may run and never receives the verdict: the job step must be ended (launch.job)."""
    JOB_MAY_GO_ON = "job_may_go_on"
    """The job may continue after it: of two equally certain findings, the other one ended the job (why.blame)."""
    KEEPS_ITS_NODE_OUT = "keeps_its_node_out"
    """Its node takes no part in the roll call, and no other check has a result there: a check always looks for it
    (launch.check.outcome)."""
    NORMAL_AMONG_RANKS = "normal_among_ranks"
    """Ranks on one machine have it without harm where each of them takes part in the roll call (preflight.entry)."""
    OF_GRANTED_CORES = "of_granted_cores"
    """It judges the cores that SLURM gave the job: a check that asked for one core cannot judge it (cli.check)."""
    OF_ONE_CALL = "of_one_call"
    """A call in the script is wrong: if nobody is named, the place of the call is the culprit (why.naming)."""
    ONCE_A_NODE = "once_a_node"
    """Its node and the other nodes may report it, in other words: of two findings about a node the first counts
    (preflight.judge)."""
    ONLY_WAITS = "only_waits"
    """It reports that a rank waited, and not for whom (why.clocks, why.naming, why.readings.collectives)."""
    OTHERS_WAIT_FOR_IT = "others_wait_for_it"
    """It tells which rank the others wait for (why.naming, why.people, why.readings.stalls)."""
    REPORTED_BY_WATCHERS = "reported_by_watchers"
    """Launcher, scheduler or kernel report it: such a line below an exception is no reason for it
    (why.readings.tracebacks)."""
    SAYS_NOTHING = "says_nothing"
    """The log has no failure; its end alone does not tell a success from a hang (why.blame, why.findings)."""
    SUCCESS = "success"
    """The job, or an agent with all its ranks, succeeded (why.blame, why.clocks, why.findings, why.overcome)."""
