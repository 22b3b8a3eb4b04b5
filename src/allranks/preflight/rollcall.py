"""The roll call, the leader's side: all agents prove that they are here, alike and reachable, before a worker starts.

Phase 1  who is here     agents join (wire.accept); from the third second on the missing ones are named. At the later of
                         `join_s` and a third of it after the last arrival the wait ends.
Phase 2  can they reach  every node tries the others on the data network (preflight.mesh), all at the same time, within
         each other      a deadline (preflight.look); what failed is tried again (preflight.second_look).
Phase 3  what is it      preflight.judge matches the cards and the results with the causes.
Phase 4  go or stop      nothing of severity fail: the caller says who is which rank (Plan). Else everybody gets the
                         same verdict (Goodbye).

One thread, one selector; every phase has its deadline, and a node that leaves or keeps silent is a finding of its own.
The agent's side is preflight.attend. Nodes whose card says that they cannot take part end it after phase 3, with
whatever else was found.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from allranks.model.card import Card, JobDirectory
from allranks.model.errors import AllranksError, WireError
from allranks.model.finding import Verdict
from allranks.model.pair import PairResult, PairTarget
from allranks.preflight.judge import Judgement, Observations, Stranger, judge
from allranks.preflight.lanes import prove_lanes
from allranks.preflight.look import RoundOfTests, plan_first_look
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.roster import RollCallTerms, Roster, mtu_of, with_place
from allranks.preflight.second_look import (
    NUM_RATE_LOOKS,
    merge,
    plan_confirmation,
    plan_large_look,
    plan_quiet_look,
    plan_rate_look,
)
from allranks.preflight.symptoms import has_failed
from allranks.preflight.vet import find_nonsense, own_results, vet_card
from allranks.wire.accept import Acceptor, Rejection, Rejections, turn_away
from allranks.wire.connection import Connection, encode_frame
from allranks.wire.protocol import Goodbye, Test, Tested, own_age_s

NAME_AFTER_S = 3.0
"""Missing nodes are named from then on."""
LAST_ARRIVAL_SHARE = 1 / 3
"""Nobody is given up earlier than this share of `join_s` after the last arrival (20 s of 60 s): whoever comes late may
be queueing at a file server with others behind it."""
TICK_S = 0.25
MAX_SUMMARY = 1000
FAREWELL_S = 2.0
"""Time allowed to deliver the last message to slow agents."""
ANSWER_S = 1.0
"""Between the deadline of the tests and the one for the report."""


class RollCall:
    """Holds the roll call as the leader.

    Args:
        terms: what it is about.
        own: the leader's own card.
        acceptors: accept the other agents, one for each port; their listeners are given back listening.
        mesh: the leader's own end of the pair tests; None: pairs are not tested.
        say: for lines that people should see.
        on_event: for events.jsonl.
        check_signals: raises StoppedBySignal when somebody told this agent to stop; called several times a second.
    """

    def __init__(
        self,
        terms: RollCallTerms,
        own: Card,
        *,
        acceptors: Sequence[Acceptor],
        mesh: Mesh | None,
        say: Callable[[str], None],
        on_event: Callable[..., None],
        check_signals: Callable[[], None],
    ) -> None:
        self.roster = Roster(terms, cards={0: vet_card(own)})
        self._terms = terms
        self._acceptors = acceptors
        self._mesh = mesh
        self._say = say
        self._on_event = on_event
        self._check_signals = check_signals
        # One for all tests: a datagram that comes before its token is known is lost.
        self._token = secrets.token_bytes(16)
        self._strangers: list[Stranger] = []
        self._rejections = Rejections()
        self._left: dict[int, str] = {}
        self._silent: set[int] = set()
        self._results: list[PairResult] = []
        self._quiet: list[PairResult] = []
        self._places: dict[int, JobDirectory] = {}
        self._reports: dict[int, Tested] = {}
        self._awaited: set[int] = set()
        """Who has not reported yet, and is still here."""
        self._interfaces: dict[int, tuple[str, ...]] = {}
        self._round = 0
        self._waited_s = 0.0
        self.observations = Observations(cards={})

    def hold(self) -> Judgement:
        """Go through all phases and return what came of it; the connections stay open.

        Raises:
            StoppedBySignal: check_signals raised it; all have been told.
        """
        with selectors.DefaultSelector() as selector:
            for acceptor in self._acceptors:
                acceptor.attach(
                    selector,
                    on_peer=lambda peer, card: self._admit(peer, card, selector),
                    on_rejected=self._note_rejected,
                    say=self._say,
                )
            if self._mesh is not None:
                self._mesh.attach(selector)
            try:
                self._wait_for_all(selector)
                if self._mesh is not None and len(self.roster.cards) > 1:
                    self._test_pairs(selector)
                    self._prove_lanes(selector)
            except AllranksError as exc:
                dismiss(self.roster.peers, Goodbye(exit_code=exc.exit_code, summary=str(exc)))
                raise
            finally:
                for acceptor in self._acceptors:
                    acceptor.detach()
        is_short = len(self.roster.cards) < self._terms.min_nodes
        self.observations = Observations(
            cards=self._cards(),
            results=tuple(self._results),
            quiet=tuple(self._quiet),
            missing=self.roster.missing() if is_short else (),
            waited_s=self._waited_s,
            left=self._left if is_short else {},
            silent=frozenset(self._silent),
            strangers=tuple(self._strangers),
            interfaces=self._interfaces,
        )
        return judge(self.observations, self._terms)

    # Phase 1: who is here

    def _wait_for_all(self, selector: selectors.BaseSelector) -> None:
        started_s = self._started_s = self._last_arrival_s = time.monotonic()
        own = self.roster.cards[0]
        self._on_event("leading", node=own.host, pid=own.pid, age_s=own_age_s())
        next_notice_s = NAME_AFTER_S
        terms, roster = self._terms, self.roster
        while not roster.is_complete:
            self._check_signals()
            now_s = time.monotonic()
            self._waited_s = now_s - started_s
            if self._waited_s >= next_notice_s:
                next_notice_s = self._waited_s * 2
                joined = f"{len(roster.cards)} of {terms.num_nodes} nodes have joined"
                self._say(f"still waiting for {roster.name_missing()} after {self._waited_s:.0f} s; {joined}")
            if self.left_s(now_s) <= 0:
                if (here := len(roster.cards)) >= terms.min_nodes:
                    self._say(f"continuing with {here} nodes (--nnodes {terms.min_nodes}:{terms.num_nodes})")
                break
            self._turn(selector, TICK_S)

    def left_s(self, now_s: float) -> float:
        """Return for how long missing nodes are still waited for."""
        join_s = self._terms.join_s
        return max(self._started_s + join_s, self._last_arrival_s + join_s * LAST_ARRIVAL_SHARE) - now_s

    def _turn(self, selector: selectors.BaseSelector, timeout_s: float) -> None:
        for acceptor in self._acceptors:
            acceptor.turn(time.monotonic())
        for key, mask in selector.select(timeout_s):
            if isinstance(key.data, int):
                self._hear_member(key.data, selector)
            else:
                key.data(mask)
        if self._mesh is not None:
            self._mesh.advance(time.monotonic())

    def _admit(self, peer: Connection, card: Card, selector: selectors.BaseSelector) -> None:
        """Take an authenticated agent into the roster, or turn it away."""
        card = vet_card(card)
        index = self.roster.admit(card, peer)
        if isinstance(index, str):
            turn_away(peer, index)
            twin = Rejection(kind="rank", cause_id="AR405", host=card.host, address=card.host, reason=index)
            if self._rejections.is_news(twin):
                self._on_event("refused", node=card.host, reason=index)
                self._note_stranger(twin)
            return
        self._last_arrival_s = time.monotonic()
        self._left.pop(index, None)
        selector.register(peer, selectors.EVENT_READ, index)
        peer.expect_alive_within(self._terms.gone_s)
        self._on_event("joined", node=card.host, pid=card.pid, peer=peer.peer, age_s=card.age_s)

    def _note_rejected(self, rejection: Rejection) -> None:
        if self._rejections.is_news(rejection):
            self._on_event("stranger", peer=rejection.host, reason=rejection.line)
            self._note_stranger(rejection)

    def _note_stranger(self, rejection: Rejection) -> None:
        if rejection.cause_id is not None:  # agents of other jobs look for their leader here, too
            self._strangers.append(Stranger(rejection.cause_id, rejection.host, rejection.line))
            self._say(rejection.line)

    def _hear_member(self, index: int, selector: selectors.BaseSelector) -> None:
        peer = self.roster.peers[index]
        try:
            messages = peer.receive()
        except AllranksError as exc:
            self._lose(index, f"it sent an invalid message: {exc}", selector)
            return
        except ConnectionError as exc:
            self._lose(index, str(exc), selector)
            return
        for message in messages:
            nonsense = (
                find_nonsense(message)
                if isinstance(message, Tested)
                else f"it sent {type(message).__name__}, which no agent sends in this phase"
            )
            if nonsense is not None:
                self._lose(index, nonsense, selector)
                return
            assert isinstance(message, Tested)
            if message.round == self._round:
                self._reports[index] = message
                self._awaited.discard(index)
            else:
                self._on_event("late_report", node=self.roster.cards[index].host, round=message.round)

    def _lose(self, index: int, reason: str, selector: selectors.BaseSelector) -> None:
        card, peer = self.roster.remove(index)
        self._awaited.discard(index)
        selector.unregister(peer)
        peer.close()
        self._left[index] = f"{card.host}: {reason}"
        self._say(f"{card.host} joined, then disconnected")
        self._on_event("left", node=card.host, reason=reason)

    # Phase 2: can they reach each other

    def _test_pairs(self, selector: selectors.BaseSelector) -> None:
        seed = self._terms.attempt
        first = plan_first_look(sorted(self._addresses()), seed=seed, within_s=self._terms.tests_s)
        self._results = self._try(selector, first, asks_all=True)
        for plan in (plan_confirmation, functools.partial(plan_large_look, seed=seed)):
            self._results = merge(self._results, self._look_again(selector, plan(self._of_present(self._results))))
        self._quiet = self._look_again(selector, plan_quiet_look(self._of_present(self._results)))
        for _ in range(NUM_RATE_LOOKS):
            self._quiet += self._look_again(selector, plan_rate_look(self._of_present(self._quiet)))

    def _prove_lanes(self, selector: selectors.BaseSelector) -> None:
        """Try the further data interfaces of all nodes, if nothing is wrong with the first ones."""
        here, cards, first = self.roster.cards, dict(self.roster.cards), self._addresses()
        if first.keys() == cards.keys() and not (self._silent or self._left or any(map(has_failed, self._results))):

            def try_pairs(look: RoundOfTests, addresses: Mapping[int, str]) -> list[PairResult]:
                return self._try(selector, look, addresses={i: addresses[i] for i in addresses if i in here})

            second, seed = self._terms.second_network, self._terms.attempt
            self._interfaces, why = prove_lanes(cards, first, try_pairs, second=second, seed=seed)
            if why is not None:
                self._on_event("interface_left_out", reason=why)
                self._say(f"note: {why}")

    def _of_present(self, results: Sequence[PairResult]) -> list[PairResult]:
        """Without the nodes that are known to be silent: to try them again only costs time."""
        absent = self._silent | self._left.keys()
        return [result for result in results if not {result.source, result.target} & absent]

    def _look_again(self, selector: selectors.BaseSelector, look: RoundOfTests | None) -> list[PairResult]:
        if look is None:
            return []
        self._on_event("second_look", pairs=len(look.pairs), reason=look.reason)
        return self._try(selector, look)

    def _try(
        self,
        selector: selectors.BaseSelector,
        look: RoundOfTests,
        *,
        asks_all: bool = False,
        addresses: Mapping[int, str] | None = None,
    ) -> list[PairResult]:
        """Have nodes try each other, and return what they report by the deadline; the silent ones are noted.

        Args:
            addresses: of the nodes, on the network that is tried; None: on the first one.
        """
        assert self._mesh is not None
        is_first, addresses, token = addresses is None, addresses or self._addresses(), self._token
        by_source: dict[int, list[PairTarget]] = {index: [] for index in self.roster.cards} if asks_all else {}
        for source, target in look.pairs:
            # Whoever left since the pairs were chosen is in neither.
            ports = self.roster.cards[target].test_ports if target in addresses and source in addresses else None
            if ports is not None:
                store = self._terms.store_port if target == 0 and is_first else None
                probe_bytes = self._common_mtu(source, target) if (source, target) in look.probed else 0
                found = PairTarget(
                    node_index=target,
                    address=addresses[target],
                    ports=ports,
                    store_port=store,
                    probe_bytes=probe_bytes,
                )
                by_source.setdefault(source, []).append(found)
        self._mesh.admit(token)
        self._reports, self._round = {}, self._round + 1
        nonce = self._terms.run_dir_nonce if asks_all else None

        def order_for(index: int) -> Test:
            return Test(
                token=token,
                targets=tuple(by_source.get(index, ())),
                effort=look.effort,
                within_s=look.within_s,
                is_one_by_one=look.is_one_by_one,
                own_index=index,
                own_address=addresses.get(index),
                run_dir_nonce=nonce,
                round=self._round,
            )

        # Whoever is tried must know the token, too, so everybody gets a Test.
        self._awaited, unsent = set(self.roster.peers), list(self.roster.peers.values())
        for index, peer in self.roster.peers.items():
            with contextlib.suppress(ConnectionError):
                peer.send(order_for(index))
        mtu = mtu_of(self.roster.cards[0])
        self._mesh.start(order_for(0), own_index=0, own_address=addresses.get(0), mtu=mtu, now_s=time.monotonic())
        deadline_s = time.monotonic() + look.within_s + ANSWER_S
        while (self._awaited or self._mesh.results is None) and time.monotonic() < deadline_s:
            self._check_signals()
            next_s = self._mesh.advance(time.monotonic())
            self._turn(selector, min(TICK_S, next_s if next_s is not None else TICK_S))
            unsent = [peer for peer in unsent if _is_unsent(peer)]
        self._silent |= self._awaited if is_first else set()
        tried = {(source, target.node_index) for source, targets in by_source.items() for target in targets}
        results = own_results(self._mesh.results or (), source=0, asked=tried)
        for index, report in self._reports.items():
            results |= own_results(report.results, source=index, asked=tried)
            if report.run_dir is not None:
                self._places[index] = report.run_dir
        cards = self.roster.cards
        return [result for (source, target), result in results.items() if source in cards and target in cards]

    def _common_mtu(self, source: int, target: int) -> int:
        """The smaller MTU of two data interfaces; 0: one of them is not known."""
        return min(mtu_of(self.roster.cards[node]) or 0 for node in (source, target))

    def _addresses(self) -> dict[int, str]:
        """Where each node is tried: its data address, else where its agent comes from."""
        found, peers = {}, self.roster.peers
        own = next((peer.own_address for peer in peers.values()), None)
        for index, card in self.roster.cards.items():
            if card.test_ports is None or card.problem is not None:
                continue
            address = card.data_address
            if address is None:
                address = peers[index].peer if index in peers else own if index == 0 else None
            if address is not None:
                found[index] = address
        return found

    def _cards(self) -> dict[int, Card]:
        """The cards, with what the nodes saw of the run directory since."""
        return {index: with_place(card, self._places.get(index)) for index, card in self.roster.cards.items()}


def dismiss(peers: Mapping[int, Connection], goodbye: Goodbye) -> None:
    """Tell everybody who came that it does not begin, and why; closes the connections."""
    try:
        frame = encode_frame(goodbye)
    except WireError:  # what cannot be said at length is said in short
        frame = encode_frame(Goodbye(exit_code=goodbye.exit_code, summary=goodbye.summary[:MAX_SUMMARY]))
    for peer in peers.values():
        with contextlib.suppress(ConnectionError):
            peer.send_frame(frame)
    deliver(peers.values())
    for peer in peers.values():
        peer.close()


def deliver(peers: Iterable[Connection]) -> None:
    """Give slow agents a moment to receive their last message."""
    deadline_s = time.monotonic() + FAREWELL_S
    waiting = [peer for peer in peers if _is_unsent(peer)]
    while waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)
        waiting = [peer for peer in waiting if _is_unsent(peer)]


def _is_unsent(peer: Connection) -> bool:
    """Whether somebody is still there to take what was said."""
    try:
        return peer.flush()
    except ConnectionError:
        return False


def stop(peers: Mapping[int, Connection], verdict: Verdict, *, group: str | None = None) -> None:
    """Give everybody the verdict; closes the connections. `group`: sent for the job's name, which may be the key."""
    summary = "the job does not start"
    if verdict.findings:
        culprit = verdict.findings[0]
        summary = f"{culprit.cause}: {culprit.node}: {culprit.message}" if culprit.node else culprit.message
    verdict = msgspec.structs.replace(verdict, job=group or verdict.job)
    dismiss(peers, Goodbye(exit_code=verdict.exit_code, summary=summary, verdict=verdict))
