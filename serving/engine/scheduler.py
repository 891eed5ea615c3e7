"""Who runs, with which pages, and which tokens the next step computes."""

import dataclasses
from collections import deque
from typing import NamedTuple

from serving.engine.pages import PagePool
from serving.engine.request import Sample


class Span(NamedTuple):
    """Tokens `first` to `last - 1` of a sample."""

    sample: Sample
    first: int
    last: int

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after it: it ends with the last known token."""
        return self.last == self.sample.n_known


@dataclasses.dataclass
class Plan:
    """The next step: spans to compute once, or samples that draw several tokens."""

    spans: list[Span]
    n_steps: int


class Scheduler:
    """First come, first served; every running sample moves in every step.

    A sample holds pages for what is computed and for what the next step adds. When none is left the
    youngest running sample gives up its own and goes back to the head of the queue: it will be
    recomputed, which changes no bit of it. The oldest is never the victim, so all get done.
    """

    def __init__(self, pool: PagePool, n_slots: int, n_rows: int, n_steps: int):
        self.pool, self.n_rows, self.n_steps = pool, n_rows, n_steps
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        """Oldest first."""
        self.n_preempted = self.n_reused = 0
        self._slots = list(range(n_slots - 1, -1, -1))

    def add(self, sample: Sample) -> None:
        """Queues a sample."""
        self.waiting.append(sample)

    def remove(self, sample: Sample) -> None:
        """Takes a sample out, wherever it is."""
        if sample.slot is None:
            self.waiting.remove(sample)
        else:
            self.running.remove(sample)
            self._give_up(sample)

    def preempt(self, sample: Sample) -> None:
        """Sends a running sample back to the head of the queue; its keys are lost."""
        self.remove(sample)
        self.waiting.appendleft(sample)
        self.n_preempted += 1

    def plan(self) -> Plan | None:
        """Admits what fits and says what to compute; None if there is nothing to do."""
        self._admit()
        if not self.running:
            return None
        if all(sample.computed == sample.n_known - 1 for sample in self.running):
            return self._plan_decoding()
        return Plan(self._plan_spans(), 0)

    def _admit(self) -> None:
        while self.waiting and self._slots:
            sample = self.waiting[0]
            # The last known token is always computed: something must be drawn after it. So is every
            # prompt token that is to be scored.
            reusable = 0 if sample.lacks_prompt_logprobs else sample.n_known - 1
            pages = self.pool.find(sample.known(0, reusable))
            n_new = -(-sample.n_known // self.pool.page_size) - len(pages)
            # One page a running sample stays free, so that a newcomer does not push others out.
            if self.running and n_new > self.pool.n_available - len(self.running):
                self.pool.release(pages)
                return
            self.waiting.popleft()
            sample.pages, sample.n_shared = pages, len(pages)
            sample.computed = len(pages) * self.pool.page_size
            self.n_reused += sample.computed
            sample.slot = self._slots.pop()
            self.running.append(sample)

    def _plan_decoding(self) -> Plan:
        """As many steps as all samples have pages for, at least one."""
        for n_steps in (self.n_steps, 1):
            if self._reserve_all(n_steps, may_preempt=n_steps == 1):
                break
        return Plan([Span(s, s.computed, s.n_known) for s in self.running], n_steps)

    def _reserve_all(self, n_steps: int, *, may_preempt: bool) -> bool:
        for sample in list(self.running):
            if sample.slot is None:  # preempted for an older one
                continue
            last = sample.n_known + min(n_steps, sample.n_left) - 1
            if not self._reserve(sample, last, may_preempt=may_preempt):
                return False
        return True

    def _plan_spans(self) -> list[Span]:
        """One token of each sample that decodes, then chunks of prompts in turn."""
        spans, room = [], self.n_rows
        decoding = [s for s in self.running if s.computed == s.n_known - 1]
        filling = [s for s in self.running if s.computed < s.n_known - 1]
        for sample in (*decoding, *filling):
            if sample.slot is None or room == 0:
                continue
            last = min(sample.n_known, sample.computed + room)
            if self._reserve(sample, last, may_preempt=True):
                spans.append(Span(sample, sample.computed, last))
                room -= last - sample.computed
        return [span for span in spans if span.sample.slot is not None]

    def _reserve(self, sample: Sample, n_tokens: int, *, may_preempt: bool) -> bool:
        """Gets pages for the first `n_tokens` tokens of a running sample."""
        n_pages = -(-n_tokens // self.pool.page_size)
        while len(sample.pages) < n_pages:
            page = self.pool.take()
            if page is not None:
                sample.pages.append(page)
            elif not may_preempt:
                return False
            else:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is sample:
                    return False
        return True

    def _give_up(self, sample: Sample) -> None:
        assert sample.slot is not None
        n_whole = sample.computed // self.pool.page_size
        self.pool.keep(sample.known(0, n_whole * self.pool.page_size), sample.pages[:n_whole])
        self.pool.release(sample.pages)
        self._slots.append(sample.slot)
        sample.slot, sample.pages, sample.computed, sample.n_shared = None, [], 0, 0
