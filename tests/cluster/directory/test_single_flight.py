"""Is each missing block computed by one request at a time, and does nobody wait for the dead?"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from directory_sides import chain
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ripresa.cluster.directory.events import Follow, Lead
from ripresa.cluster.directory.single_flight import SingleFlight
from ripresa.workers.replay import ReplayMode

CLAIM_S = 1.0
BOUNDED = (ReplayMode.BOUNDED, None)
EXACT = (ReplayMode.EXACT, None)
PROMPTS = (
    chain("a", 6),
    chain("b", 5, shared=3),
    chain("c", 6, shared=1),
    chain("d", 2, shared=2),
    (*chain("a", 4), *chain("e", 6)[4:]),
)
REQUESTS = ("r0", "r1", "r2", "r3", "r4")


@pytest.fixture
def flight() -> SingleFlight:
    return SingleFlight(CLAIM_S, max_blocks=100)


def test_eight_sub_agents_compute_their_prefix_once(flight: SingleFlight) -> None:
    prompts = [chain(f"agent{n}", 20, shared=15) for n in range(8)]
    answers = [flight.enter(p, 0, f"r{n}", BOUNDED, 0) for n, p in enumerate(prompts)]
    assert answers == [Lead(0, 20, CLAIM_S)] + [Follow("r0", 0, 15, None, None)] * 7
    assert flight.confirm("r0", "w", 1, 0.5)
    for block in prompts[0][:6]:
        flight.computed(block, ())
    flight.release("r0")
    again = [flight.enter(p, 6, f"r{n}", BOUNDED, 1.2) for n, p in enumerate(prompts[1:], 1)]
    assert again == [Lead(6, 20, CLAIM_S)] + [Follow("r1", 6, 15, None, None)] * 6


def test_an_unconfirmed_claim_ends_after_its_second(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 0, "dead", BOUNDED, 0)
    assert isinstance(flight.enter(PROMPTS[0], 0, "r", BOUNDED, 0.9), Follow)
    assert flight.enter(PROMPTS[0], 0, "r", BOUNDED, 1.0) == Lead(0, 6, CLAIM_S)
    assert not flight.confirm("dead", "w", 1, 1.0)
    assert isinstance(flight.enter(PROMPTS[0], 0, "q", BOUNDED, 1.5), Follow)


def test_a_leader_that_asks_again_leads_again(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 0, "r", BOUNDED, 0)
    assert flight.enter(PROMPTS[0], 2, "r", BOUNDED, 0.9) == Lead(2, 6, CLAIM_S)
    assert isinstance(flight.enter(PROMPTS[0], 2, "q", BOUNDED, 1.8), Follow)
    assert len(flight) == 1


def test_a_lost_block_before_a_running_leader_is_led_up_to_it(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 4, "r", BOUNDED, 0)
    assert flight.enter(PROMPTS[0], 1, "q", BOUNDED, 0) == Lead(1, 4, CLAIM_S)
    assert flight.enter(PROMPTS[0], 4, "q", BOUNDED, 0) == Follow("r", 4, 6, None, None)


def test_a_computed_block_that_is_lost_again_is_led_anew(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 0, "r", BOUNDED, 0)
    flight.computed(PROMPTS[0][0], ())
    assert flight.enter(PROMPTS[0], 0, "q", BOUNDED, 0) == Lead(0, 1, CLAIM_S)


def test_a_request_does_not_wait_for_blocks_it_cannot_use(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 0, "r", BOUNDED, 0)
    assert flight.enter(PROMPTS[0], 0, "q", EXACT, 0) == Lead(0, 6, CLAIM_S)
    flight.computed(PROMPTS[0][0], (8,))
    assert isinstance(flight.enter(PROMPTS[0], 0, "p", EXACT, 0), Follow)
    assert flight.enter(PROMPTS[0], 0, "o", BOUNDED, 0) == Lead(0, 1, CLAIM_S)


def test_too_many_claims_leave_requests_uncoordinated() -> None:
    flight = SingleFlight(CLAIM_S, max_blocks=10)
    flight.enter(PROMPTS[0], 0, "r", BOUNDED, 0)
    assert flight.enter(chain("z", 5), 0, "q", BOUNDED, 0) is None
    assert isinstance(flight.enter(PROMPTS[0], 0, "q", BOUNDED, 0), Follow)
    assert flight.enter(chain("z", 5), 0, "q", BOUNDED, 1) == Lead(0, 5, CLAIM_S)
    assert flight.num_blocks == 5


def test_a_claim_ends_after_all_its_blocks_are_there(flight: SingleFlight) -> None:
    flight.enter(PROMPTS[0], 5, "done", BOUNDED, 0)
    flight.enter(chain("z", 1), 0, "r", BOUNDED, 0)
    flight.computed(PROMPTS[0][5], ())
    flight.release("r")
    flight.release("done")
    assert (len(flight), flight.num_blocks) == (0, 0)


class SingleFlightMachine(RuleBasedStateMachine):
    """The books against a list that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.flight = SingleFlight(CLAIM_S, max_blocks=1_000)
        # (request, block) in the order in which they were claimed, while they are
        self.claims: list[tuple[str, bytes]] = []
        self.heard_at: dict[str, float] = {}
        self.worker: dict[str, tuple[str, int]] = {}

    @initialize()
    def begin(self) -> None:
        self.enter("r0", PROMPTS[0], 0)

    def alive(self, request: str) -> bool:
        return self.now < self.heard_at[request] + CLAIM_S

    def leaders(self, block: bytes) -> list[str]:
        return [r for r, claimed in self.claims if claimed == block and self.alive(r)]

    def free(self, request: str) -> None:
        self.claims = [(r, block) for r, block in self.claims if r != request]
        self.worker.pop(request, None)

    def expected(self, hashes: Sequence[bytes], first: int) -> Lead | Follow | None:
        if first >= len(hashes):
            return None
        leaders = [self.leaders(block) for block in hashes]
        stop = first
        while stop < len(hashes) and leaders[stop] == leaders[first]:
            stop += 1
        if not leaders[first]:
            return Lead(first, stop, CLAIM_S)
        (leader,) = leaders[first]
        return Follow(leader, first, stop, *self.worker.get(leader, (None, None)))

    @rule(
        request=st.sampled_from(REQUESTS),
        hashes=st.sampled_from(PROMPTS),
        first=st.integers(0, 6),
    )
    def enter(self, request: str, hashes: tuple[bytes, ...], first: int) -> None:
        self.free(request)
        expected = self.expected(hashes, first)
        assert self.flight.enter(hashes, first, request, BOUNDED, self.now) == expected
        if isinstance(expected, Lead):
            self.claims += [(request, block) for block in hashes[expected.first : expected.stop]]
            self.heard_at[request] = self.now
        elif expected is not None:
            assert expected.request != request
            assert self.alive(expected.request)

    @rule(
        request=st.sampled_from(REQUESTS),
        worker=st.sampled_from("vw"),
        incarnation=st.integers(1, 2),
    )
    def confirm(self, request: str, worker: str, incarnation: int) -> None:
        confirmed = self.flight.confirm(request, worker, incarnation, self.now)
        led = any(r == request for r, _ in self.claims) and self.alive(request)
        # Once all its blocks are computed a leader may be told either.
        assert confirmed or not led
        if led:
            self.heard_at[request] = self.now
            self.worker[request] = (worker, incarnation)

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request: str) -> None:
        self.flight.release(request)
        self.free(request)

    @rule(worker=st.sampled_from("vw"), incarnation=st.integers(1, 2))
    def lose(self, worker: str, incarnation: int) -> None:
        self.flight.release_worker(worker, incarnation)
        for request, by in list(self.worker.items()):
            if by == (worker, incarnation):
                self.free(request)

    @rule(block=st.sampled_from(sorted({block for prompt in PROMPTS for block in prompt})))
    def compute(self, block: bytes) -> None:
        self.flight.computed(block, ())
        self.claims = [(r, claimed) for r, claimed in self.claims if claimed != block]

    @rule(seconds=st.sampled_from((0.25, 0.5, 1.0)))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for request in {r for r, _ in self.claims}:
            if not self.alive(request):
                self.free(request)

    @invariant()
    def no_block_has_two_leaders(self) -> None:
        for block in {block for _, block in self.claims}:
            assert len(self.leaders(block)) == 1


SingleFlightMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestSingleFlight = SingleFlightMachine.TestCase
