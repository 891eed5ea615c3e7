"""Who runs, with which pages, and which tokens the next step computes."""

import bisect
import operator
from typing import NamedTuple

from serving.engine.pages import PagePool
from serving.engine.sample import Sample
from serving.engine.weights import Weights


class Span(NamedTuple):
    """Tokens `first` to `last - 1` of a sample."""

    sample: Sample
    first: int
    last: int

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after it: it ends with the last known token."""
        return self.last == self.sample.n_known


class Plan(NamedTuple):
    """The next step: spans to compute once, or (`n_steps` above 0) tokens to draw one by one."""

    spans: list[Span]
    n_steps: int


class Scheduler:
    """First come, first served; every running sample moves in every step of its weights.

    A sample holds pages for what is computed and for what the next step adds. When none is left the
    youngest running sample gives up its own and goes back to its place in the queue: it will be
    recomputed, which changes no bit of it. The oldest is never the victim, so all get done.
    """

    def __init__(self, pool: PagePool, *, n_slots: int, n_rows: int, n_steps: int):
        self.pool, self.n_rows, self.n_steps = pool, n_rows, n_steps
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        """Both oldest first."""
        self.n_preempted = self.n_reused = 0
        self._slots = list(range(n_slots - 1, -1, -1))
        self._turn: Weights | None = None

    def add(self, sample: Sample) -> None:
        """Queues a sample."""
        bisect.insort(self.waiting, sample, key=_arrival)

    def remove(self, sample: Sample) -> list[int]:
        """Takes a sample out, wherever it is; returns the pages it held."""
        if sample.slot is None:
            self.waiting.remove(sample)
            return []
        self.running.remove(sample)
        self._slots.append(sample.slot)
        pages, sample.pages = sample.pages, []
        self.pool.release(pages)
        sample.slot, sample.computed, sample.stale = None, 0, False
        return pages

    def preempt(self, sample: Sample) -> None:
        """Sends a running sample back to the queue; what it needs again will be recomputed."""
        self.remove(sample)
        self.add(sample)
        self.n_preempted += 1

    def restart(self) -> None:
        """Preempts whoever runs and forgets all kept pages: what they hold is lost."""
        for sample in list(self.running):
            self.preempt(sample)
        self.pool.forget()

    def computed(self, sample: Sample, n_tokens: int) -> None:
        """Notes that the keys of a sample's first `n_tokens` tokens are in the cache."""
        size = self.pool.page_size
        first = sample.computed // size
        sample.computed = n_tokens
        if not sample.stale:
            for j, key in enumerate(sample.page_keys(n_tokens, size)[first:], start=first):
                self.pool.keep(key, sample.pages[j], sample.weights.root)

    def plan(self) -> Plan | None:
        """Admits what fits and says what to compute; None if there is nothing to do."""
        self._admit()
        while self.running:
            group = self._next_group()
            decodes = all(sample.decodes for sample in group)
            plan = self._plan_decoding(group) if decodes else Plan(self._plan_spans(group), 0)
            if plan.spans:
                return plan
            # All of them were preempted, as others hold the pages: it is the others' turn.
        return None

    def _next_group(self) -> list[Sample]:
        """Running samples of one set of weights, since a step has one; sets take turns."""
        sets = list(dict.fromkeys(sample.weights for sample in self.running))
        before = sets.index(self._turn) if self._turn in sets else -1
        self._turn = sets[(before + 1) % len(sets)]
        return [sample for sample in self.running if sample.weights is self._turn]

    def _admit(self) -> None:
        in_making = {key for sample in self.running for key in self._making(sample)}
        for sample in list(self.waiting):
            if not self._slots:
                return
            keys = self._reusable(sample)
            pages = self.pool.find(keys)
            # Where another sample is computing the next page, waiting for it is cheaper.
            if len(pages) < len(keys) and keys[len(pages)] in in_making:
                self.pool.release(pages)
                continue
            n_new = self.pool.pages_of(sample.n_known) - len(pages)
            # One page a running sample stays free, so that a newcomer does not push others out.
            if self.running and n_new > self.pool.n_available - len(self.running):
                self.pool.release(pages)
                return
            self.waiting.remove(sample)
            sample.pages, sample.slot = pages, self._slots.pop()
            sample.computed = len(pages) * self.pool.page_size
            self.n_reused += sample.computed
            bisect.insort(self.running, sample, key=_arrival)
            in_making.update(self._making(sample))

    def _reusable(self, sample: Sample) -> list[bytes]:
        """Names of the pages that may come from others; the last known token is always computed."""
        if sample.scores_prompt:
            return []
        return sample.page_keys(sample.n_known - 1, self.pool.page_size)

    def _making(self, sample: Sample) -> list[bytes]:
        """Names of the pages that a running sample is about to compute from known tokens."""
        if sample.stale or sample.decodes:
            return []
        size = self.pool.page_size
        return sample.page_keys(sample.n_known, size)[sample.computed // size :]

    def _plan_decoding(self, group: list[Sample]) -> Plan:
        """As many steps as all samples have pages for; at least one, if need be at a victim's."""
        n_steps = self.n_steps
        while n_steps > 1 and self._pages_lacking(group, n_steps) > self.pool.n_available:
            n_steps //= 2
        for sample in group:
            if sample.slot is not None:  # else preempted for an older one
                self._reserve(sample, _n_tokens(sample, n_steps))
        alive = [sample for sample in group if sample.slot is not None]
        return Plan([Span(s, s.computed, s.n_known) for s in alive], n_steps)

    def _pages_lacking(self, group: list[Sample], n_steps: int) -> int:
        return sum(
            max(0, self.pool.pages_of(_n_tokens(sample, n_steps)) - len(sample.pages))
            for sample in group
        )

    def _plan_spans(self, group: list[Sample]) -> list[Span]:
        """One token of each sample that decodes, then as much of the prompts as there is room."""
        spans, room = [], self.n_rows
        for sample in sorted(group, key=lambda s: not s.decodes):
            if sample.slot is None or room == 0:
                continue
            last = min(sample.n_known, sample.computed + room)
            if self._reserve(sample, last):
                spans.append(Span(sample, sample.computed, last))
                room -= last - sample.computed
        return [span for span in spans if span.sample.slot is not None]

    def _reserve(self, sample: Sample, n_tokens: int) -> bool:
        """Gets pages for a sample's first `n_tokens` tokens; False if it was itself the victim."""
        while len(sample.pages) < self.pool.pages_of(n_tokens):
            page = self.pool.take()
            if page is not None:
                sample.pages.append(page)
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sample:
                return False
        return True


_arrival = operator.attrgetter("arrival")


def _n_tokens(sample: Sample, n_steps: int) -> int:
    """Tokens in the cache after so many steps: the last one drawn is not yet among them."""
    return sample.n_known + min(n_steps, sample.n_left) - 1
