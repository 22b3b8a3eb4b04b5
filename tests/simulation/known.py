"""Lives that are lived in every run of the tests, as Python: those in which a rule once fell, shrunk (shrink.py).

A seed lives another life after the next change of the simulator; a literal keeps its faults. A life whose name is that
of a mutant finds it. `make simulate` prints such a life where a rule falls.
"""

from __future__ import annotations

from .lives import FOREVER_S, Fault, Kind, Life

KNOWN: dict[str, Life] = {
    "end-of-an-old-worker-counts": Life(
        seed=323,
        num_nodes=2,
        num_steps=6,
        faults=(
            Fault(at_s=6.0, kind=Kind.WORKER_IS_HELD, node=1, for_s=11.0),
            Fault(at_s=9.0, kind=Kind.WORKER_CRASHES, node=0),
        ),
        max_restarts=1,
    ),
    "stopping-without-a-deadline": Life(
        seed=100, num_nodes=2, num_steps=1, faults=(Fault(at_s=2.0, kind=Kind.AGENT_STOPS, node=1),)
    ),
    "signal-in-a-pause-ignored": Life(
        seed=763,
        num_nodes=2,
        num_steps=2,
        faults=(Fault(at_s=2.0, kind=Kind.AGENT_DIES, node=1), Fault(at_s=8.0, kind=Kind.SIGNAL, node=0, signum=15)),
        max_restarts=1,
        min_nodes=2,
    ),
    "restarts-not-counted": Life(
        seed=37,
        num_nodes=1,
        num_steps=4,
        faults=(Fault(at_s=4.0, kind=Kind.WORKER_CRASHES, node=0), Fault(at_s=6.0, kind=Kind.WORKER_IS_HELD, node=0)),
        max_restarts=1,
    ),
    "no-sigkill": Life(
        seed=50,
        num_nodes=1,
        num_steps=6,
        faults=(Fault(at_s=3.0, kind=Kind.WORKER_IS_DEAF, node=0), Fault(at_s=5.0, kind=Kind.PREEMPTED, node=0)),
        workers=2,
    ),
    "workers-outlive-the-leader": Life(
        seed=4, num_nodes=2, num_steps=7, faults=(Fault(at_s=7.0, kind=Kind.NODE_DIES, node=0),)
    ),
    "the-last-word-waits-for-who-is-away": Life(
        seed=3384,
        num_nodes=2,
        num_steps=9,
        faults=(Fault(at_s=11.0, kind=Kind.LINE_ENDS, node=1, after_s=2.2),),
        sweep_s=1.0,
    ),
    "a-leader-is-not-left-before-its-last-word": Life(
        seed=4128,
        num_nodes=3,
        num_steps=13,
        faults=(Fault(at_s=14.0, kind=Kind.LINE_ENDS, node=0, after_s=2.2),),
        max_restarts=1,
    ),
    "a-member-that-comes-late-to-a-new-leader-is-not-lost": Life(
        seed=1609,
        num_nodes=5,
        num_steps=14,
        faults=(Fault(at_s=14.5, kind=Kind.AGENT_STOPS, node=-1),),
        max_restarts=3,
        turn_s=0.40362902962374025,
    ),
    "a-suspended-agent-was-not-late": Life(
        seed=2801,
        num_nodes=2,
        num_steps=2,
        faults=(
            Fault(at_s=2.0, kind=Kind.WORKER_IS_HELD, node=1),
            Fault(at_s=5.0, kind=Kind.SIGNAL, node=0, signum=15),
            Fault(at_s=8.0, kind=Kind.SUSPENDED, node=1),
        ),
    ),
    "a-member-follows-a-leader-that-is-cut-off": Life(
        seed=3313,
        num_nodes=6,
        num_steps=16,
        faults=(Fault(at_s=2.0, kind=Kind.PARTITION, node=0, others=(1,)),),
        max_restarts=2,
        is_slurm=True,
    ),
    "away-members-are-left-behind": Life(
        seed=13624,
        num_nodes=3,
        num_steps=4,
        faults=(
            Fault(at_s=0.0, kind=Kind.LINE_ENDS, node=-1, on="forming", after_s=1.3535334498290368),
            Fault(at_s=4.0, kind=Kind.WORKER_CRASHES, node=0),
        ),
        max_restarts=4,
        answer_s=1.3,
    ),
    "late-successor-calls-the-leader-killed": Life(
        seed=16677,
        num_nodes=3,
        num_steps=6,
        start_s=1.0,
        faults=(
            Fault(at_s=7.0, kind=Kind.NODE_IS_CUT_OFF, node=1, for_s=16.0),
            Fault(at_s=7.0, kind=Kind.NODE_IS_CUT_OFF, node=2, for_s=8.0),
        ),
        max_restarts=2,
    ),
    "others-go-on-from-the-generation-before": Life(
        seed=18663,
        num_nodes=3,
        num_steps=13,
        faults=(
            Fault(at_s=0.0, kind=Kind.NODE_IS_CUT_OFF, node=-1, on="plan"),
            Fault(at_s=2.0, kind=Kind.WORKER_CRASHES, node=0),
            Fault(at_s=7.0, kind=Kind.AGENT_STOPS, node=2, for_s=10.4),
        ),
        max_restarts=1,
        is_slurm=True,
    ),
    "a-stopped-agent-in-a-job-that-does-not-move": Life(
        seed=34125,
        num_nodes=2,
        num_steps=3,
        faults=(Fault(at_s=2.0, kind=Kind.AGENT_STOPS, node=1), Fault(at_s=2.0, kind=Kind.WORKER_HANGS, node=0)),
    ),
    "an-ended-leader-that-was-cut-off-ends-nobody-else": Life(
        seed=70909,
        num_nodes=3,
        num_steps=4,
        faults=(Fault(at_s=4.0, kind=Kind.NODE_IS_CUT_OFF, node=-1, for_s=6.0),),
        max_restarts=2,
    ),
    "the-last-word-is-lost": Life(
        seed=51210,
        num_nodes=3,
        num_steps=8,
        faults=(
            Fault(at_s=6.0, kind=Kind.LINE_ENDS, node=0, after_s=1.6570353164362457),
            Fault(at_s=9.5, kind=Kind.LINE_ENDS, node=0, after_s=1.87080030372175),
            Fault(at_s=12.0, kind=Kind.LINE_ENDS, node=2),
        ),
        turn_s=0.27661930477010965,
    ),
    "given-up-for-good": Life(
        seed=13,
        num_nodes=2,
        num_steps=1,
        faults=(
            Fault(at_s=1.0, kind=Kind.LINE_ENDS, node=0, after_s=1.8973153691475222),
            Fault(at_s=2.9629523857100217, kind=Kind.AGENT_STOPS, node=-1, for_s=2.0),
        ),
    ),
    "left-out-without-a-record": Life(
        seed=84248,
        num_nodes=4,
        num_steps=11,
        faults=(Fault(at_s=4.0, kind=Kind.PARTITION, node=3, for_s=2.4, others=(0, 1, 4)),),
        max_restarts=1,
        is_slurm=True,
        turn_s=0.4279779022349589,
    ),
    "away-members-are-waited-for-while-ranks-stop": Life(
        seed=153337,
        num_nodes=5,
        num_steps=12,
        faults=(
            Fault(at_s=11.8, kind=Kind.NODE_DIES, node=2),
            Fault(at_s=15.6, kind=Kind.LINE_ENDS, node=0, after_s=1.312171193449444),
        ),
        max_restarts=4,
        sweep_s=1.3,
        start_s=0.6,
        turn_s=0.31199512804760654,
    ),
    "a-given-up-member-comes-back-before-it-began": Life(
        seed=199033,
        num_nodes=3,
        num_steps=4,
        faults=(
            Fault(at_s=1.0, kind=Kind.LINE_ENDS, node=-1, on="stop", after_s=1.741625568166623),
            Fault(at_s=1.0, kind=Kind.WORKER_CRASHES, node=1),
            Fault(at_s=4.0, kind=Kind.AGENT_STOPS, node=0, for_s=2.0),
        ),
        max_restarts=3,
        start_s=1.0,
        turn_s=0.39123154826694356,
    ),
    "others-go-on-two-generations-later": Life(
        seed=206972,
        num_nodes=5,
        num_steps=12,
        faults=(
            Fault(at_s=0.5, kind=Kind.PARTITION, node=1, others=(0, 3, 4)),
            Fault(at_s=13.0, kind=Kind.PARTITION, node=3, for_s=2.0, others=(1,)),
            Fault(at_s=16.0, kind=Kind.ONE_WAY, node=0),
        ),
        max_restarts=2,
        is_slurm=True,
        turn_s=0.4250066967084395,
        is_blind_when_cut=True,
    ),
    "a-cut-off-leader-takes-late-ones-along": Life(
        seed=611680,
        num_nodes=4,
        num_steps=2,
        faults=(Fault(at_s=1.3, kind=Kind.NODE_IS_CUT_OFF, node=-1, for_s=6.0),),
        max_restarts=2,
        turn_s=0.32852703175074077,
    ),
    "a-second-signal-prolongs-the-wait": Life(
        seed=641411,
        num_nodes=2,
        num_steps=7,
        faults=(
            Fault(at_s=5.0, kind=Kind.SIGNAL, node=1, signum=15),
            Fault(at_s=7.0, kind=Kind.AGENT_STOPS, node=1),
            Fault(at_s=9.0, kind=Kind.SIGNAL, node=0, signum=2),
        ),
        answer_s=FOREVER_S,
    ),
    "a-return-is-no-sign-of-life": Life(
        seed=699776,
        num_nodes=31,
        num_steps=9,
        faults=(Fault(at_s=8.142019605110793, kind=Kind.NODE_IS_CUT_OFF, node=-1, for_s=4.0),),
    ),
    "agents-that-sweep-are-waited-for": Life(
        seed=689683,
        num_nodes=3,
        num_steps=1,
        faults=(
            Fault(at_s=1.0, kind=Kind.WORKER_HANGS, node=2),
            Fault(at_s=11.0, kind=Kind.WORKER_HANGS, node=1),
        ),
        max_restarts=2,
        sweep_s=FOREVER_S,
    ),
    "a-killed-agent-that-heard-another-verdict": Life(
        seed=673001,
        num_nodes=5,
        num_steps=3,
        faults=(
            Fault(at_s=0.0, kind=Kind.NODE_DIES, node=-2, on="leaderless", after_s=4.664600142708825),
            Fault(at_s=3.0, kind=Kind.NODE_IS_CUT_OFF, node=-1, for_s=6.0),
        ),
        max_restarts=1,
    ),
    "others-may-still-save": Life(
        seed=704894,
        num_nodes=2,
        num_steps=10,
        faults=(
            Fault(at_s=3.0, kind=Kind.AGENT_STOPS, node=1, for_s=6.0),
            Fault(at_s=6.0, kind=Kind.SIGNAL, node=1, signum=15, everywhere=True),
            Fault(at_s=10.0, kind=Kind.WORKER_IS_HELD, node=1),
        ),
        is_slurm=True,
    ),
    "a-leader-that-ends-is-not-called-killed": Life(
        seed=719040,
        num_nodes=3,
        num_steps=4,
        faults=(
            Fault(at_s=3.8, kind=Kind.ONE_WAY, node=1, for_s=7.0),
            Fault(at_s=4.0, kind=Kind.ONE_WAY, node=2, for_s=12.0),
        ),
        max_restarts=1,
    ),
    "what-is-noticed-after-a-sleep-is-not-put-off": Life(
        seed=725065,
        num_nodes=2,
        num_steps=5,
        faults=(
            Fault(at_s=5.0, kind=Kind.AGENT_STOPS, node=-1),
            Fault(at_s=8.7, kind=Kind.NODE_IS_CUT_OFF, node=0),
            Fault(at_s=17.5, kind=Kind.ONLY_A_QUORUM_HEALS, node=-1),
        ),
        max_restarts=4,
        is_slurm=True,
    ),
    "who-gave-up-while-the-leader-slept": Life(
        seed=807193,
        num_nodes=4,
        num_steps=3,
        faults=(
            Fault(at_s=1.0, kind=Kind.AGENT_STOPS, node=-1, for_s=19.0, on="leaderless"),
            Fault(at_s=3.0, kind=Kind.NODE_IS_CUT_OFF, node=0, for_s=4.0),
        ),
    ),
    "who-came-back-to-a-leader-that-slept": Life(
        seed=799071,
        num_nodes=2,
        num_steps=1,
        faults=(
            Fault(at_s=0.4, kind=Kind.LINE_ENDS, node=0, after_s=2.4020464259298997),
            Fault(at_s=2.8, kind=Kind.AGENT_STOPS, node=0, for_s=4.3),
        ),
        max_restarts=1,
        is_slurm=True,
    ),
    "who-waits-comes-back-as-a-member": Life(
        seed=1018075,
        num_nodes=2,
        num_steps=5,
        faults=(
            Fault(at_s=5.0, kind=Kind.NODE_IS_CUT_OFF, node=1, for_s=4.0),
            Fault(at_s=14.0, kind=Kind.LINE_ENDS, node=0),
        ),
        max_restarts=3,
        is_tracked=False,
    ),
    "a-leader-that-has-resigned-rejects-late-ones": Life(
        seed=1027655,
        num_nodes=5,
        num_steps=7,
        faults=(Fault(at_s=6.8, kind=Kind.NODE_IS_CUT_OFF, node=-1, for_s=5.4),),
        max_restarts=3,
        turn_s=0.3847759832941744,
    ),
    "a-plan-is-begun-when-its-workers-are": Life(
        seed=1027900,
        num_nodes=3,
        num_steps=4,
        faults=(
            Fault(at_s=4.3, kind=Kind.NODE_IS_CUT_OFF, node=2, for_s=5.0),
            Fault(at_s=12.0, kind=Kind.NODE_DIES, node=-1),
        ),
        workers=2,
        max_restarts=1,
        start_s=1.0,
        turn_s=0.2560596896856346,
    ),
    "a-pause-is-no-sign-of-a-leader": Life(
        seed=2075197,
        num_nodes=3,
        num_steps=4,
        faults=(
            Fault(at_s=4.0, kind=Kind.PARTITION, node=2, for_s=2.0, others=(0, 2)),
            Fault(at_s=4.8, kind=Kind.NODE_IS_CUT_OFF, node=-1),
            Fault(at_s=8.0, kind=Kind.AGENT_STOPS, node=0),
            Fault(at_s=10.3, kind=Kind.ONE_WAY, node=1),
            Fault(at_s=30.0, kind=Kind.ONLY_A_QUORUM_HEALS, node=-1),
        ),
        max_restarts=3,
        min_nodes=3,
        is_slurm=True,
        turn_s=0.2814229247484525,
    ),
}
